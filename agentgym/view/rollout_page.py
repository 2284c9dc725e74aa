"""One rollout as the page shows it: its outcome, its segments with their turns, and its neighbors."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from agentgym.store.reader import RolloutStore, StoredRollout
from agentgym.store.suspicious import SIGNS
from agentgym.store.table import Filters, TableRow, rows_of
from agentgym.store.vocabulary import shown_token
from agentgym.types.rollout import Segment, Turn
from agentgym.view.answers import Refused
from agentgym.view.blocks import Colors, message_blocks
from agentgym.view.timeline import timeline


def table_row(row: TableRow, envs: Sequence[str]) -> dict[str, Any]:
    """Return a row of the rollout table as JSON fields; `envs` are the names of the run's envs (see `env_of`)."""
    found = row.summary
    return {
        "number": found.number,
        "phase": found.phase,
        "step": found.step,
        "env": env_of(found.group_id, envs),
        "task": found.group_id,
        "rollout_id": found.rollout_id,
        "reward": found.reward,
        "stop_reason": found.stop_reason,
        "failure": found.failure,
        "turns": found.turns,
        "tokens": found.tokens,
        "seconds": found.seconds,
        "tool_calls": row.tool_calls,
        "tool_errors": row.tool_errors,
        "suspicious": list(found.suspicious),
        "snippet": None,
    }


def env_of(group_id: str, envs: Sequence[str]) -> str | None:
    """Return the env of a task, or None if it is unknown.

    The env is the only one of the run, or the mixture member whose name the task's id starts with.
    """
    if len(envs) < 2:
        return envs[0] if envs else None
    name = group_id.partition("/")[0]
    return name if name in envs else None


def stored(store: RolloutStore, number: int) -> StoredRollout:
    """Return the rollout with this number.

    Raises:
        Refused: If it doesn't exist.
    """
    if (found := store.get(number)) is not None:
        return found
    raise Refused(f"there is no rollout {number} in this run; a resumed run may have removed it", 404)


def rollout_page(store: RolloutStore, number: int, envs: Sequence[str]) -> dict[str, Any]:
    """Return everything about one rollout except its tokens; `envs` are the names of the run's envs (see `env_of`)."""
    found = stored(store, number)
    rollout, failure = found.rollout, found.rollout.failure
    (spans, exact), colors = timeline(rollout), Colors()
    return {
        "number": number,
        "phase": found.phase,
        "step": found.step,
        "env": env_of(rollout.group_id, envs),
        "rollout_id": rollout.rollout_id,
        "task": rollout.group_id,
        "reward": rollout.reward,
        "rewards": dict(rollout.rewards),
        "role_rewards": dict(rollout.role_rewards),
        "metrics": dict(rollout.metrics),
        "stop_reason": rollout.stop_reason,
        "failure": None if failure is None else asdict(failure),
        "sandbox": rollout.sandbox,
        "failed_cases": dict(rollout.failed_cases),
        "suspicious": [{"name": name, "why": SIGNS.get(name, "")} for name in found.suspicious],
        "logprob_gap": found.logprob_gap,
        "task_fields": store.task(rollout.group_id),
        "segments": [
            _segment(segment, advantages, gaps, colors)
            | {"branch": None if segment.branch is None else str(rollout.branches[segment.branch])}
            for segment, advantages, gaps in zip(rollout.segments, found.advantages, found.turn_gaps, strict=True)
        ],
        "timeline": spans,
        "exact": exact,
        "neighbors": _neighbors(store, found),
    }


def _segment(
    segment: Segment, advantages: tuple[float, ...] | None, gaps: tuple[float, ...] | None, colors: Colors
) -> dict[str, Any]:
    return {
        "index": segment.index,
        "parent": segment.parent,
        "kind": segment.kind,
        "role": segment.role,
        "model": segment.model,
        "trained": segment.trained,
        "tokens": len(segment.token_ids),
        "sampled": int(segment.sampled.sum()),
        "tools": list(segment.tools),
        "opening": [message_blocks(message, colors) for message in segment.prompt_messages],
        "turns": [
            _turn(turn, advantages[place] if advantages else None, gaps[place] if gaps else None, colors)
            for place, turn in enumerate(segment.turns)
        ],
    }


def _turn(turn: Turn, advantage: float | None, gap: float | None, colors: Colors) -> dict[str, Any]:
    return {
        "number": turn.number,
        "start": turn.start,
        "stop": turn.stop,
        "finish_reason": turn.finish_reason,
        "versions": [list(version) for version in turn.versions],
        "seconds": turn.seconds,
        "env_seconds": turn.env_seconds,
        "reward": turn.reward,
        "advantage": advantage,
        "gap": gap,
        "message": message_blocks(turn.message, colors),
        "answers": [message_blocks(message, colors) for message in turn.env_messages],
    }


def _neighbors(store: RolloutStore, found: StoredRollout) -> dict[str, Any]:
    before = store.query("SELECT max(number) FROM rollouts WHERE number < ?", found.number)[0][0]
    behind = store.query("SELECT min(number) FROM rollouts WHERE number > ?", found.number)[0][0]
    filters = Filters(phase=found.phase, task=found.rollout.group_id, step_from=found.step, step_to=found.step)
    return {
        "previous": before,
        "next": behind,
        "group": [row.summary.number for row in rows_of(store, filters)],
    }


def token_window(store: RolloutStore, number: int, place: int, start: int, count: int) -> dict[str, Any]:
    """Return at most `count` tokens of the segment at index `place`, from token `start` on.

    Each token comes with everything known about it.
    """
    found = stored(store, number)
    if place >= len(found.rollout.segments):
        raise Refused(f"segment: rollout {number} has {len(found.rollout.segments)} segments, got {place}", 404)
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
