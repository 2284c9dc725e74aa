"""The limits of one rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentgym.config_fields import Above0, Count, Positive, config
from agentgym.types.messages import Message, joined

Keep: TypeAlias = Callable[[Sequence[Message], Sequence[Message], str], list[Message]]
"""A function from the first prompt, the messages after it and the model's summary to the next segment's messages."""


@config(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one rollout with all its forks and sub-agents; a rollout that reaches one is truncated and scored."""

    turns: Positive = 20
    """Most turns of the model; summaries are not counted."""
    seconds: Above0 = 600.0
    """Most seconds from the first prompt to the last answer; scoring and `close` may each take as long again."""
    context_tokens: Positive = 8192
    """Most token ids in one segment, prompt and answers together."""
    turn_tokens: Positive = 1024
    """Most sampled token ids in one turn; fewer where less is left of the context."""
    tokens: Positive | None = None
    """Most sampled token ids in the whole rollout; None for no such limit."""
    parallel_calls: Positive = 16
    """Most calls of one turn that run at the same time, where their tools are declared parallel; others wait."""
    retries: Count = 0
    """Most new attempts after the engine or the sandbox failed before an action of the model had reached the env."""


@dataclass(frozen=True, slots=True)
class KeepPrompt:
    """Keeps the first prompt and puts the summary at the end of its last user message, or behind it as a message."""

    def __call__(self, first: Sequence[Message], since: Sequence[Message], summary: str) -> list[Message]:
        *before, last = first
        if last["role"] != "user":
            return [*first, Message(role="user", content=summary)]
        return [*before, Message(role="user", content=joined([last["content"], summary], "\n"))]


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the first prompt, the summary, and the last `turns` turns as they were, with the env's answers."""

    turns: int

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns: must be at least 1, got {self.turns}")

    def __call__(self, first: Sequence[Message], since: Sequence[Message], summary: str) -> list[Message]:
        return [*KeepPrompt()(first, since, summary), *last_turns(since, self.turns)]


def last_turns(messages: Sequence[Message], turns: int) -> list[Message]:
    """Return the last `turns` assistant messages, each with the messages that follow it."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-turns:]
    return list(messages[starts[0] :]) if starts else []


def _check_trigger(at: float | None, turns: int | None) -> None:
    if at is None and turns is None:
        raise ValueError("at: give `at`, `turns` or both; for no context policy leave `context` out of the env")
    if at is not None and not 0 < at < 1:
        raise ValueError(f"at: must lie between 0 and 1, got {at}")
    if turns is not None and turns < 1:
        raise ValueError(f"turns: must be at least 1, got {turns}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Compaction: the model writes a summary, and the next segment starts from the messages that `keep` makes of it.

    The summary is sampled and trained like any other turn. It is asked for when the segment holds the share `at` of
    the context, or after every `turns` turns, whichever comes first.
    """

    at: float | None = 0.8
    """Share of the context, between 0 and 1, that starts a compaction; None for `turns` alone."""
    turns: int | None = None
    """Number of turns in a segment that starts a compaction; None for `at` alone."""
    instruction: str = "Summarise what you found and what is left to do; the conversation above will be removed."
    """The user message that asks the model for the summary."""
    keep: Keep = KeepPrompt()
    """The function that makes the next segment's messages of the prompt, the conversation and the summary."""

    def __post_init__(self) -> None:
        _check_trigger(self.at, self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A sliding window: the next segment starts from the first prompt and the last `keep` turns, without a summary.

    The window slides when the segment holds the share `at` of the context, or after every `turns` turns, whichever
    comes first. What is carried over was trained where it was sampled; the next segment only reads it.
    """

    at: float | None = 0.8
    """Share of the context, between 0 and 1, at which the window slides; None for `turns` alone."""
    turns: int | None = None
    """Number of turns in a segment after which the window slides; None for `at` alone."""
    keep: int = 2
    """Number of turns that the next segment starts with, less than `turns`."""

    def __post_init__(self) -> None:
        _check_trigger(self.at, self.turns)
        if self.keep < 1:
            raise ValueError(f"keep: must be at least 1, got {self.keep}")
        if self.turns is not None and self.keep >= self.turns:
            raise ValueError(f"keep: must be less than turns, got {self.keep} of {self.turns}")
