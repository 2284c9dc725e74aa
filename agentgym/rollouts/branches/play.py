"""Branches: several continuations of a rollout from one of its states, while the rollout itself waits there.

::

    rollout     turn 0  turn 1 | turn 2 ...
    branch 0                   | turn 2  turn 3   end        each with a copy of the env, a branch of the sandbox
    branch 1                   | turn 2  end                 and separate samples
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from agentgym.agent_api.env import AgentEnv
from agentgym.config_fields import require_instance
from agentgym.environments.env import Env, has_group_reward
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import AgentGymError, EngineError, EnvError, Failure, SandboxError, alone, boundary
from agentgym.machine.time_limits import TimeLimit, off_the_clock
from agentgym.rollouts.at_exit import at_exit
from agentgym.rollouts.attempt import Attempt, Ending
from agentgym.rollouts.conversation import Conversation
from agentgym.rollouts.forks import ConversationForks
from agentgym.rollouts.segment import OpenSegment
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.tools.tool_threads import Threads
from agentgym.types.branching import BranchingConfig
from agentgym.types.rollout import Rollout, RolloutBranch, Segment, StopReason

CANCELLED = "its asyncio task was cancelled by the env's code"
"""The failure of a branch that ended without a result."""


def check_branching(env: type[Env[Any]], branching: BranchingConfig | None) -> None:
    """Raise ValueError, with the reason, if an env's rollouts can't have these branches."""
    if branching is None:
        return
    require_instance("branching", branching, BranchingConfig)
    if issubclass(env, AgentEnv):
        raise ValueError(
            f"branching: {env.__name__} starts a separate program, which cannot be copied; leave branching out"
        )
    if has_group_reward(env):
        raise ValueError(
            f"branching: {env.__name__}.group_reward compares whole rollouts and cannot score branches; leave "
            "branching out"
        )
    if branching.after == "tool_error" and not issubclass(env, ToolEnv):
        raise ValueError(f"branching.after: {env.__name__} is not a ToolEnv and counts no tool errors; use 'turn'")


class Branches:
    """The branches of one rollout, which `play` runs in each state that the settings select."""

    def __init__(self, root: Attempt, settings: BranchingConfig) -> None:
        self.root, self.settings = root, settings
        self.played: list[BranchAttempt] = []
        self.waited = 0.0
        """Seconds that the rollout waited for its branches."""
        self._chooser = StateChooser(settings)

    async def play(self, conversation: Conversation, deadline: TimeLimit) -> None:
        """Run this state's branches to their ends if the state is selected; meanwhile the rollout's clock is stopped.

        Raises:
            EnvError: If the env can't be copied.
        """
        assert self.root.env is not None
        if not self._chooser.chooses(conversation, self.root.env):
            return
        if self.root.state.out_of(conversation.segment.room) is not None:  # A limit ends the rollout here.
            return
        loop = asyncio.get_running_loop()
        began = loop.time()
        with off_the_clock():
            seconds = deadline.left
            begun = [BranchAttempt(self, conversation, place, seconds) for place in range(self.settings.per_state)]
            self.played += begun
            try:
                async with asyncio.TaskGroup() as playing:
                    for attempt in begun:
                        attempt.task_of_it = playing.create_task(attempt.run(None))
            except BaseExceptionGroup as group:
                raise alone(group) from group
        self.waited += loop.time() - began
        self._chooser.spent += sum(attempt.tokens for attempt in begun)
        for attempt in begun:
            if attempt.refusal is not None:
                raise attempt.refusal

    def added(self, rollout: Rollout) -> Rollout:
        """Return the rollout with its branches and with metrics of their number, failures, tokens and seconds."""
        ends = tuple(attempt.end() for attempt in self.played)
        segments: list[Segment] = list(rollout.segments)
        for place, attempt in enumerate(self.played):
            segments += attempt.segments(place, len(segments))
        counts = {
            "branches": float(len(ends)),
            "branches_failed": float(sum(end.reward is None for end in ends)),
            "branch_tokens": float(sum(attempt.tokens for attempt in self.played)),
            "branch_seconds": self.waited,
            "seconds": rollout.metrics["seconds"] - self.waited,
        }
        return replace(rollout, segments=tuple(segments), branches=ends, metrics={**rollout.metrics, **counts})


class BranchAttempt(Attempt):
    """One running branch: an attempt that starts in a state of another attempt, with the rest of its limits."""

    def __init__(self, branches: Branches, origin: Conversation, place: int, seconds: float) -> None:
        root, state = branches.root, branches.root.state
        name = f"{state.rollout_id}/{state.answers}+{place}"
        super().__init__(root.cls, root.task, state.engine, state.engines, state.sampling, state.seed, name)
        self.root, self.origin, self.place, self.seconds = root, origin, place, seconds
        self.is_trained = branches.settings.train
        self.reward, self.rewards = root.reward, dict(root.rewards)
        self.state.turns, self.state.tokens, self.state.answers = state.turns, state.tokens, state.answers
        self.state.began = state.began
        self.turn, self._turns_before, self._tokens_before = state.answers, state.turns, state.tokens
        self.refusal: AgentGymError | None = None
        """The error if the env can't be copied."""
        self.task_of_it: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens that the branch itself has sampled."""
        return self.state.tokens - self._tokens_before

    def end(self) -> RolloutBranch:
        """Return the outcome of the branch."""
        if self.task_of_it is not None and self.task_of_it.cancelled() and self.failure is None:
            self.stop_reason, self.failure = StopReason.ERROR, Failure(type="AgentGymError", message=CANCELLED)
        own = {"turns": float(self.state.turns - self._turns_before), "tokens": float(self.tokens)}
        return RolloutBranch(
            turn=self.turn,
            reward=self.reward if self.failure is None else None,
            stop_reason=self.stop_reason,
            rewards=self.rewards,
            role_rewards=self.role_rewards,
            failure=self.failure,
            metrics={**self.state.metrics, **own},
        )

    def segments(self, branch: int, first: int) -> list[Segment]:
        """Close the branch's segments and return them with their indices in the rollout. Call this only once.

        Args:
            branch: Index of the branch in `Rollout.branches`.
            first: Index of the branch's first segment in `Rollout.segments`.
        """
        for opened in self.state.segments:
            opened.index, opened.branch = opened.index + first, branch
            if opened.kind != "branch":  # The parent of a "branch" segment is a segment of the rollout.
                opened.parent = (opened.parent or 0) + first
        return [opened.close() for opened in self.state.segments]

    async def _opened(self, sandboxes: SandboxPool | None) -> str:
        """Copy the env, fork its sandbox, run the turns, always close everything, and return the stop reason."""
        origin = self.root.env
        assert origin is not None
        async with at_exit(EngineError, "release", self.state.release_all), AsyncExitStack() as stack:
            memo = self._memo(origin)
            if origin._sandbox is not None:
                with boundary(SandboxError, "the branch of the sandbox"):
                    memo[id(origin.sandbox)] = await stack.enter_async_context(await origin.sandbox.fork())
            self.env = env = await self._copied(origin, memo)
            env._sandbox = memo.get(id(origin._sandbox))
            env._models, env._forks, env._threads = self.state.models, None, Threads(env)
            # The env's own `branch` may have made a shallow copy, which shares these objects.
            env.metrics, env.tool_failures = dict(env.metrics), Counter(env.tool_failures)
            env.role_rewards = dict(env.role_rewards)
            async with at_exit(EnvError, f"{self.name}.close", self._close):
                return await self._play_and_score(env)

    def _memo(self, origin: Env[Any]) -> dict[int, Any]:
        """Return a memo for `copy.deepcopy`, with the objects that must not be copied with the env.

        It maps the `id` of each such object to the object that replaces it in the copy, which may be the same one.
        """
        state, root = self.state, self.root.state
        shared = [origin.task, origin._resources, root.engine, *root.engines.values(), *root.fallback_models.values()]
        memo: dict[int, Any] = {id(each): each for each in shared}
        memo |= {id(origin._forks): None, id(origin._threads): None, id(root.models): state.models}
        return memo | {id(model): state.models(name) for name, model in root.models.asked().items()}

    async def _copied(self, origin: Env[Any], memo: dict[int, Any]) -> Env[Any]:
        try:
            with boundary(EnvError, f"{self.name}.branch"):
                twin = await type(origin).branch(origin, memo)
                if type(twin) is not type(origin) or twin is origin:
                    raise TypeError(f"it must return another instance of {self.name}, got {twin!r:.80}")
        except AgentGymError as error:
            self.refusal = error
            raise
        return twin

    async def _play(self, env: Env[Any], deadline: TimeLimit) -> Ending:
        """Continue from the state, turn after turn."""
        conversation = self._conversation()
        env._forks = ConversationForks(conversation)
        return await self._turns(env, conversation, deadline)

    def _conversation(self) -> Conversation:
        """Return the rollout's conversation as it was, in a new segment that starts with the messages so far."""
        origin, held = self.origin, self.origin.segment
        speaker = origin.speaker if self.is_trained else origin.speaker._replace(trained=False)
        call_ids = origin.call_ids.branch(f"{self.turn}+{self.place}")
        chat = origin.chat.branch()
        conversation = Conversation(self.state, chat, origin.first, call_ids, "", origin.turns_left, speaker)
        conversation.open("branch", list(conversation.chat.messages), held.token_ids, held.index)
        conversation.segment.turns_before = held.turns_before + len(held.turns)
        return conversation


