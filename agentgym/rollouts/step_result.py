"""Validation of the results of an env's methods.

The first argument of each function is the result, and `where` is the start of an error's message. An EnvError names
the first invalid field.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from agentgym.errors import EnvError
from agentgym.rollouts.segment import OpenSegment
from agentgym.types.messages import ROLES, Message, kept_message, role_of, with_objects
from agentgym.types.rollout import StopReason

_MAPPING, _SEQUENCE = (dict, Mapping), (list, Sequence)
"""Types for isinstance, the usual one first, because the abstract ones cost several times as much."""

OWN_COUNTERS = frozenset(
    (
        *("retries", "rerenders", "realigned", "answers_carried", "compactions", "slides", "forks", "subagents"),
        *("empty_summaries", "cut_turns", "failed_cases", "untrained_tokens", "held_seconds"),
        *("branches", "branches_failed", "branch_tokens", "branch_seconds"),
    )
)
"""The metrics that a rollout counts itself, in addition to its env's; one that a rollout lacks counts as 0."""
ENV_COUNTERS = frozenset(
    ("tool_calls", "tool_errors", "malformed_calls", "user_turns", "sandbox_killed", "sandbox_content", "model_limit")
)
"""The metrics that the env classes count; one that a rollout lacks counts as 0."""
OWN_COUNTED = "usage/|model_[a-z_]+/"
"""A pattern for the beginnings of further metrics that a rollout counts itself."""
_OWN = re.compile(OWN_COUNTED)


class Step(NamedTuple):
    """A validated StepResult."""

    messages: list[Message]
    reward: float
    """The step's reward for its turn; 0.0 if `rewards` contains it by name."""
    rewards: dict[str, float]
    terminated: bool
    truncated: bool
    stop_reason: str


def read_step(result: Any, where: str) -> Step:
    """Validate the five values that `step` returned."""
    if not isinstance(result, tuple) or len(result) != 5:
        got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
        raise EnvError(f"{where}: must return StepResult(messages, reward, terminated, truncated, info), got {got}")
    messages, reward, terminated, truncated, info = result
    if not isinstance(info, _MAPPING):
        raise EnvError(f"{where}: info must be a dict, got {type(info).__name__}")
    read = read_messages(messages, where)
    if type(terminated) is not bool:
        terminated = _flag(terminated, where, "terminated")
    if type(truncated) is not bool:
        truncated = _flag(truncated, where, "truncated")
    if not info and type(reward) is float and math.isfinite(reward):  # The usual case, which needs no further checks.
        return Step(read, reward, {}, terminated, truncated, StopReason.DONE)
    given, named = _rewards(reward, info.get("rewards"), where)
    reason = info.get("stop_reason", StopReason.DONE)
    if not isinstance(reason, str) or not reason:
        raise EnvError(f"{where}: info['stop_reason'] must be a word, got {reason!r:.200}")
    return Step(read, given, named, terminated, truncated, reason)


