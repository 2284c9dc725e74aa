"""The time of a rollout in pieces: waiting, generating, running tools and scoring."""

from collections.abc import Iterator
from typing import Any

from agentgym.types.rollout import Rollout, Turn

Piece = dict[str, Any]


def timeline(rollout: Rollout) -> tuple[list[Piece], bool]:
    """Return the pieces in seconds from the rollout's start, and whether their positions are exact.

    The pieces are named as follows:

    - "open": the time before the first turn, in which the sandbox is leased and the env is reset.
    - "wait": the time before the engine accepts the request for a turn.
    - "generate": the engine's time for the turn.
    - "tool": the time from then until the env's response.
    - "score": the time after the last turn, for scoring and for closing the env and its sandbox.

    Older stores don't record when turns were requested. The pieces are then placed one after another, without "open",
    and "score" is the rest of the total time.
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
    """Yield one piece, or nothing if it takes no time."""
    if stop - start > 1e-6:
        yield {"segment": segment, "turn": turn, "what": what, "from_s": round(start, 6), "to_s": round(stop, 6)}
