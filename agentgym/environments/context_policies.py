"""Context policies: what the next segment of a conversation starts from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from agentgym.messages import Message

Keep: TypeAlias = Callable[[Sequence[Message], Sequence[Message], str], list[Message]]
"""What the next segment starts from, given the first prompt, what came after it, and the model's summary."""


@dataclass(frozen=True, slots=True)
class KeepPrompt:
    """Keep the first prompt, with the summary behind its last user message."""

    def __call__(self, first: Sequence[Message], since: Sequence[Message], summary: str) -> list[Message]:
        *before, last = first
        if last["role"] != "user":
            return [*first, Message(role="user", content=summary)]
        return [*before, Message(role="user", content=f"{last['content']}\n{summary}")]


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the first prompt and summary, and the last `turns` turns as they were, with their answers."""

    turns: int

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns: must be at least 1, got {self.turns}")

    def __call__(self, first: Sequence[Message], since: Sequence[Message], summary: str) -> list[Message]:
        return [*KeepPrompt()(first, since, summary), *last_turns(since, self.turns)]


def last_turns(messages: Sequence[Message], turns: int) -> list[Message]:
    """The last `turns` assistant messages, each with what follows it."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"][-turns:]
    return list(messages[starts[0] :]) if starts else []


def _check_trigger(at: float | None, turns: int | None) -> None:
    if at is None and turns is None:
        raise ValueError("at: give `at`, `turns` or both; leave `context` out of the env for neither")
    if at is not None and not 0 < at < 1:
        raise ValueError(f"at: must lie between 0 and 1, got {at}")
    if turns is not None and turns < 1:
        raise ValueError(f"turns: must be at least 1, got {turns}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compact:
    """Compaction: the model summarises, and the next segment starts from what `keep` makes of that.

    The summary is sampled and trained like any other turn. It is asked for when the segment holds `at` of
    the context, or after every `turns` turns, whichever comes first.
    """

    at: float | None = 0.8
    turns: int | None = None
    instruction: str = "Summarise what you found and what is left to do; the conversation above will be removed."
    keep: Keep = KeepPrompt()

    def __post_init__(self) -> None:
        _check_trigger(self.at, self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A sliding window: the next segment starts from the first prompt and the last `keep` turns, without a summary.

    The window slides when the segment holds `at` of the context, or after every `turns` turns, whichever comes first.
    What is carried over was trained where it was sampled, and is only read here.
    """

    at: float | None = 0.8
    turns: int | None = None
    keep: int = 2

    def __post_init__(self) -> None:
        _check_trigger(self.at, self.turns)
        if self.keep < 1:
            raise ValueError(f"keep: must be at least 1, got {self.keep}")
        if self.turns is not None and self.keep >= self.turns:
            raise ValueError(f"keep: must be less than turns, got {self.keep} of {self.turns}")