class StateChooser:
    """Selects states by the turns sampled before them, never by a turn after them."""

    def __init__(self, settings: BranchingConfig) -> None:
        self.settings = settings
        self.spent = 0
        """Number of tokens that the branches have sampled so far."""
        self._named = 0
        """Number of states so far that are of the kind in `settings.after`."""
        self._segment: OpenSegment | None = None
        self._turns = 0
        """Index of the next turn in `_segment`."""
        self._errors = 0.0
        self._surprises: list[float] = []

    def chooses(self, conversation: Conversation, env: Env[Any]) -> bool:
        """Return whether branches are run from this state; must be called in each state of a rollout, in order."""
        segment, turns, errors = self._segment, self._turns, self._errors
        self._segment, self._turns = conversation.segment, len(conversation.segment.turns)
        self._errors = env.metrics.get("tool_errors", 0.0)
        if segment is None:  # Nothing is sampled yet, and the group's other rollouts also start here.
            return False
        before, surprise = self._surprises, -float(segment.logprobs(turns).mean())
        self._surprises = [*before, surprise]
        # On average, the turn's tokens were less likely than those of the turns before it.
        is_unlikely = bool(before) and surprise > sum(before) / len(before)
        named = {"turn": True, "tool_error": self._errors > errors, "unlikely_turn": is_unlikely}
        if not named[self.settings.after]:
            return False
        self._named += 1
        tokens = self.settings.tokens
        return self._named % self.settings.every == 0 and (tokens is None or self.spent < tokens)