def read_reset(result: Any, where: str) -> list[Message]:
    """Validate the first messages that `reset` returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"{where}: must return (messages, info), got {type(result).__name__}")
    if not (first := read_messages(result[0], where)):
        raise EnvError(f"{where}: messages must not be empty, because the model needs a prompt")
    return first


def read_messages(given: Any, where: str) -> list[Message]:
    """Validate a list of messages with text or parts as content; text-only engines reject images later."""
    if not isinstance(given, _SEQUENCE) or isinstance(given, (str, bytes)):
        raise EnvError(f"{where}: messages must be a list of messages, got {type(given).__name__}")
    for message in given:
        known = type(message) is dict and message.get("role") in ROLES and type(message.get("content")) is str
        if not known or "tool_calls" in message:
            return [_message(each, f"{where}: messages[{i}]") for i, each in enumerate(given)]
    return list(given)  # The usual case: no message needs a closer look.


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, _MAPPING):
        raise EnvError(f"{where} must be a dict, got {type(message).__name__}")
    try:
        role_of(message.get("role"))
    except ValueError as error:
        raise EnvError(f"{where}.role {error}") from None
    try:
        kept: Message = kept_message(with_objects(message), where)
    except ValueError as error:
        raise EnvError(str(error)) from None
    return kept


def read_rewards(given: Any, where: str) -> dict[str, float]:
    """Validate finite numbers by name."""
    if not isinstance(given, _MAPPING):
        raise EnvError(f"{where}: must be a dict of numbers by name, got {type(given).__name__}")
    for name in given:
        if not isinstance(name, str):
            raise EnvError(f"{where}: a name must be text, got {name!r}")
    return {name: _finite(value, f"{where}[{name!r}]") for name, value in given.items()}


def read_metrics(given: Any, where: str) -> dict[str, float]:
    """Validate numbers by name; they may be infinite or NaN, but names that the rollout counts itself are rejected."""
    if not isinstance(given, _MAPPING):
        raise EnvError(f"{where}: must be a dict of numbers by name, got {type(given).__name__}")
    read: dict[str, float] = {}
    for key, value in given.items():
        name = str(key)
        if name in OWN_COUNTERS or name in ("seconds", "turns") or _OWN.match(name):
            raise EnvError(f"{where}[{name!r}]: the rollout counts this itself; give the env's own metric another name")
        read[name] = value if type(value) is float else _number(value, f"{where}[{name!r}]")
    return read


def _rewards(reward: Any, named: Any, where: str) -> tuple[float, dict[str, float]]:
    """Validate the reward of a step.

    Args:
        reward: The reward for the step's turn.
        named: The step's rewards by name, which may replace `reward`; empty or None if there are none.
        where: The start of an error's message.

    Returns:
        The reward for the turn, which is 0.0 if there are rewards by name, and the rewards by name.

    Raises:
        EnvError: If a reward is invalid, or if `reward` is neither 0 nor the sum of the rewards by name.
    """
    number = _finite(reward, f"{where}: reward")
    if not named and (named is None or isinstance(named, _MAPPING)):
        return number, {}
    rewards = read_rewards(named, f"{where}: info['rewards']")
    total = sum(rewards.values())
    if number and not math.isclose(number, total, rel_tol=1e-6, abs_tol=1e-9):
        raise EnvError(
            f"{where}: reward is {number:g}, but info['rewards'] {rewards} sum to {total:g}; "
            "set only one of them, or make them equal"
        )
    return 0.0, rewards


def _finite(value: Any, where: str) -> float:
    number = _number(value, where)
    if not math.isfinite(number):
        raise EnvError(f"{where} must be finite, got {number}")
    return number


def _number(value: Any, where: str) -> float:
    if type(value) is float:
        return value
    if not isinstance(value, str | bytes) and getattr(value, "shape", ()) == ():
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass  # Raised below, with the name of the field.
    raise EnvError(f"{where} must be a number, got {value!r:.200}")


def _flag(value: Any, where: str, field: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise EnvError(f"{where}: {field} must be True or False, got {value!r:.200}")
    return bool(value)


def read_role_rewards(given: Any, segments: Sequence[OpenSegment], name: str) -> dict[str, float]:
    """Validate the rewards that an env gave its roles.

    Raises:
        EnvError: If a role with trained turns has no reward; the message names the role.
    """
    rewards = read_rewards(given, f"{name}.role_rewards")
    if "" in rewards:
        raise EnvError(f"{name}.role_rewards: a role needs a name; the root's reward comes from `score`")
    speakers = {segment.speaker for segment in segments if segment.turns}
    without = sorted({speaker.role for speaker in speakers if speaker.trained and speaker.role} - rewards.keys())
    if without:
        raise EnvError(
            f"{name}: no reward for role {', '.join(map(repr, without))}, whose turns are trained; set "
            "self.role_rewards[role] or decorate a method with @ag.reward(role=...)"
        )
    return rewards


def count_untrained(segments: Sequence[OpenSegment], metrics: dict[str, float]) -> None:
    """Count the sampled tokens that don't become training samples, if the rollout has an untrained conversation."""
    untrained = [segment for segment in segments if not segment.speaker.trained]
    if untrained:
        turns = [turn for segment in untrained for turn in segment.turns]
        metrics["untrained_tokens"] = float(sum(turn.stop - turn.start for turn in turns))
