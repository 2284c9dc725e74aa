"""Conversions between rollouts and the rows of the store."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from agentgym.errors import Failure
from agentgym.files.foreign.content import Unpacker, parsed
from agentgym.files.foreign.opening import MOST_BYTES
from agentgym.files.foreign.values import messages_of, number, numbers, text_of, whole
from agentgym.types.arrays import Floats, Ints
from agentgym.types.completion import Version
from agentgym.types.rollout import Rollout, RolloutBranch, Segment, Turn
from agentgym.types.transcript import printable

SUMMARY_COLUMNS = "phase, step, group_id, rollout_id, reward, stop_reason, failure, turns, tokens, seconds"
"""The rollout columns that can be read without unpacking any JSON."""
ROLLOUT_COLUMNS = f"{SUMMARY_COLUMNS}, detail"
SEGMENT_COLUMNS = "place, parent, kind, token_ids, id_bytes, logprobs, turns, messages"
SEGMENT_VALUES = SEGMENT_COLUMNS.replace("turns", "turns AS turns_of_segment")
"""SEGMENT_COLUMNS for reading. `turns` is renamed, because the table of rollouts has a column `turns`, too: a count."""


def packed(value: object) -> bytes:
    """Compress `value` as JSON that `Unpacker` can unpack.

    Lone surrogates survive. A value that JSON can't represent becomes text.

    Raises:
        ValueError: If the JSON would be too large to be read back.
    """
    text = json.dumps(value, separators=(",", ":"), default=_plain).encode()
    if len(text) > MOST_BYTES:
        raise ValueError(f"its JSON has {len(text):,} bytes, but the limit is {MOST_BYTES:,}")
    return zlib.compress(text, 1)


def stored_text(text: str) -> str:
    """Escape lone surrogates, which SQLite can't store; other text stays unchanged."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _plain(value: object) -> object:
    """Return a numpy number as Python's own type, anything else as text."""
    return value.item() if isinstance(value, np.generic) else str(value)


def rollout_row(rollout: Rollout, *, phase: str, step: int) -> tuple[object, ...]:
    """Return a rollout's values of ROLLOUT_COLUMNS, in that order."""
    detail = {
        "rewards": dict(rollout.rewards),
        "metrics": dict(rollout.metrics),
        "sandbox": rollout.sandbox,
        "failed_cases": dict(rollout.failed_cases),
        "role_rewards": dict(rollout.role_rewards),
        "failure": asdict(rollout.failure) if rollout.failure is not None else None,
    } | ({"branches": [asdict(branch) for branch in rollout.branches]} if rollout.branches else {})
    return (
        stored_text(phase),
        step,
        stored_text(rollout.group_id),
        stored_text(rollout.rollout_id),
        None if rollout.reward is None else float(rollout.reward),
        stored_text(rollout.stop_reason),
        None if rollout.error is None else printable(rollout.error),
        sum(len(segment.turns) for segment in rollout.own_segments),
        rollout.sampled_tokens,
        float(rollout.metrics.get("seconds", 0.0)),
        packed(detail),
    )


def segment_row(segment: Segment) -> tuple[object, ...]:
    """Return a segment's values of SEGMENT_COLUMNS, in that order.

    Each token id is stored in 2 or 4 bytes, and the log-probability of a sampled token in 4.
    """
    small = bool((segment.token_ids < 1 << 16).all())
    turns = [
        [
            turn.start,
            turn.stop,
            turn.finish_reason,
            turn.versions,
            turn.seconds,
            turn.env_seconds,
            turn.reward,
            turn.number,
            turn.waited,
            turn.asked_at,
        ]
        for turn in segment.turns
    ]
    messages = {
        "prompt": segment.prompt_messages,
        "tools": segment.tools,
        "turns": [[turn.message, turn.env_messages] for turn in segment.turns],
        "speaker": [segment.role, segment.model, segment.trained],
    } | ({"branch": segment.branch} if segment.branch is not None else {})
    return (
        segment.index,
        segment.parent,
        stored_text(segment.kind),
        segment.token_ids.astype("<u2" if small else "<u4").tobytes(),
        2 if small else 4,
        segment.logprobs[segment.sampled].astype("<f4").tobytes(),
        packed(turns),
        packed(messages),
    )


def segment_of(row: Sequence[Any], unpacker: Unpacker) -> Segment:
    """Build the segment of a row of SEGMENT_COLUMNS, checking its invariants.

    Raises:
        ValueError: If a value is invalid; the message names the field.
    """
    index, parent, kind, ids, id_bytes, logprobs, turns, messages = row
    token_ids: Ints = np.frombuffer(ids, f"<u{id_bytes}").astype(np.int64)
    said = unpacker.unpacked(messages)
    made = [_turn(turn, *texts) for turn, texts in zip(unpacker.unpacked(turns), said["turns"], strict=True)]
    sampled = np.zeros(len(token_ids), np.bool_)
    for turn in made:
        sampled[turn.start : turn.stop] = True
    role, model, trained = said.get("speaker", ("", "", True))
    branch = said.get("branch")
    scores: Floats = np.zeros(len(token_ids), np.float32)
    scores[sampled] = np.frombuffer(logprobs, "<f4")
    return Segment(
        index=index,
        parent=parent,
        kind=kind,
        token_ids=token_ids,
        sampled=sampled,
        logprobs=scores,
        turns=tuple(made),
        prompt_messages=messages_of(said["prompt"], "prompt"),
        tools=tuple(said.get("tools", ())),
        role=text_of(role, "role"),
        model=text_of(model, "model"),
        trained=bool(trained),
        branch=None if branch is None else whole(branch, "branch"),
    )


