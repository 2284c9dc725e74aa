"""The time of a rollout in pieces: sampling, waiting, tools and scoring."""

from typing import Any

from agentgym.types import Rollout


def timeline(played: Rollout) -> tuple[list[dict[str, Any]], bool]:
    """The pieces in seconds from the rollout's begin, and whether they are where they were.

    Where no times of day are known, turns are laid one after another in the order of sampling, and what is left of the
    rollout's time follows as its scoring.
    """
    pieces: list[dict[str, Any]] = []
    clock = 0.0
    turns = [(segment.index, turn) for segment in played.segments for turn in segment.turns]
    for index, turn in sorted(turns, key=lambda found: found[1].number):
        for what, seconds in (("generate", turn.seconds), ("tool", turn.env_seconds)):
            if seconds > 0:
                pieces.append(_piece(index, turn.number, what, clock, clock + seconds))
                clock += seconds
    whole = float(played.metrics.get("seconds", 0.0))
    if whole > clock and pieces:
        pieces.append(_piece(pieces[-1]["segment"], pieces[-1]["turn"], "score", clock, whole))
    return pieces, False


def _piece(segment: int, turn: int | None, what: str, start: float, stop: float) -> dict[str, Any]:
    return {"segment": segment, "turn": turn, "what": what, "from_s": round(start, 4), "to_s": round(stop, 4)}
