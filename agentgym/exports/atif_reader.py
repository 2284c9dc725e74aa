"""Rollouts read from ATIF trajectories, whether agentgym or another agent wrote them."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agentgym.chat.message_chat import FILL, estimated_tokens
from agentgym.engines.messages import NO_POLICY
from agentgym.errors import Failure
from agentgym.exports.atif_files import MOST_FILES, MOST_TOKENS, below, loaded, refs_of
from agentgym.exports.atif_messages import message_of, ours, tool_message_of
from agentgym.files.foreign.allowance import Allowance
from agentgym.files.foreign.content import DAMAGE
from agentgym.files.foreign.opening import real_path
from agentgym.files.foreign.values import number, text_of, whole
from agentgym.store.rows import detail_of
from agentgym.types.completion import Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout, Segment, SegmentKind, Turn

PHASE = "eval"
"""Phase of a rollout that another agent ran."""
UNSCORED = Failure(type="AgentGymError", message="its file has no reward; set `extra.reward` of the trajectory")
"""The failure of a rollout that has no reward."""


class Imported(NamedTuple):
    """A rollout read from a file, and the data that a store saves with it."""

    rollout: Rollout
    phase: str
    step: int
    model: str | None
    """The model named in the file."""


def read_atif(path: Path) -> Imported:
    """Return the rollout in a trajectory's file and the files of its continuations.

    Each step of the agent is a turn, except copied context and steps that no model wrote. The file's token ids are used
    only if every turn has ids and log-probabilities, and the context of each turn starts with the context and the reply
    of the turn before. Otherwise the rollout is like one from an endpoint, whose ids are only counters.

    Args:
        path: The file.

    Raises:
        ValueError: If the file isn't a trajectory; the message names the field.
    """
    allowance = Allowance()
    root = loaded(path, None, allowance)
    left, made = MOST_TOKENS, list[Segment]()
    for index, piece in enumerate(_pieces(path, root, allowance)):
        made.append(_segment(piece, index, left))
        left -= len(made[-1].token_ids)
    made.sort(key=lambda segment: segment.index)
    fields = ours(root).get("rollout") or {}
    name = root.get("session_id") or path.stem
    reward = (root.get("extra") or {}).get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float | None):
        raise ValueError(f"{path}: extra.reward: must be a finite number, got {reward!r:.80}")
    try:
        kept = detail_of(
            {"failure": None, "sandbox": None, "failed_cases": {}, "rewards": {}, "metrics": {}} | dict(fields)
        )
        rollout = Rollout(
            rollout_id=name,
            group_id=text_of(fields.get("group_id", name), "group_id"),
            segments=tuple(made),
            reward=None if reward is None else float(number(reward, "extra.reward")),
            stop_reason=text_of(fields.get("stop_reason", "done"), "stop_reason"),
            **kept | {"failure": (kept["failure"] or UNSCORED) if reward is None else None},
        )
        phase, step = text_of(fields.get("phase", PHASE), "phase"), whole(fields.get("step", 0), "step")
    except DAMAGE as error:
        raise ValueError(f"{path}: {error}") from error
    return Imported(rollout, phase, step, root["agent"].get("model_name"))


@dataclass(frozen=True, slots=True)
class _Piece:
    """One trajectory document of a rollout, which becomes a segment."""

    where: str
    document: Mapping[str, Any]
    kind: SegmentKind
    parent: int | None
    """Index of the document that embeds, refers to or precedes this one; None for the first document."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A document that was found but has not been read and turned into a `_Piece` yet."""

    file: Path
    document: dict[str, Any] | None
    """The document if another one embeds it; None if it is the content of a whole file, which has not been read yet."""
    kind: SegmentKind
    parent: int | None
    beside: dict[str, dict[str, Any]]
    """The documents embedded in the same document as this one, by id; any of them may continue this one."""


def _pieces(path: Path, root: dict[str, Any], allowance: Allowance) -> Iterator[_Piece]:
    """Yield a rollout's documents, each one after the document that embeds, refers to or precedes it.

    A file is read only when its document comes next.

    Args:
        path: The file of the first document.
        root: The first document.
        allowance: Limit on the bytes read.
    """
    files = {real_path(path)}
    waiting = deque([_Waiting(path, root, "root", None, {})])
    place = 0
    while waiting:
        now = waiting.popleft()
        document = loaded(now.file, path.parent, allowance) if now.document is None else now.document
        waiting += _following(now, document, place, path, files)
        yield _Piece(f"{now.file}: {document.get('trajectory_id', 'the trajectory')}", document, now.kind, now.parent)
        place += 1


