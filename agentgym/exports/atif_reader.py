"""Rollouts from trajectories of ATIF, those of agentgym and those of other agents."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from agentgym.chat.message_chat import FILL, estimated_tokens
from agentgym.engines.messages import NO_POLICY
from agentgym.errors import Failure
from agentgym.exports.atif_images import put_back
from agentgym.exports.atif_messages import message_of, ours, tool_message_of
from agentgym.messages import Message
from agentgym.store.rows import branch_of
from agentgym.types import Rollout, Segment, SegmentKind, Turn, Version

FAMILY = "ATIF-v1."
"""The beginning of the versions that are read."""
PHASE = "eval"
"""The phase of a rollout that another agent played."""
UNSCORED = Failure(type="AgentGymError", message="its file says no reward; `extra.reward` of a trajectory is one")
"""The failure of a rollout without a reward: nobody knows what it was worth."""


class _Call(BaseModel):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class _Result(BaseModel):
    source_call_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    subagent_trajectory_ref: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class _Observation(BaseModel):
    results: list[_Result]


class _Metrics(BaseModel):
    prompt_tokens: int | None = Field(None, ge=0)
    completion_tokens: int | None = Field(None, ge=0)
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[FiniteFloat] | None = None


class _Step(BaseModel):
    source: Literal["system", "user", "agent"]
    message: str | list[dict[str, Any]]
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class _Agent(BaseModel):
    name: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class _Trajectory(BaseModel):
    """What is read of a document; other fields of ATIF are let be."""

    schema_version: str = Field(pattern=rf"^{FAMILY.replace('.', '[.]')}")
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: _Agent
    steps: list[_Step] = Field(min_length=1)
    continued_trajectory_ref: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list["_Trajectory"] | None = None


class Imported(NamedTuple):
    """A rollout that was read, and what a store keeps beside it."""

    rollout: Rollout
    phase: str
    step: int
    model: str | None
    """The model that its file names."""


def read_atif(path: Path) -> Imported:
    """Return the rollout of a trajectory's file, and of the files of its continuations.

    A step of the agent is a turn, but for those that are copied context and those that no model wrote. Its ids are
    taken where each turn has ids and log-probabilities, and begins with what stood before; elsewhere the rollout is as
    one of an endpoint, whose ids only count. ValueError for a file that is no trajectory; the message names the field.
    """
    root = _loaded(path)
    pieces = list(_pieces(path, root))
    made = [_segment(piece, index) for index, piece in enumerate(pieces)]
    made.sort(key=lambda segment: segment.index)
    fields = ours(root).get("rollout") or {}
    name = root.get("session_id") or path.stem
    reward = (root.get("extra") or {}).get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float | None):
        raise ValueError(f"{path}: extra.reward: must be a number, got {reward!r:.80}")
    try:
        failure = Failure(**fields["failure"]) if fields.get("failure") else UNSCORED
        rollout = Rollout(
            rollout_id=name,
            group_id=fields.get("group_id", name),
            segments=tuple(made),
            reward=None if reward is None else float(reward),
            stop_reason=fields.get("stop_reason", "done"),
            failure=failure if reward is None else None,
            box=fields.get("box"),
            **{key: fields.get(key, {}) for key in ("rewards", "metrics", "failed_cases", "role_rewards")},
            branches=tuple(branch_of(branch) for branch in fields.get("branches", ())),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return Imported(rollout, fields.get("phase", PHASE), fields.get("step", 0), root["agent"].get("model_name"))


def is_atif(path: Path) -> bool:
    """Whether a file of JSON says that it is a trajectory."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and str(found.get("schema_version")).startswith(FAMILY)