def trained_of(segment: Segment, logprobs: bytes | None) -> Floats | None:
    """Return the trainer's log-probabilities, one per sampled token, or None if the segment was not trained on.

    Raises:
        ValueError: If there isn't one for each sampled token.
    """
    if logprobs is None:
        return None
    found: Floats = np.frombuffer(logprobs, "<f4")
    if len(found) != segment.sampled.sum():
        raise ValueError(
            f"expected {segment.sampled.sum()} trainer log-probabilities, one per sampled token, got {len(found)}"
        )
    return found


def advantages_of(segment: Segment, text: str | None) -> tuple[float, ...] | None:
    """Return the advantages of a segment, one per turn.

    Returns an empty tuple if not all of the segment's sampled tokens were trained on, and None if the segment was not
    trained on.

    Args:
        segment: The segment.
        text: The stored advantages as JSON.

    Raises:
        ValueError: If there are some but not one for each turn, or if one is not a number.
    """
    if text is None:
        return None
    found = [number(value, "advantages") for value in parsed(text.encode())]
    if found and len(found) != len(segment.turns):
        raise ValueError(f"expected {len(segment.turns)} advantages, one per turn, got {len(found)}")
    return tuple(found)


def _turn(values: Sequence[Any], message: Any, env_messages: Any) -> Turn:
    # Stores of version 2 don't record when a turn was requested.
    start, stop, finish_reason, versions, seconds, env_seconds, reward, place, *when = values
    waited, asked_at = when or (0.0, None)
    return Turn(
        start=whole(start, "start"),
        stop=whole(stop, "stop"),
        finish_reason=text_of(finish_reason, "finish_reason"),  # type: ignore[arg-type]
        versions=tuple(Version(whole(at, "versions"), whole(version, "versions")) for at, version in versions),
        message=messages_of([message], "message")[0],
        env_messages=messages_of(env_messages, "env_messages"),
        seconds=number(seconds, "seconds"),
        waited=number(waited, "waited"),
        asked_at=None if asked_at is None else number(asked_at, "asked_at"),
        env_seconds=number(env_seconds, "env_seconds"),
        reward=number(reward, "reward"),
        number=whole(place, "number"),
    )


def failure_of(found: Any) -> Failure:
    """Build a failure from its JSON fields.

    Raises:
        ValueError: If a value is invalid; the message names the field.
    """
    return Failure(**{name: text_of(value, f"failure.{name}") for name, value in found.items()})


def branch_of(found: Mapping[str, Any]) -> RolloutBranch:
    """Build the outcome of a rollout branch from its JSON fields.

    Raises:
        ValueError: If a value is invalid; the message names the field.
    """
    failure = found["failure"]
    for name in ("rewards", "role_rewards", "metrics"):
        numbers(found.get(name, {}), name)
    whole(found["turn"], "turn")
    text_of(found["stop_reason"], "stop_reason")
    if found["reward"] is not None:
        number(found["reward"], "reward")
    return RolloutBranch(**{**found, "failure": None if failure is None else failure_of(failure)})


def rollout_of(row: Sequence[Any], segments: Sequence[Segment], unpacker: Unpacker) -> Rollout:
    """Build the rollout of a row of ROLLOUT_COLUMNS with these segments.

    Raises:
        ValueError: If a value is invalid; the message names the field.
    """
    _, _, group_id, rollout_id, reward, stop_reason, _, _, _, _, detail = row
    found: Mapping[str, Any] = unpacker.unpacked(detail)
    return Rollout(
        rollout_id=rollout_id,
        group_id=group_id,
        segments=tuple(segments),
        reward=reward,
        stop_reason=stop_reason,
        **detail_of(found),
    )


def detail_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rollout fields that are stored as JSON, after checking them.

    Raises:
        ValueError: If a value is invalid; the message names the field.
    """
    cases = found["failed_cases"]
    return {
        "rewards": numbers(found["rewards"], "rewards"),
        "failure": failure_of(found["failure"]) if found["failure"] is not None else None,
        "metrics": numbers(found["metrics"], "metrics"),
        "sandbox": None if found["sandbox"] is None else text_of(found["sandbox"], "sandbox"),
        "failed_cases": {name: text_of(why, "failed_cases") for name, why in cases.items()},
        "role_rewards": numbers(found.get("role_rewards", {}), "role_rewards"),
        "branches": tuple(branch_of(branch) for branch in found.get("branches", ())),
    }
