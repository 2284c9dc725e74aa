"""The tokens of a stored segment, each with everything that the store knows about it."""

from typing import Any

import numpy as np

from agentgym.store.reader import RolloutStore, StoredRollout
from agentgym.store.vocabulary import shown_token
from agentgym.types.rollout import Segment


def tokens_of(store: RolloutStore, found: StoredRollout, place: int, start: int, count: int) -> dict[str, Any]:
    """Return at most `count` tokens of a segment, from token `start` on, as lists with one entry per token.

    Args:
        store: The store that contains the rollout.
        found: The rollout.
        place: Index of the segment.
        start: Index of the first token.
        count: Maximum number of tokens.

    Returns:
        The number of the segment's tokens (`total`), the index of the first one (`from`), whether the store knows
        their texts (`named`), and the lists `texts`, `ids`, `sampled` (0 or 1), `trained` (0, 1 or None if unknown),
        `logprobs` (of the engine), `ratios` (the trainer's probability divided by the engine's), `advantages`,
        `versions` (of the policy) and `turns`. Entries of a token that was not sampled are None.
    """
    segment = found.rollout.segments[place]
    total = len(segment.token_ids)
    start = min(start, total)
    window = slice(start, min(start + count, total))
    ids = segment.token_ids[window].tolist()
    sampled = segment.sampled[window]
    known = store.token_bytes(segment.model, set(ids))
    trained, ratios = _trained_window(found, place, window)
    turns, versions, advantages = _by_turn(segment, found.advantages[place], window)
    logprobs = [float(value) if there else None for value, there in zip(segment.logprobs[window], sampled, strict=True)]
    return {
        "total": total,
        "from": start,
        "texts": [shown_token(known[token]) if token in known else f"#{token}" for token in ids],
        "ids": ids,
        "sampled": sampled.astype(int).tolist(),
        "trained": trained,
        "logprobs": [None if value is None else round(value, 5) for value in logprobs],
        "ratios": ratios,
        "advantages": advantages,
        "versions": versions,
        "turns": turns,
        "named": bool(known),
    }


def _trained_window(found: StoredRollout, place: int, window: slice) -> tuple[list[int | None], list[float | None]]:
    """Return whether each token of the window was trained on, and the trainer's probability divided by the engine's.

    Both are None if they are unknown. Of a segment that was trained in part, the store doesn't tell which tokens were.
    """
    segment, scored = found.rollout.segments[place], found.trainer_logprobs[place]
    advantages = found.advantages[place]
    was = None if advantages == () else int(advantages is not None)
    sampled = segment.sampled[window]
    trained = [was if there else 0 for there in sampled]
    ratios: list[float | None] = [None] * len(sampled)
    if scored is not None:
        skipped = int(segment.sampled[: window.start].sum())
        places = np.flatnonzero(sampled)
        here = scored[skipped : skipped + len(places)] - segment.logprobs[window][places]
        for at, value in zip(places.tolist(), np.exp(np.clip(here, -60, 60)).tolist(), strict=True):
            ratios[at] = round(value, 5)
    return trained, ratios


def _by_turn(
    segment: Segment, advantages: tuple[float, ...] | None, window: slice
) -> tuple[list[int | None], list[int | None], list[float | None]]:
    """Return the turn, policy version and advantage of each token of the window; all are None if it wasn't sampled."""
    size = window.stop - window.start
    turns: list[int | None] = [None] * size
    versions: list[int | None] = [None] * size
    gained: list[float | None] = [None] * size
    for place, turn in enumerate(segment.turns):
        first, last = max(turn.start, window.start), min(turn.stop, window.stop)
        if first >= last:
            continue
        here = slice(first - window.start, last - window.start)
        turns[here] = [turn.number] * (last - first)
        if advantages:
            gained[here] = [advantages[place]] * (last - first)
        for version in turn.versions:
            begin = max(turn.start + version.start, window.start)
            if begin < last:
                versions[begin - window.start : last - window.start] = [version.version] * (last - begin)
    return turns, versions, gained
