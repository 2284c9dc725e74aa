"""One rollout as the page shows it: its outcome, its segments with their turns, and its neighbors."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from agentgym.store.reader import RolloutStore, StoredRollout
from agentgym.store.suspicious import SIGNS
from agentgym.store.table import Filters, TableRow, rows_of
from agentgym.store.token_window import tokens_of
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
    return tokens_of(store, found, place, start, count)
