"""The time of a rollout in pieces: what it waited for, sampled, and spent in tools and scoring."""

from collections.abc import Iterator
from typing import Any

from agentgym.types.rollout import Rollout, Turn

Piece = dict[str, Any]


def timeline(rollout: Rollout) -> tuple[list[Piece], bool]:
    """Return the pieces in seconds from the rollout's begin, and whether they stand where they were.

    "open" is the time before the first turn (its sandbox, the env's reset), "wait" the time in front of the engine,
    "generate" that of the engine, "tool" that until the env's answer, and "score" all behind the last turn: the score,
    and the end of the env and its sandbox. Where it is not known when turns were asked for, as of older stores, they
    are laid one after another, and "score" is what is left of the whole.
    """
    turns = sorted(
        ((segment.index, turn) for segment in rollout.segments for turn in segment.turns),
        key=lambda found: found[1].number,
    )
    exact = bool(turns) and all(turn.asked_at is not None for _, turn in turns)
    pieces, clock = list[Piece](), 0.0
    if exact:
        clock = turns[0][1].asked_at or 0.0
        pieces += _piece(turns[0][0], None, "open", 0.0, clock)
    for index, turn in turns:
        begin = clock if turn.asked_at is None or not exact else turn.asked_at
        pieces += _of_turn(index, turn, begin)
        clock = max(clock, begin + turn.seconds + turn.env_seconds)
    whole = sum(float(rollout.metrics.get(name, 0.0)) for name in ("seconds", "branch_seconds", "held_seconds"))
    if turns:
        pieces += _piece(turns[-1][0], None, "score", clock, whole)
    return pieces, exact


def _of_turn(segment: int, turn: Turn, begin: float) -> Iterator[Piece]:
    waited = min(turn.waited, turn.seconds)
    answered = begin + turn.seconds
    yield from _piece(segment, turn.number, "wait", begin, begin + waited)
    yield from _piece(segment, turn.number, "generate", begin + waited, answered)
    yield from _piece(segment, turn.number, "tool", answered, answered + turn.env_seconds)


def _piece(segment: int, turn: int | None, what: str, start: float, stop: float) -> Iterator[Piece]:
    """One piece; none where it takes no time."""
    if stop - start > 1e-6:
        yield {"segment": segment, "turn": turn, "what": what, "from_s": round(start, 6), "to_s": round(stop, 6)}
