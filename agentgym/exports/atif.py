"""Rollouts as trajectories of ATIF v1.8, the Agent Trajectory Interchange Format of Harbor.

::

    rollout           ATIF
    root segment      the trajectory; each compaction of it, or new rendering, is a trajectory in a file of its own
    fork, sub-agent   an embedded trajectory, which a result of the turn that opened it refers to
    turn              a step of the agent, with its ids and log-probabilities
    env's answer      the results in that step; what is no tool's message is a step of the user or the system

What ATIF has no field for is under `extra.agentgym`, so that `atif_reader` gives back the rollout as it was.
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
"""The kinds of segments that take the place of the one before."""


def documents(stored: StoredRollout, name: str, model: str | None) -> dict[str, dict[str, Any]]:
    """Return a rollout as trajectories by the names of their files: `name`, and one for each continuation of it.

    `model` is the name of the policy's model. ValueError for a rollout without a segment.
    """
    rollout = stored.rollout
    if not rollout.segments:
        raise ValueError(f"rollout {rollout.rollout_id!r}: it has no segment")
    chain = _chain(rollout, rollout.segments[0])
    files = [f"{name}.json", *(f"{name}.cont-{number}.json" for number in range(1, len(chain)))]
    made = [_document(rollout, segment, model) for segment in chain]
    for document, following in zip(made, files[1:], strict=False):
        document["continued_trajectory_ref"] = following
    made[0]["extra"] = {"reward": rollout.reward, OURS: made[0]["extra"][OURS] | {"rollout": _fields(stored)}}
    return dict(zip(files, made, strict=True))


def _fields(stored: StoredRollout) -> dict[str, Any]:
    """What is known of the whole rollout, beside its id and its reward."""
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
    """The segment, and those that took its place one after the other."""
    chain = [first]
    while (following := _continuation(rollout, chain[-1])) is not None:
        chain.append(following)
    return chain


def _continuation(rollout: Rollout, segment: Segment) -> Segment | None:
    return next((s for s in rollout.segments if s.parent == segment.index and s.kind in CONTINUED), None)


def _document(rollout: Rollout, segment: Segment, model: str | None) -> dict[str, Any]:
    """One segment as a trajectory, with the forks and sub-agents that it opened embedded."""
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
    """A fork or a sub-agent and its continuations, which name each other by their trajectory_id."""
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
    """Whether its ids are those of a model, and do not only count."""
    return all(version.version != NO_POLICY for turn in segment.turns for version in turn.versions)


def _steps(rollout: Rollout, segment: Segment) -> tuple[list[dict[str, Any]], list[tuple[Turn, dict[str, Any]]]]:
    """The steps of a segment in their order, and those of its turns."""
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
    """Append a message that no turn sampled: a tool's to the step before, any other one as a step."""
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
        # As text a float32 has only as many digits as tell it from every other one.
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
    """Refer to a fork or a sub-agent from the turn that opened it: the last one that was sampled before it."""
    if not child.turns:
        return
    before = [step for turn, step in turn_steps if turn.number < child.turns[0].number]
    if before:
        results = before[-1].setdefault("observation", {"results": []})["results"]
        results.append({"subagent_trajectory_ref": [{"trajectory_id": trajectory_id}]})
