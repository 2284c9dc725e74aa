"""The tokens of a rollout in a terminal: the text that the model read and wrote, and a table of the tokens."""

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from agentgym.cli.output import say
from agentgym.store.reader import RolloutStore, StoredRollout
from agentgym.store.token_window import tokens_of
from agentgym.store.vocabulary import shown_token
from agentgym.types.rollout import Segment
from agentgym.types.transcript import counted, one_line, printable

UNNAMED = "this run did not store the texts of its token ids, so they are shown as numbers"
COLUMNS = ("token", "id", "text", "log-prob", "ratio", "advantage")


class Piece(NamedTuple):
    """A line or a longer text, and the style in which a terminal shows it."""

    text: str
    style: str = ""


def print_pieces(pieces: Iterable[Piece]) -> None:
    """Print each piece on its own lines, in its style if stdout is a terminal."""
    if not sys.stdout.isatty():
        for piece in pieces:
            say(piece.text)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for piece in pieces:
        console.print(Text(printable(piece.text), style=piece.style), soft_wrap=True)


def read_text(store: RolloutStore, found: StoredRollout) -> Iterator[Piece]:
    """Yield the text of each segment, decoded from its token ids: the prompt, the turns, and what came between them."""
    for place, segment in enumerate(found.rollout.segments):
        yield _heading(place, segment)
        ids = segment.token_ids.tolist()
        known = store.token_bytes(segment.model, set(ids))
        if not known:
            yield Piece(UNNAMED)
        for start, stop, turn in _spans(segment):
            what = "prompt" if not start else "context" if turn is None else f"turn {turn}, sampled"
            yield Piece(f"--- {what}: {counted(stop - start, 'token')}", "bold")
            text = b"".join(known.get(token, b"#%d " % token) for token in ids[start:stop])
            yield Piece(shown_token(text), "" if turn is None else "green")


def _spans(segment: Segment) -> Iterator[tuple[int, int, int | None]]:
    """Yield the start, the stop and the turn of each span of tokens; the turn is None if they were not sampled."""
    at = 0
    for turn in segment.turns:
        if at < turn.start:
            yield at, turn.start, None
        yield turn.start, turn.stop, turn.number
        at = turn.stop
    if at < len(segment.token_ids):
        yield at, len(segment.token_ids), None


def token_rows(store: RolloutStore, found: StoredRollout, *, full: bool) -> Iterator[Piece]:
    """Yield the lines of a table of the tokens of each segment.

    A span of tokens that were not sampled is one line, unless `full` is set.
    """
    for place, segment in enumerate(found.rollout.segments):
        yield _heading(place, segment)
        window = tokens_of(store, found, place, 0, len(segment.token_ids))
        if not window["named"]:
            yield Piece(UNNAMED)
        texts = [repr(text) for text in window["texts"]]
        width = min(max(map(len, texts), default=0), 40)
        yield Piece(_row(COLUMNS, width), "bold")
        for sampled, run in groupby(range(window["total"]), key=window["sampled"].__getitem__):
            span = [*run]
            if not sampled and not full:
                yield Piece(
                    f"{span[0]:>7} to {span[-1]}: {counted(len(span), 'token')}, not sampled; --full lists them", "dim"
                )
                continue
            for token in span:
                yield _token(window, token, texts[token], width)


def _token(window: dict[str, Any], token: int, text: str, width: int) -> Piece:
    logprob, ratio, advantage = (window[name][token] for name in ("logprobs", "ratios", "advantages"))
    cells = (
        str(token),
        str(window["ids"][token]),
        text,
        "" if logprob is None else f"{logprob:.4f}",
        "" if ratio is None else f"{ratio:.4f}",
        "not trained" if window["sampled"][token] and window["trained"][token] == 0 else _number(advantage),
    )
    style = "dim" if not window["sampled"][token] else "" if not advantage else "green" if advantage > 0 else "red"
    return Piece(_row(cells, width), style)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"


def _row(cells: tuple[str, ...], width: int) -> str:
    token, token_id, text, *numbers = cells
    row = f"{token:>7} {token_id:>7}  {one_line(text):<{width}} " + " ".join(f"{cell:>9}" for cell in numbers)
    return row.rstrip()


def _heading(place: int, segment: Segment) -> Piece:
    who = "".join([f", role {segment.role}" if segment.role else "", f", by {segment.model}" if segment.model else ""])
    size, sampled = counted(len(segment.token_ids), "token"), int(np.count_nonzero(segment.sampled))
    return Piece(one_line(f"segment {place}, {segment.kind}{who}: {size}, {sampled} of them sampled"), "bold")
