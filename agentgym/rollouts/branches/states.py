"""The choice of the states of a rollout that branches are played from."""

import random
from typing import Any

from agentgym.branching.settings import Branching, PlannedBranching
from agentgym.environments.env import Env
from agentgym.rollouts.conversation import Conversation
from agentgym.rollouts.segment import OpenSegment
from agentgym.types import Floats


class StateChooser:
    """Chooses states by what was sampled before them, and in earlier batches; never by a turn behind them."""

    def __init__(self, settings: Branching, seed: int) -> None:
        self.settings = settings
        self._plan = settings if isinstance(settings, PlannedBranching) else PlannedBranching.of(settings)
        self._draws = random.Random(seed)
        self.spent = 0
        """Tokens that the branches have sampled so far."""
        self._named = 0
        """How many states were of the kind that the settings name."""
        self._segment: OpenSegment | None = None
        self._turns = 0
        """The segment and the place of the turn that comes next."""
        self._errors = 0.0
        self._surprises: list[float] = []

    def chooses(self, conversation: Conversation, env: Env[Any]) -> bool:
        """Whether branches are played from this state; it is asked in each state of a rollout, in their order."""
        segment, turns, errors = self._segment, self._turns, self._errors
        self._segment, self._turns = conversation.segment, len(conversation.segment.turns)
        self._errors = env.metrics.get("tool_errors", 0.0)
        if segment is None:  # Nothing is sampled yet: the group's other rollouts begin here, too.
            return False
        is_unlikely = self._is_unlikely(segment.logprobs(turns))
        named = {
            "turn": True,
            "tool_error": self._errors > errors,
            "unlikely_turn": is_unlikely,
            "learned_turn": self._draws.random() < self._plan.explored or conversation.state.answers == self._plan.turn,
        }
        if not named[self.settings.after]:
            return False
        self._named += 1
        tokens = self.settings.tokens
        return self._named % self.settings.every == 0 and (tokens is None or self.spent < tokens)

    def _is_unlikely(self, logprobs: Floats) -> bool:
        """Whether the tokens of a turn were less likely than those of the turns before it, on average."""
        before, surprise = self._surprises, -float(logprobs.mean())
        self._surprises = [*before, surprise]
        return bool(before) and surprise > sum(before) / len(before)