def _following(now: _Waiting, document: dict[str, Any], place: int, path: Path, files: set[Path]) -> Iterator[_Waiting]:
    """Yield the documents that follow from a document: those that it embeds or refers to, and its continuation.

    Args:
        now: Where the document was found.
        document: The document.
        place: The document's index in the rollout.
        path: The file of the rollout's first document, below whose folder all other files must be.
        files: The files named so far; newly named ones are added.
    """
    embedded = document.get("subagent_trajectories") or []
    by_id = {inner["trajectory_id"]: inner for inner in embedded if inner.get("trajectory_id")}
    continuing = {inner.get("continued_trajectory_ref") for inner in embedded}
    referred = [ref for ref in refs_of(document) if ref.get("trajectory_id") not in by_id]
    for inner in embedded:
        if inner.get("trajectory_id") not in continuing:
            yield _Waiting(now.file, inner, "subagent", place, by_id)
    if name := document.get("continued_trajectory_ref"):
        beside = now.beside.pop(name, None)  # popped, so that nothing is read twice and cycles end
        file = now.file if beside is not None else _another(now.file, path, name, files)
        yield _Waiting(file, beside, "compaction", place, now.beside if beside is not None else {})
    for ref in referred:
        if ref.get("trajectory_path"):
            yield _Waiting(_another(now.file, path, ref["trajectory_path"], files), None, "subagent", place, {})


def _another(of: Path, path: Path, name: str, files: set[Path]) -> Path:
    """Return the path of a file that another file of the rollout names, and add it to `files`.

    Args:
        of: The file that names it.
        path: The file of the rollout's first document, below whose folder all other files must be.
        name: The name as written in `of`.
        files: The files named so far.

    Raises:
        ValueError: If the file was already named, too many files are named, or the name isn't allowed (as in
            `below`).
    """
    file = below(of, path.parent, name)
    if (real := real_path(file)) in files:
        raise ValueError(f"{path} refers to {file} twice; refer to each file only once")
    files.add(real)
    if len(files) > MOST_FILES:
        raise ValueError(f"{path} refers to more than {MOST_FILES} files; leave some out")
    return file


@dataclass(slots=True)
class _Spoken:
    """A step of the agent that a model wrote, and the messages after it."""

    step: Mapping[str, Any]
    message: Message
    answers: list[Message] = field(default_factory=list)


def _segment(piece: _Piece, place: int, most: int) -> Segment:
    """Return a document's segment.

    Args:
        piece: The document.
        place: Index of the segment.
        most: Maximum number of token ids.

    Raises:
        ValueError: If a value is invalid; the message names the document, and the step if a message in it is invalid.
    """
    prompt: list[Message] = []
    spoken: list[_Spoken] = []
    for of, step in enumerate(piece.document["steps"], 1):
        try:
            first, results = _messages(step)
        except DAMAGE as error:
            raise ValueError(f"{piece.where}: step {of}: {error}") from error
        if _is_turn(step) and first is not None:
            spoken.append(_Spoken(step, first))
        elif first is not None:
            (spoken[-1].answers if spoken else prompt).append(first)
        (spoken[-1].answers if spoken else prompt).extend(results)
    try:
        return _made(piece, place, most, prompt, spoken)
    except DAMAGE as error:
        raise ValueError(f"{piece.where}: {error}") from error


