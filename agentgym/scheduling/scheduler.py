"""Runs groups of rollouts and returns them in batches, with counts of everything that was started."""

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Generic, Self

from agentgym.engines.base import Engine, check_engine
from agentgym.environments.env import Env, TaskT
from agentgym.environments.registry import find_env
from agentgym.errors import AgentGymError
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.scheduling.accounting import Groups
from agentgym.scheduling.garbage import collect_old, collecting_between_batches
from agentgym.scheduling.gate import RolloutUsage, current_usage, gate_of
from agentgym.scheduling.group_rewards import GroupRewards
from agentgym.scheduling.group_state import CANCELLED, GroupState
from agentgym.scheduling.ledger import Ledger
from agentgym.scheduling.oversampling import BatchPolicy
from agentgym.scheduling.player import Player
from agentgym.scheduling.sampler_state import AllInPlay
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.task_sampler import SampledTask, TaskSampler
from agentgym.seeds import seed_for
from agentgym.types.rollout import Rollout

_AT_ONCE = 32
"""Number of groups that are started before the event loop continues with other work."""


class Scheduler(Generic[TaskT]):
    """Runs a group of rollouts for each task, returns the groups in batches, and counts everything that it starts.

    ::

        async with Scheduler(env, tasks, engine, Schedule(prompts_per_step=16, group_size=8)) as scheduler:
            groups = await scheduler.collect()

    Each rollout, group and request is counted exactly once.

    Rollouts that a batch leaves in progress wait at the engine's gate until the next `collect`, with their env,
    sandbox and segments. With `max_staleness` they continue at once instead, alongside the groups of the next
    batches, while a batch is trained on. At most `max_staleness + 1` batches are then in progress, including the one
    that is trained on.

    No returned group is older than the bound (`max_staleness`, or `oversample.carry`): its oldest token was sampled
    at most that many policy versions ago. A batch waits for groups that would otherwise become too old.

    The end of the `async with` cancels everything still in progress. Inside it, Python's garbage collector only scans
    young objects by itself, and the other objects are scanned between two batches. At its end, the process's own
    settings are restored.

    To continue in another process, store `state_dict()` between two batches, load it into a new `TaskSampler` over
    the same tasks, and pass that as `tasks`. Groups that were in progress are run again, and counted as dropped in
    the first batch's stats.

    Args:
        env: The env's class or registered name.
        tasks: The tasks, or a TaskSampler.
        engine: The engine of the policy.
        schedule: The number and size of groups, the seed and the oversampling.
        sandboxes: An open sandbox pool. None opens one if the env declares a sandbox.
        on_rollout: A callback for each rollout that ends; if the env has group rewards, the rollout includes them.
        models: Engines that the env uses by name (`Env.model`), in addition to the policy.
    """

    def __init__(
        self,
        env: str | type[Env[TaskT]],
        tasks: Iterable[TaskT] | TaskSampler[TaskT],
        engine: Engine,
        schedule: Schedule,
        *,
        sandboxes: SandboxPool | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
        models: Mapping[str, Engine] | None = None,
    ) -> None:
        check_engine(engine)
        self._schedule, self._on_rollout = schedule, on_rollout
        self._sampler = tasks if isinstance(tasks, TaskSampler) else TaskSampler(tasks)
        self._policy = BatchPolicy(schedule.oversample, schedule.max_staleness)
        self._ledger: Ledger[TaskT] = Ledger(schedule.rollouts, self._sampler.lost)
        self._gate = gate_of(engine, self._sampler.lost.requests)
        self._env = find_env(env)
        self._player = Player(self._env, self._gate, sandboxes, schedule, models)
        self._group_rewards = GroupRewards(self._env, self._player.models)
        self._groups: list[GroupState[TaskT]] = []
        """Groups in progress, and closed ones that have not been returned."""
        self._leaving: list[GroupState[TaskT]] = []
        """Returned or dropped groups, some of whose rollouts may still be closing."""
        self._closings = itertools.count(1)
        self._changed = asyncio.Event()
        self._broken = False
        """Whether a job raised an error that isn't a rollout's failure; such an error cancels all other jobs."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.enter_context(collecting_between_batches())
            await stack.enter_async_context(self._player)
            self._jobs = await asyncio.TaskGroup().__aenter__()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in [*self._groups, *self._leaving]:
            group.cancel(self._gate.drop)
        async with self._stack:
            # Only a cancellation of the block may come from the jobs; any other error of the block isn't theirs.
            cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
            await self._jobs.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    async def collect(self, wanted: int | None = None, *, to_come: int | None = None) -> Groups:
        """Return the next groups, in the order of their tasks; fewer at a deadline or if the tasks run out.

        A group is returned even if some or all of its rollouts failed; failed rollouts contain their errors. More
        than `wanted` groups are returned only if the engine's version rose by more than one and some groups would be
        too old for the next batch.

        If all rollouts failed, this raises nothing, because those of other processes may have succeeded. Join the
        batches of all processes, and call `raise_if_all_failed(groups)`, whose error quotes the first rollout's.

        Args:
            wanted: Number of groups; None uses the schedule's `prompts_per_step`.
            to_come: Number of batches that will follow; no more than those are started early. None means unknown.

        Returns:
            The groups, with the stats of the batch.

        Raises:
            ValueError: If `wanted` is less than 1, or if all tasks are in progress.
        """
        wanted = self._schedule.prompts_per_step if wanted is None else wanted
        if wanted < 1:
            raise ValueError(f"wanted: must be at least 1, got {wanted}")
        collect_old()  # By now the caller has usually released the previous batch.
        for group in self._policy.too_old(self._groups, self._gate.version):
            self._drop(group)
        self._policy.begin(wanted, to_come)
        self._gate.open()
        await self._wait()
        groups = self._harvest()
        if self._policy.overlaps:
            self._policy.play_ahead()
            with suppress(AllInPlay):  # The next batch starts the missing ones.
                self._fill()
        return groups

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a new `TaskSampler` loads to continue in another process, as plain JSON values.

        Call this between batches.
        """
        return self._sampler.state_dict(self._ledger.in_play(self._groups, self._gate.counts_if_stopped()))

    # Starting

    def _fill(self, most: int | None = None) -> bool:
        """Start groups up to the `BatchPolicy`'s target, at most `most`; return whether some are still missing."""
        self._leaving = [group for group in self._leaving if group.busy]
        busy = {group.task.id for group in [*self._groups, *self._leaving]}
        wanted = self._policy.target - len(self._groups)
        for _ in range(wanted if most is None else min(wanted, most)):
            sampled = self._sampler.next(busy)
            if sampled is None:
                return False
            self._start(sampled)
            busy.add(sampled.task.id)
        return len(self._groups) < self._policy.target

    async def _filled(self) -> bool:
        """Start some groups; return whether more must be started to reach the batch's target.

        No two groups in progress have the same task. If every task is taken, this waits until a rollout of a dropped or
        returned group has ended, because the group's task is free once all of its rollouts have ended.
        """
        try:
            return self._fill(_AT_ONCE)
        except AllInPlay:
            if not self._leaving:
                raise
            ending = [job for group in self._leaving for job in group.running]
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            return True

    def _start(self, sampled: SampledTask[TaskT]) -> None:
        group = GroupState(
            sampled.task,
            n=self._schedule.group_size,
            seed=seed_for("group", self._schedule.seed, sampled.task.id, sampled.time),
            number=sampled.number,
            order=self._sampler.order,
            by_turn=self._schedule.by_turn,
        )
        self._groups.append(group)
        self._ledger.start()
        for index in range(self._schedule.rollouts):
            group.start(self._jobs.create_task(self._play(group, index, group.usage())))

    async def _play(self, group: GroupState[TaskT], index: int, usage: RolloutUsage) -> None:
        try:
            self._ended(group, index, usage, await self._player.play(group, index, usage))
        except asyncio.CancelledError:
            if not self._broken:  # Cancelled but not dropped, so the group still waits for this rollout.
                self._ended(group, index, usage, group.failed_rollout(index, CANCELLED))
            raise
        except BaseException:
            self._broken = True
            raise

    # Ending

    async def _wait(self) -> None:
        """Run the groups until a batch is complete, and then close the engine's gate.

        With `max_staleness`, the gate stays open, because rollouts continue during training.
        """
        try:
            while await self._filled():  # noqa: ASYNC110  It only yields to other tasks.
                await asyncio.sleep(0)
            self._policy.set_deadline(sum(group.unended for group in self._groups), self._changed)
            while not self._policy.enough(self._groups, self._gate.version):
                self._changed.clear()
                await self._changed.wait()
                if not self._policy.enough(self._groups, self._gate.version) and await self._filled():
                    self._changed.set()
        finally:
            self._policy.end()
            if not self._policy.overlaps:
                self._gate.shut()

    def _ended(self, group: GroupState[TaskT], index: int, usage: RolloutUsage, done: Rollout) -> None:
        if group.closed or usage.dropped:  # The rollout ended while it was being cancelled.
            return
        group.end(index, done)
        usage.stopped = asyncio.get_running_loop().time()
        judged = self._group_rewards.has(group.task)
        if not judged or done.reward is None:
            self._told([done])
        self._policy.rollouts_ended(1)
        if group.complete and judged and group.scored:
            group.judge(self._jobs.create_task(self._judge(group)), self._gate.drop)
        elif group.complete:
            self._close(group)

    def _told(self, rollouts: Iterable[Rollout]) -> None:
        """Call `on_rollout` with each of these ended rollouts."""
        if self._on_rollout is not None:
            for rollout in rollouts:
                try:
                    self._on_rollout(rollout)
                except asyncio.CancelledError as error:  # it would silently end the rollout's asyncio task
                    raise AgentGymError("on_rollout raised CancelledError; raise another error to stop") from error

    async def _judge(self, group: GroupState[TaskT]) -> None:
        """Add the group rewards of a complete group, then close it."""
        current_usage.set(RolloutUsage())  # for a judge that is the policy, since no rollout makes these requests
        try:
            seed = group.seed if self._schedule.same_instance else self._schedule.seed
            judged = await self._group_rewards.added(group.task, group.scored, seed=seed)
            group.judged(judged)
            self._told(judged)
            self._close(group)
        except Exception:
            self._broken = True
            raise

    def _close(self, group: GroupState[TaskT]) -> None:
        """Close a complete group, and cancel the rollouts that it doesn't need.

        A group without a signal is replaced if `BatchPolicy` says so. If it has at least two scored rollouts, its task
        also rests for `rest_epochs` rounds.
        """
        self._policy.rollouts_ended(group.unended)
        group.close(next(self._closings), self._gate.drop)
        if len(group.scored) > 1 and not group.signal:
            self._sampler.taught_nothing(group.task.id, solved=group.solved(self._schedule.solved))
        if self._policy.replaces(group, self._ledger.replaced):
            self._ledger.replace()
            self._drop(group)
            with suppress(AllInPlay):  # `_wait` starts a new group once a task is free.
                self._fill()
        self._changed.set()

    def _drop(self, group: GroupState[TaskT]) -> None:
        group.cancel(self._gate.drop)
        self._groups.remove(group)
        self._sampler.played(group.number)
        self._ledger.drop(group)

    def _harvest(self) -> Groups:
        """Return the batch and its stats.

        The groups that are still in progress are carried over if the settings allow that, and dropped otherwise.
        """
        taken = {*self._policy.next_batch(self._groups, self._gate.version)}
        batch = [group for group in self._groups if group in taken]  # In the order of their tasks, not of their ends.
        self._groups = [group for group in self._groups if group not in taken]
        if not self._policy.bound:
            for group in list(self._groups):
                self._drop(group)
        stats = self._ledger.stats(batch, len(self._groups), version=self._gate.version, requests=self._gate.counts())
        harvest = Groups([group.finished() for group in batch], stats + self._sampler.rests())
        for group in batch:
            self._sampler.played(group.number)
        self._leaving += [*batch, *self._ledger.batch_done(len(self._groups))]
        self._sampler.batch_done()
        return harvest
