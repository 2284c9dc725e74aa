"""Rollouts as trajectories of ATIF v1.8, the Agent Trajectory Interchange Format of Harbor.

::

    rollout           ATIF
    root segment      the trajectory; each compaction or new rendering of it is a trajectory in a separate file
    fork, sub-agent   an embedded trajectory, which a result of the turn that opened it refers to
    turn              a step of the agent, with its ids and log-probabilities
    env's answer      the results in that step; a message that isn't a tool's is a step of the user or the system

Data for which ATIF has no field is stored under `extra.agentgym`, so that `atif_reader` can restore the rollout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from agentgym.engines.messages import NO_POLICY
from agentgym.exports.atif_messages import OURS, result_of, step_of
from agentgym.store.reader import StoredRollout
from agentgym.store.run_settings import versions
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout, Segment, Turn

VERSION = "ATIF-v1.8"
CONTINUED = ("compaction", "rerender")
"""Kinds of segments that replace the previous segment."""


def documents(stored: StoredRollout, name: str, model: str | None) -> dict[str, dict[str, Any]]:
    """Return a rollout as trajectories by file name: `name`, and one file for each continuation of it.

    A continuation is a segment that replaced the previous one, such as a compaction.

    Args:
        stored: The rollout.
        name: Name of the first file, without its suffix.
        model: Name of the policy's model, if known.

    Raises:
        ValueError: If the rollout has no segment.
    """
    rollout = stored.rollout
    if not rollout.segments:
        raise ValueError(f"rollout {rollout.rollout_id!r} has no segments")
    chain = _chain(rollout, rollout.segments[0])
    files = [f"{name}.json", *(f"{name}.cont-{number}.json" for number in range(1, len(chain)))]
    made = [_document(rollout, segment, model) for segment in chain]
    for document, following in zip(made, files[1:], strict=False):
        document["continued_trajectory_ref"] = following
    made[0]["extra"] = {"reward": rollout.reward, OURS: made[0]["extra"][OURS] | {"rollout": _fields(stored)}}
    return dict(zip(files, made, strict=True))


def _fields(stored: StoredRollout) -> dict[str, Any]:
    """Return the data about the whole rollout besides its id and reward."""
    rollout = stored.rollout
    return {
        "phase": stored.phase,
        "step": stored.step,
        "group_id": rollout.group_id,
        "stop_reason": rollout.stop_reason,
        "rewards": dict(rollout.rewards),
        "role_rewards": dict(rollout.role_rewards),
        "metrics": dict(rollout.metrics),
        "failed_cases": dict(rollout.failed_cases),
        "sandbox": rollout.sandbox,
        "failure": None if rollout.failure is None else asdict(rollout.failure),
        "branches": [asdict(branch) for branch in rollout.branches],
    }


def _chain(rollout: Rollout, first: Segment) -> list[Segment]:
    """Return the segment and the ones that successively replaced it."""
    chain = [first]
    while (following := _continuation(rollout, chain[-1])) is not None:
        chain.append(following)
    return chain


def _continuation(rollout: Rollout, segment: Segment) -> Segment | None:
    return next((s for s in rollout.segments if s.parent == segment.index and s.kind in CONTINUED), None)


def _document(rollout: Rollout, segment: Segment, model: str | None) -> dict[str, Any]:
    """Return one segment as a trajectory, with the forks and sub-agents that it opened embedded."""
    steps, turn_steps = _steps(rollout, segment)
    agent: dict[str, Any] = {"name": "agentgym", "version": versions()["agentgym"] or "unknown"}
    if segment.model or model:
        agent["model_name"] = segment.model or model
    if segment.tools:
        agent["tool_definitions"] = list(segment.tools)
    document: dict[str, Any] = {
        "schema_version": VERSION,
        "session_id": rollout.rollout_id,
        "trajectory_id": _trajectory_id(rollout, segment),
        "agent": agent,
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(turn.start for turn in segment.turns),
            "total_completion_tokens": int(segment.sampled.sum()),
        },
        "extra": {OURS: _segment_fields(segment)},
    }
    following = _continuation(rollout, segment)
    opened = [s for s in rollout.segments if s.parent == segment.index and s is not following]
    for child in opened:
        _refer(child, turn_steps, _trajectory_id(rollout, child))
    if embedded := [document for child in opened for document in _embedded(rollout, child, model)]:
        document["subagent_trajectories"] = embedded
    return document


def _embedded(rollout: Rollout, first: Segment, model: str | None) -> list[dict[str, Any]]:
    """Return the trajectories of a fork or sub-agent and its continuations. Each names the next one's trajectory_id."""
    made = [_document(rollout, segment, model) for segment in _chain(rollout, first)]
    for document, following in pairwise(made):
        document["continued_trajectory_ref"] = following["trajectory_id"]
    return made