def _made(piece: _Piece, place: int, most: int, prompt: Sequence[Message], spoken: Sequence[_Spoken]) -> Segment:
    """Return a document's segment.

    Args:
        piece: The document.
        place: Index of the segment, unless agentgym stored another one in the document.
        most: Maximum number of token ids.
        prompt: The messages before the first turn.
        spoken: The turns, each with the messages after it.

    Raises:
        ValueError: If the segment has more than `most` token ids, or a stored value is invalid.
    """
    kept = ours(piece.document)
    ids = _exact(spoken, kept)
    spans = _counted(prompt, spoken) if ids is None else _given(spoken)
    counted = (spans[-1][1] if spans else 0) + whole(kept.get("last_tokens", 0), "last_tokens")
    length = counted if ids is None else len(ids)
    if not 0 <= length <= most:
        raise ValueError(f"it has {length:,} tokens, but a rollout may have at most {MOST_TOKENS:,}")
    logprobs, sampled = np.zeros(length, np.float32), np.zeros(length, np.bool_)
    for (start, stop), turn in zip(spans, spoken, strict=True):
        sampled[start:stop] = True
        if ids is not None:
            logprobs[start:stop] = turn.step["metrics"]["logprobs"]
    parent, branch = kept.get("parent", piece.parent), kept.get("branch")
    return Segment(
        index=whole(kept.get("index", place), "index"),
        parent=None if parent is None else whole(parent, "parent"),
        kind=text_of(kept.get("kind", piece.kind), "kind"),  # type: ignore[arg-type]
        token_ids=np.full(length, FILL) if ids is None else np.array(ids, np.int64),
        sampled=sampled,
        logprobs=logprobs,
        turns=tuple(
            _turn(turn, span, n, ids is None) for n, (turn, span) in enumerate(zip(spoken, spans, strict=True))
        ),
        prompt_messages=tuple(prompt),
        tools=tuple(piece.document["agent"].get("tool_definitions") or ()),
        role=text_of(kept.get("role", ""), "role"),
        model=text_of(kept.get("model", ""), "model"),
        trained=bool(kept.get("trained", True)),
        branch=None if branch is None else whole(branch, "branch"),
    )


def _is_turn(step: Mapping[str, Any]) -> bool:
    return step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0


def _messages(step: Mapping[str, Any]) -> tuple[Message | None, list[Message]]:
    """Return a step's message (None if the step only carries results) and the messages of its results."""
    results = (step.get("observation") or {"results": ()})["results"]
    said = [tool_message_of(r, step) for r in results if r.get("content") is not None or ours(r)]
    carries = step["source"] == "system" and not step["message"] and results
    return None if carries else message_of(step), said


def _exact(spoken: Sequence[_Spoken], kept: Mapping[str, Any]) -> list[int] | None:
    """Return a segment's token ids as the file has them.

    Returns None if a turn lacks ids or log-probabilities, or if its context doesn't start with the context and the
    reply of the turn before.

    Args:
        spoken: The turns.
        kept: The data that agentgym stored in the document (`ours`), such as the ids after the last turn.
    """
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
    return [*ids, *(whole(last, "last_token_ids") for last in kept.get("last_token_ids", ()))]


def _given(spoken: Sequence[_Spoken]) -> list[tuple[int, int]]:
    """Return each turn's span of tokens, from the token ids in its step."""
    metrics = [turn.step["metrics"] for turn in spoken]
    starts = [len(of["prompt_token_ids"]) for of in metrics]
    return [(start, start + len(of["completion_token_ids"])) for start, of in zip(starts, metrics, strict=True)]


def _counted(prompt: Sequence[Message], spoken: Sequence[_Spoken]) -> list[tuple[int, int]]:
    """Return each turn's span of tokens, from the token counts in its step; missing counts are estimated."""
    spans: list[tuple[int, int]] = []
    stop, before = 0, list(prompt)
    for turn in spoken:
        metrics = turn.step.get("metrics") or {}
        start = max(metrics.get("prompt_tokens") or stop + estimated_tokens(before), stop)
        stop = start + max(1, metrics.get("completion_tokens") or estimated_tokens(turn.message))
        spans.append((start, stop))
        before = turn.answers
    return spans


def _turn(turn: _Spoken, span: tuple[int, int], place: int, without_ids: bool) -> Turn:
    kept = ours(turn.step)
    otherwise = [[0, NO_POLICY]] if without_ids else [[0, 0]]
    asked_at = kept.get("asked_at")
    return Turn(
        start=span[0],
        stop=span[1],
        finish_reason=text_of(kept.get("finish_reason", "stop"), "finish_reason"),  # type: ignore[arg-type]
        versions=tuple(
            Version(whole(at, "versions"), whole(version, "versions"))
            for at, version in kept.get("versions", otherwise)
        ),
        message=turn.message,
        env_messages=tuple(turn.answers),
        seconds=number(kept.get("seconds", 0.0), "seconds"),
        waited=number(kept.get("waited", 0.0), "waited"),
        asked_at=None if asked_at is None else number(asked_at, "asked_at"),
        env_seconds=number(kept.get("env_seconds", 0.0), "env_seconds"),
        reward=number(kept.get("reward", 0.0), "reward"),
        number=whole(kept.get("number", place), "number"),
    )
