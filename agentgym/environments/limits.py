"""The limits of one rollout."""

from dataclasses import dataclass

from agentgym.tools.declarations import check_number, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one rollout may use, its forks and sub-agents included; past any of these it is truncated and scored."""

    turns: int = 20
    """Turns of the policy, summaries not counted."""
    seconds: float = 600.0
    """From the first prompt to the last answer; scoring may take as long again."""
    context_tokens: int = 8192
    """Ids in one segment, prompt and answers together."""
    turn_tokens: int = 1024
    """Ids in one turn; clamped to what is left of the context."""
    tokens: int | None = None
    """Sampled ids in all; None for no limit but those of turns and context."""
    retries: int = 0
    """Fresh attempts after a failure of engine or box, as long as no action has reached the env."""

    def __post_init__(self) -> None:
        for name in ("turns", "context_tokens", "turn_tokens", "tokens", "retries"):
            check_whole(name, getattr(self, name), may_be_none=name == "tokens")
        check_number("seconds", self.seconds)
        for name in ("turns", "seconds", "context_tokens", "turn_tokens", "tokens"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}: must be positive, got {value}")
        if self.retries < 0:
            raise ValueError(f"retries: must not be negative, got {self.retries}")
