"""State that the conversations of one rollout share: its engine, its limits and their usage."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentgym.engines.base import Engine
from agentgym.environments.limits import Compact, Limits, Window
from agentgym.judges.model_roles import ModelRoles, release_each
from agentgym.rollouts.segment import OpenSegment
from agentgym.types.completion import Sampling
from agentgym.types.rollout import StopReason


@dataclass(slots=True, kw_only=True)
class RolloutState:
    """The engine, the limits and the counts that apply to all conversations of one rollout together."""

    name: str
    """The name of the env, for errors."""
    rollout_id: str
    engine: Engine
    """The policy's engine."""
    engines: Mapping[str, Engine]
    """The engines of the model roles."""
    sampling: Sampling
    seed: int
    limits: Limits
    context: Compact | Window | None
    fallback_models: Mapping[str, Engine] = field(default_factory=dict)
    """The env's own engines by model role, for the roles that `engines` doesn't contain."""
    segments: list[OpenSegment] = field(default_factory=list)
    turns: int = 0
    """Number of policy turns requested so far, without summaries."""
    answers: int = 0
    """Number of turns and summaries sampled so far."""
    tokens: int = 0
    """Number of ids sampled so far."""
    asked: int = 0
    """Number of the ids allowed by `limits.tokens` that are reserved for turns in progress."""
    began: float = 0.0
    """The rollout's start time by the clock of its event loop; 0 before the start."""
    metrics: dict[str, float] = field(default_factory=dict)
    models: ModelRoles = field(init=False)
    """The models that the env queries by name."""
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.models = ModelRoles(
            self.engines,
            self.fallback_models,
            owner=self.name,
            session=self.rollout_id,
            seed=self.seed,
            metrics=self.metrics,
        )

    def engine_of(self, model: str) -> Engine:
        """Return the engine of a model role, or the policy's engine for ""; raise EnvError for an unknown name."""
        return self.models.engine(model) if model else self.engine

    def budget(self, room: int) -> int:
        """Return the maximum number of ids that one turn may sample, if `room` more ids fit in the context."""
        budget = min(self.limits.turn_tokens, room)
        return budget if self.sampling.max_tokens is None else min(budget, self.sampling.max_tokens)

    async def take(self, budget: int) -> int:
        """Reserve up to `budget` ids of `limits.tokens` for a turn, until `give_back`.

        Concurrent conversations share these ids. If the turns in progress leave too few, this waits for ids that
        those turns don't use.

        Returns:
            The number of reserved ids, which is 0 if none are left.
        """
        assert self.limits.tokens is not None
        while self.asked and self.limits.tokens - self.tokens - self.asked < budget:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        budget = min(budget, self.limits.tokens - self.tokens)
        self.asked += budget
        return budget

    def give_back(self, budget: int, used: int) -> None:
        """End the reservation of `budget` ids for a turn that sampled `used` of them."""
        self.tokens += used
        if self.limits.tokens is None:  # Nothing was reserved.
            return
        self.asked -= budget
        while self._waiting:
            future = self._waiting.pop(0)
            if not future.done():
                future.set_result(None)

    def out_of(self, room: int) -> StopReason | None:
        """Return the limit that forbids sampling another id, or None; `room` is how many more ids fit the context."""
        if room <= 0:
            return StopReason.CONTEXT
        if self.limits.tokens is not None and self.tokens >= self.limits.tokens:
            return StopReason.TOKENS
        return None

    def count(self, what: str) -> None:
        """Add 1 to one of the rollout's metrics."""
        self.metrics[what] = self.metrics.get(what, 0.0) + 1

    async def release(self, sessions: str) -> None:
        """Release every engine session whose name starts with `sessions`, even if releasing one of them fails."""
        await release_each(self._sessions(sessions))

    async def release_all(self) -> None:
        """Release every engine session of the rollout, including those of other models that the env queried."""
        await release_each([*self._sessions(f"{self.rollout_id}/"), *self.models.sessions()])

    def _sessions(self, begin: str) -> list[tuple[Engine, str]]:
        return [
            (self.engine_of(segment.speaker.model), segment.session)
            for segment in self.segments
            if segment.session.startswith(begin)
        ]