def continuations(path: Path) -> set[Path]:
    """Return the files that a trajectory says it is continued in, or that hold its sub-agents, where they are there."""
    document = json.loads(path.read_bytes())
    named = [document.get("continued_trajectory_ref"), *(ref.get("trajectory_path") for ref in _refs(document))]
    return {path.parent / name for name in named if name and (path.parent / name).is_file()}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A document, and what it is to the one that it comes from."""

    where: str
    document: Mapping[str, Any]
    kind: SegmentKind
    parent: int | None
    """The place of that one among the pieces."""


def _loaded(path: Path) -> dict[str, Any]:
    """The document of a file, checked."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        _Trajectory.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: no file of JSON can be read there ({error})") from error
    try:
        put_back(found, path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return found


def _pieces(path: Path, root: dict[str, Any]) -> Iterator[_Piece]:
    """Yield the documents of a rollout, each behind the one that it comes from."""
    waiting: list[tuple[Path, dict[str, Any], SegmentKind, int | None]] = [(path, root, "root", None)]
    files = {path.resolve()}

    def another(file: Path) -> dict[str, Any]:
        if file.resolve() in files:
            raise ValueError(f"{path}: {file} stands twice in what it refers to")
        files.add(file.resolve())
        return _loaded(file)

    place = 0
    while waiting:
        of, document, kind, parent = waiting.pop(0)
        yield _Piece(f"{of}: {document.get('trajectory_id', 'the trajectory')}", document, kind, parent)
        embedded = document.get("subagent_trajectories") or []
        by_id = {inner["trajectory_id"]: inner for inner in embedded if inner.get("trajectory_id")}
        following = {inner.get("continued_trajectory_ref") for inner in embedded}
        waiting += [(of, inner, "subagent", place) for inner in embedded if inner.get("trajectory_id") not in following]
        for inner in embedded:
            if (name := inner.get("continued_trajectory_ref")) in by_id:
                inner["continued"] = by_id[name]
        if (inner := document.pop("continued", None)) is not None:
            waiting.append((of, inner, "compaction", place))
        elif name := document.get("continued_trajectory_ref"):
            waiting.append((of.parent / name, another(of.parent / name), "compaction", place))
        for ref in _refs(document):
            if ref.get("trajectory_id") not in by_id and ref.get("trajectory_path"):
                file = of.parent / ref["trajectory_path"]
                waiting.append((file, another(file), "subagent", place))
        place += 1


def _refs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The references of a document's steps to sub-agents."""
    return [
        ref
        for step in document.get("steps") or ()
        for result in (step.get("observation") or {"results": ()})["results"]
        for ref in result.get("subagent_trajectory_ref") or ()
    ]


@dataclass(slots=True)
class _Spoken:
    """A step of the agent that a model wrote, and the messages behind it."""

    step: Mapping[str, Any]
    message: Message
    answers: list[Message] = field(default_factory=list)


def _segment(piece: _Piece, place: int) -> Segment:
    """The segment of a document; ValueError names the document and the step that cannot be read."""
    prompt: list[Message] = []
    spoken: list[_Spoken] = []
    for number, step in enumerate(piece.document["steps"], 1):
        try:
            first, results = _messages(step)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{piece.where}: step {number}: {error}") from error
        if _is_turn(step) and first is not None:
            spoken.append(_Spoken(step, first))
        elif first is not None:
            (spoken[-1].answers if spoken else prompt).append(first)
        (spoken[-1].answers if spoken else prompt).extend(results)
    kept = ours(piece.document)
    ids = _exact(spoken, kept)
    spans = _counted(prompt, spoken) if ids is None else _given(spoken)
    length = len(ids) if ids is not None else (spans[-1][1] if spans else 0) + kept.get("last_tokens", 0)
    logprobs, sampled = np.zeros(length, np.float32), np.zeros(length, np.bool_)
    for (start, stop), turn in zip(spans, spoken, strict=True):
        sampled[start:stop] = True
        if ids is not None:
            logprobs[start:stop] = turn.step["metrics"]["logprobs"]
    try:
        return Segment(
            index=kept.get("index", place),
            parent=kept.get("parent", piece.parent),
            kind=kept.get("kind", piece.kind),
            token_ids=np.full(length, FILL) if ids is None else np.array(ids, np.int64),
            sampled=sampled,
            logprobs=logprobs,
            turns=tuple(
                _turn(turn, span, n, ids is None) for n, (turn, span) in enumerate(zip(spoken, spans, strict=True))
            ),
            prompt_messages=tuple(prompt),
            tools=tuple(piece.document["agent"].get("tool_definitions") or ()),
            role=kept.get("role", ""),
            model=kept.get("model", ""),
            trained=kept.get("trained", True),
            branch=kept.get("branch"),
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{piece.where}: {error}") from error


def _is_turn(step: Mapping[str, Any]) -> bool:
    return step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0


def _messages(step: Mapping[str, Any]) -> tuple[Message | None, list[Message]]:
    """The message of a step, None for one that only carries results, and those of its results."""
    results = (step.get("observation") or {"results": ()})["results"]
    said = [tool_message_of(r, step) for r in results if r.get("content") is not None or ours(r)]
    carries = step["source"] == "system" and not step["message"] and results
    return None if carries else message_of(step), said


def _exact(spoken: Sequence[_Spoken], kept: Mapping[str, Any]) -> list[int] | None:
    """The ids of a segment; None where a turn lacks some, or begins with others than those before it."""
    ids: list[int] = []
    if not spoken and "last_token_ids" not in kept:
        return None
    for turn in spoken:
        metrics = turn.step.get("metrics") or {}
        prompt, sampled = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
        logprobs = metrics.get("logprobs")
        if not prompt or not sampled or not logprobs or len(logprobs) != len(sampled) or prompt[: len(ids)] != ids:
            return None
        ids = [*prompt, *sampled]
    return [*ids, *kept.get("last_token_ids", ())]


def _given(spoken: Sequence[_Spoken]) -> list[tuple[int, int]]:
    """The spans of turns that have their ids."""
    metrics = [turn.step["metrics"] for turn in spoken]
    starts = [len(of["prompt_token_ids"]) for of in metrics]
    return [(start, start + len(of["completion_token_ids"])) for start, of in zip(starts, metrics, strict=True)]


def _counted(prompt: Sequence[Message], spoken: Sequence[_Spoken]) -> list[tuple[int, int]]:
    """The spans of turns by the counts of their steps, and by an estimate where a step has none."""
    spans: list[tuple[int, int]] = []
    stop, before = 0, list(prompt)
    for turn in spoken:
        metrics = turn.step.get("metrics") or {}
        start = max(metrics.get("prompt_tokens") or stop + estimated_tokens(before), stop)
        stop = start + max(1, metrics.get("completion_tokens") or estimated_tokens(turn.message))
        spans.append((start, stop))
        before = turn.answers
    return spans


def _turn(turn: _Spoken, span: tuple[int, int], number: int, without_ids: bool) -> Turn:
    kept = ours(turn.step)
    otherwise = [[0, NO_POLICY]] if without_ids else [[0, 0]]
    return Turn(
        start=span[0],
        stop=span[1],
        finish_reason=kept.get("finish_reason", "stop"),
        versions=tuple(Version(*version) for version in kept.get("versions", otherwise)),
        message=turn.message,
        env_messages=tuple(turn.answers),
        seconds=kept.get("seconds", 0.0),
        waited=kept.get("waited", 0.0),
        asked_at=kept.get("asked_at"),
        env_seconds=kept.get("env_seconds", 0.0),
        reward=kept.get("reward", 0.0),
        number=kept.get("number", number),
    )