def _trajectory_id(rollout: Rollout, segment: Segment) -> str:
    return f"{rollout.rollout_id}#{segment.index}"


def _segment_fields(segment: Segment) -> dict[str, Any]:
    behind = segment.turns[-1].stop if segment.turns else 0
    fields: dict[str, Any] = {name: getattr(segment, name) for name in ("index", "parent", "kind", "role", "model")}
    fields["trained"] = segment.trained
    if segment.branch is not None:
        fields["branch"] = segment.branch
    if _has_ids(segment):
        fields["last_token_ids"] = segment.token_ids[behind:].tolist()
    else:
        fields["last_tokens"] = len(segment.token_ids) - behind
    return fields


def _has_ids(segment: Segment) -> bool:
    """Return whether the segment's ids come from a model; otherwise they are only counters."""
    return all(version.version != NO_POLICY for turn in segment.turns for version in turn.versions)


def _steps(rollout: Rollout, segment: Segment) -> tuple[list[dict[str, Any]], list[tuple[Turn, dict[str, Any]]]]:
    """Return a segment's steps in order, and in addition each of its turns with its step."""
    steps: list[dict[str, Any]] = []
    turn_steps: list[tuple[Turn, dict[str, Any]]] = []
    held = [] if segment.parent is None else _said(rollout.segments[segment.parent])
    for message in segment.prompt_messages:
        _add(steps, message, copied=message["role"] == "assistant" or message in held)
    has_ids = _has_ids(segment)
    for turn in segment.turns:
        turn_steps.append((turn, _turn_step(segment, turn, has_ids)))
        steps.append(turn_steps[-1][1])
        for message in turn.env_messages:
            _add(steps, message, copied=message["role"] == "assistant")
    for number, step in enumerate(steps, 1):
        step["step_id"] = number
    return steps, turn_steps


def _said(segment: Segment) -> Sequence[Message]:
    return segment.transcript().messages


def _add(steps: list[dict[str, Any]], message: Message, *, copied: bool) -> None:
    """Append a message that isn't a turn.

    A tool's message becomes a result of the previous step, and any other message a separate step. If the previous
    step is neither the agent's nor already has results, or if there is none, an empty step of the system carries the
    result.
    """
    if message["role"] != "tool":
        steps.append({"step_id": 0, **step_of(message), **({"is_copied_context": True} if copied else {})})
        return
    if not steps or (steps[-1]["source"] != "agent" and "observation" not in steps[-1]):
        steps.append({"step_id": 0, "source": "system", "message": ""})
    step = steps[-1]
    step.setdefault("observation", {"results": []})["results"].append(result_of(message, step))


def _turn_step(segment: Segment, turn: Turn, has_ids: bool) -> dict[str, Any]:
    step = {"step_id": 0, **step_of(turn.message)}
    metrics: dict[str, Any] = {"prompt_tokens": turn.start, "completion_tokens": turn.stop - turn.start}
    if has_ids:
        metrics["prompt_token_ids"] = segment.token_ids[: turn.start].tolist()
        metrics["completion_token_ids"] = segment.token_ids[turn.start : turn.stop].tolist()
        # str() gives the fewest digits that identify the float32; float() alone would print them as a float64.
        metrics["logprobs"] = [float(str(value)) for value in segment.logprobs[turn.start : turn.stop]]
    fields = {
        "number": turn.number,
        "finish_reason": turn.finish_reason,
        "versions": [list(version) for version in turn.versions],
        "seconds": turn.seconds,
        "env_seconds": turn.env_seconds,
        "waited": turn.waited,
        "asked_at": turn.asked_at,
        "reward": turn.reward,
    }
    kept: Mapping[str, Any] = step.get("extra", {}).get(OURS, {})
    return step | {"metrics": metrics, "llm_call_count": 1, "extra": {OURS: {**kept, **fields}}}


def _refer(child: Segment, turn_steps: Sequence[tuple[Turn, dict[str, Any]]], trajectory_id: str) -> None:
    """Add a reference to a fork or sub-agent to the turn that opened it: the last turn sampled before it."""
    if not child.turns:
        return
    before = [step for turn, step in turn_steps if turn.number < child.turns[0].number]
    if before:
        results = before[-1].setdefault("observation", {"results": []})["results"]
        results.append({"subagent_trajectory_ref": [{"trajectory_id": trajectory_id}]})
