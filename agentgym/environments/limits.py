"""The limits of one rollout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentgym.config_fields import Above0, Count, Positive, config
from agentgym.types.messages import Message, joined

Keep: TypeAlias = Callable[[Sequence[Message], Sequence[Message], str], list[Message]]
"""A function that returns the next segment's messages from the first prompt, the messages after it and the summary."""


@config(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on one rollout with all its forks and sub-agents; a rollout that reaches one is truncated and scored."""

    turns: Positive = 20
    """Maximum number of model turns; summaries are not counted."""
    seconds: Above0 = 600.0
    """Maximum seconds from the first prompt to the last answer; scoring and `close` may each take as long again."""
    context_tokens: Positive = 8192
    """Maximum number of token ids in one segment, prompt and answers together."""
    turn_tokens: Positive = 1024
    """Maximum number of sampled token ids in one turn; fewer if less of the context is left."""
    tokens: Positive | None = None
    """Maximum number of sampled token ids in the whole rollout; None for no limit."""
    parallel_calls: Positive = 16
    """Maximum number of one turn's calls to parallel tools that run at the same time; others wait."""
    retries: Count = 0
    """Maximum number of retries of a rollout whose engine or sandbox failed before any action reached the env."""


@dataclass(frozen=True, slots=True)
class KeepPrompt:
    """Keeps the first prompt, and appends the summary to its last user message, or as a new user message."""

    def __call__(self, first: Sequence[Message], since: Sequence[Message], summary: str) -> list[Message]:
        *before, last = first
        if last["role"] != "user":
            return [*first, Message(role="user", content=summary)]
        return [*before, Message(role="user", content=joined([last["content"], summary], "\n"))]


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keeps the first prompt, the summary, and the last `turns` turns unchanged, with the env's responses."""

    turns: int
    """Number of turns to keep, at least 1."""

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
        raise ValueError("at: pass `at`, `turns` or both; for no context policy, leave `context` out of the env")
    if at is not None and not 0 < at < 1:
        raise ValueError(f"at: must be between 0 and 1, got {at}")
    if turns is not None and turns < 1:
        raise ValueError(f"turns: must be at least 1, got {turns}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Compaction: the model writes a summary, and `keep` builds the next segment's messages from it.

    The summary is sampled and trained like any other turn. It is requested when the segment fills the fraction `at` of
    the context, or after every `turns` turns, whichever comes first.
    """

    at: float | None = 0.8
    """Fraction of the context, between 0 and 1, that triggers a compaction; None to use only `turns`."""
    turns: int | None = None
    """Number of turns in a segment that triggers a compaction; None to use only `at`."""
    instruction: str = "Summarise what you found and what is left to do; the conversation above will be removed."
    """The user message that asks the model for the summary."""
    keep: Keep = KeepPrompt()
    """The function that builds the next segment's messages from the prompt, the conversation and the summary."""

    def __post_init__(self) -> None:
        _check_trigger(self.at, self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A sliding window: the next segment starts from the first prompt and the last `keep` turns, without a summary.

    The window slides when the segment fills the fraction `at` of the context, or after every `turns` turns, whichever
    comes first. Turns that are carried over are trained only in the segment where they were sampled; the next segment
    just reads them.
    """

    at: float | None = 0.8
    """Fraction of the context, between 0 and 1, at which the window slides; None to use only `turns`."""
    turns: int | None = None
    """Number of turns in a segment after which the window slides; None to use only `at`."""
    keep: int = 2
    """Number of turns that the next segment starts with, less than `turns`."""

    def __post_init__(self) -> None:
        _check_trigger(self.at, self.turns)
        if self.keep < 1:
            raise ValueError(f"keep: must be at least 1, got {self.keep}")
        if self.turns is not None and self.keep >= self.turns:
            raise ValueError(f"keep: must be less than turns, got {self.keep} of {self.turns}")
