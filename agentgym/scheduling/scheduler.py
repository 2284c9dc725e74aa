"""Groups of rollouts, batch after batch: over-sampled, cut, carried over, replaced, and all of it counted."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Generic, Self

from agentgym.boxes import Boxes
from agentgym.engines.base import Engine
from agentgym.environments.env import Env, TaskT
from agentgym.environments.registry import find_env
from agentgym.rollouts.rollout import rollout
from agentgym.scheduling.accounting import BatchStats, Groups, LifecycleCounts
from agentgym.scheduling.gate import EngineGate, RolloutUsage, current_usage
from agentgym.scheduling.group_state import GroupState
from agentgym.scheduling.oversampling import DEADLINE_FACTOR, DEADLINE_SHARE, Oversample, share_of
from agentgym.scheduling.task_sampler import Place
from agentgym.types import Rollout, Sampling


class Scheduler(Generic[TaskT]):
    """Plays `n` rollouts of each task that it draws; everything that was started ends up in exactly one count.

    ::

        async with Scheduler(env, tasks, engine, n=8, oversample=Oversample(...)) as scheduler:
            groups = await scheduler.collect(16)

    What a batch leaves in play waits at the engine's door until the next `collect`, with its env, box and segments; or,
    with `staleness`, goes on at once, and the next batches' groups beside it: then a batch is trained on while later
    ones are played. No group is older than the bound (`staleness`, or `oversample.carry`) when it is returned: its
    oldest token was sampled at most that many policy versions ago; old groups are waited for in time. `staleness + 1`
    batches are in play at most. Leaving the block cancels what is still in play.

    `place()` between two batches is what a scheduler of another process needs to go on, as its `left`: with the tasks
    that were not drawn or not played. What was in play is in its first account as dropped.
    """

    def __init__(
        self,
        env: str | type[Env[TaskT]],
        tasks: Iterable[TaskT],
        engine: Engine,
        *,
        n: int,
        oversample: Oversample | None = None,
        staleness: int = 0,
        boxes: Boxes | None = None,
        concurrency: int = 64,
        sampling: Sampling | None = None,
        seed: int = 0,
        on_rollout: Callable[[Rollout], None] | None = None,
        left: Place | None = None,
        by_turn: bool = False,
    ) -> None:
        if n < 1 or concurrency < 1:
            raise ValueError(f"{'n' if n < 1 else 'concurrency'}: must be at least 1")
        self._oversample = oversample or Oversample()
        self._oversample.fits(group_size=n, staleness=staleness)
        self._cls, self._n, self._staleness = find_env(env), n, staleness
        self._by_turn = by_turn
        """Whether a group without a signal is one whose turns do not differ, rather than its totals."""
        self._bound = staleness or self._oversample.carry
        self._left = left or Place()
        """By the scheduler whose place this one takes: in the first batch's account, as dropped."""
        self._tasks, self._held = enumerate(tasks), list[tuple[int, TaskT]]()
        self._gate = EngineGate(engine, self._left.requests)
        self._boxes, self._concurrency = boxes, concurrency
        self._places = asyncio.Semaphore(concurrency)
        self._sampling, self._seed, self._on_rollout = sampling, seed, on_rollout
        self._groups: list[GroupState[TaskT]] = []
        """In play, the finished ones of them too."""
        self._dropped: list[GroupState[TaskT]] = []
        """Since the last batch."""
        self._leaving: list[GroupState[TaskT]] = []
        """Returned or dropped; some of their rollouts may still be closing."""
        self._target = self._wanted = self._replaced = self._closed = self._drawn = 0
        self._started, self._resumed, self._batches = self._left.started, self._left.resumed, self._left.batches
        self._changed = asyncio.Event()
        self._deadline: _Deadline | None = None
        self._broken = False
        """An error that is nobody's rollout came out of a job; it ends all of them."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._boxes is None and self._cls.sandbox is not None:
                self._boxes = await stack.enter_async_context(self._cls.sandbox.open(self._concurrency))
            self._jobs = await asyncio.TaskGroup().__aenter__()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for group in [*self._groups, *self._leaving]:
            group.cancel(self._gate.drop)
        async with self._stack:
            # An error of the block is not one of the jobs: only a cancellation may have come from them.
            cancelled = kind is not None and issubclass(kind, asyncio.CancelledError)
            await self._jobs.__aexit__(*((kind, error, trace) if cancelled else (None, None, None)))

    async def collect(self, wanted: int, *, to_come: int | None = None) -> Groups:
        """The next `wanted` groups, in the order of their tasks; fewer at a deadline or where the tasks have run out.

        A group that failures have made smaller counts as well. More than `wanted` come only where the engine's version
        has risen by more than one, and they would be too old for the next batch. `to_come` is how many batches will
        follow, where that is known: no more than those are played ahead. Where all rollouts failed the groups hold
        their errors; `raise_if_all_failed(groups)` raises the first one, once the batches of all processes are joined.
        """
        if wanted < 1:
            raise ValueError(f"wanted: must be at least 1, got {wanted}")
        for group in [group for group in self._groups if self._age(group) > self._bound]:
            self._drop(group)
        ahead = wanted * (self._staleness if to_come is None else min(self._staleness, to_come))
        self._wanted, self._target = wanted, wanted + ahead + self._oversample.extra_groups
        self._gate.open()
        self._fill()
        if self._oversample.stop == "deadline":
            self._deadline = _Deadline(sum(group.unended for group in self._groups), self._changed)
        try:
            while not self._enough():
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._pause()
        groups = self._harvest()
        if self._staleness:
            self._target = ahead
            self._fill()
        return groups

    def _pause(self) -> None:
        """Between batches nothing new is asked of the engine, unless generation and training overlap."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if not self._staleness:
            self._gate.shut()

    # Starting

    def _fill(self) -> None:
        while len(self._groups) < self._target:
            drawn = self._next_task()
            if drawn is None:
                return
            number, task = drawn
            group = GroupState(task, n=self._n, seed=self._seed + self._batches, number=number, by_turn=self._by_turn)
            self._groups.append(group)
            self._started += 1
            for index in range(self._n + self._oversample.extra_rollouts):
                group.start(self._jobs.create_task(self._play(group, index, group.usage())))

    def _next_task(self) -> tuple[int, TaskT] | None:
        """The next one whose id is free, and its number; None at the end.

        A small data set comes round while its tasks are in play.
        """
        self._leaving = [group for group in self._leaving if group.busy]
        taken = {group.task.id for group in [*self._groups, *self._leaving]}
        for i, (_, task) in enumerate(self._held):
            if task.id not in taken:
                return self._held.pop(i)
        while len(self._held) <= 2 * len(taken):
            drawn = next(self._tasks, None)
            self._drawn += drawn is not None
            if drawn is None or drawn[1].id not in taken:
                return drawn
            self._held.append(drawn)
        raise ValueError(
            f"tasks: all of them are in play ({len(taken)}); play fewer groups at once, or have more tasks"
        )

    async def _play(self, group: GroupState[TaskT], index: int, usage: RolloutUsage) -> None:
        try:
            self._ended(group, index, usage, await self._played(group, index, usage))
        except asyncio.CancelledError:
            if not self._broken:  # Whoever cancelled it without dropping it still waits for its end.
                self._ended(group, index, usage, group.lost(index, "its task was cancelled from outside"))
            raise
        except BaseException:
            self._broken = True
            raise

    async def _played(self, group: GroupState[TaskT], index: int, usage: RolloutUsage) -> Rollout:
        current_usage.set(usage)
        async with self._places:
            usage.began = asyncio.get_running_loop().time()
            return await rollout(
                self._cls,
                group.task,
                self._gate,
                boxes=self._boxes,
                sampling=self._sampling,
                seed=group.seed,
                rollout_id=group.name(index),
            )

    def _ended(self, group: GroupState[TaskT], index: int, usage: RolloutUsage, done: Rollout) -> None:
        if group.closed or usage.dropped:  # it ended while it was being cancelled
            return
        group.ended[index], usage.stopped = done, asyncio.get_running_loop().time()
        if self._on_rollout is not None:
            self._on_rollout(done)
        if self._deadline is not None:
            self._deadline.ended(1)
        if group.complete:
            self._close(group)

    # Ending

    def _close(self, group: GroupState[TaskT]) -> None:
        """The group has what it needs: its further rollouts are cancelled, and without signal it is replaced."""
        if self._deadline is not None:
            self._deadline.ended(group.unended)
        self._closed += 1
        group.close(self._closed, self._gate.drop)
        if not group.signal and self._replaced < self._oversample.replace:
            self._replaced += 1
            self._drop(group)
            self._fill()
        self._changed.set()

    def _drop(self, group: GroupState[TaskT]) -> None:
        group.cancel(self._gate.drop)
        self._groups.remove(group)
        self._dropped.append(group)

    def _age(self, group: GroupState[TaskT]) -> int:
        version = self._gate.version
        return version - group.oldest(version)

    def _enough(self) -> bool:
        """Whether a batch can be cut now, and later batches still take in time what it leaves behind."""
        ready = sum(group.closed > 0 for group in self._groups)
        if ready == len(self._groups):
            return True
        late = self._deadline is not None and self._deadline.passed
        if ready < self._wanted and not (late and ready):
            return False
        taken = self._next_batch()
        versions_left = sorted(self._bound - self._age(group) for group in self._groups if group not in taken)
        return not self._bound or all(i < left * self._wanted for i, left in enumerate(versions_left))

    def _next_batch(self) -> set[GroupState[TaskT]]:
        """The finished groups that are the next to be trained on: the oldest, then those that came first."""
        ready = sorted((group for group in self._groups if group.closed), key=lambda g: (-self._age(g), g.closed))
        due = sum(self._bound > 0 and self._age(group) >= self._bound for group in ready)
        return set(ready[: max(self._wanted, due)])

    def _harvest(self) -> Groups:
        """The batch and its account; what is left in play is carried over where it may be, and dropped where not."""
        taken = self._next_batch()
        for group in [group for group in self._groups if group not in taken and not self._bound]:
            self._drop(group)
        # In the order of their tasks, not of their ends.
        batch = [group for group in self._groups if group in taken]
        self._groups = [group for group in self._groups if group not in taken]
        groups = Groups([group.finished() for group in batch], self._batch_stats(batch))
        self._leaving += [*batch, *self._dropped]
        self._dropped, self._left = [], Place()
        self._replaced = self._started = 0
        self._resumed = len(self._groups)
        self._batches += 1
        return groups

    def place(self) -> Place:
        """Where this scheduler stands; for another one's `left`. Between two batches."""
        unplayed = [number for number, _ in self._held] + [group.number for group in self._groups]
        return Place(
            drawn=self._drawn,
            unplayed=tuple(sorted(unplayed)),
            batches=self._batches,
            started=self._started,
            resumed=self._resumed,
            tokens=sum(usage.tokens for group in [*self._groups, *self._dropped] for usage in group.usages),
            requests=self._gate.left(),
        )

    def _batch_stats(self, batch: Sequence[GroupState[TaskT]]) -> BatchStats:
        """What became of all that was in play."""
        carried, dropped, version = self._groups, self._dropped, self._gate.version
        size = self._n + self._oversample.extra_rollouts
        scored = [r for group in batch for r in group.scored]
        failed = sum(len(group.failed) for group in batch)
        unscored_groups = sum(not group.scored for group in batch)
        extra = [usage for group in batch for usage in group.cut]
        lost = [*extra, *(usage for group in dropped for usage in group.usages)]
        begun = [usage for usage in lost if usage.began is not None]
        left = self._left.started + self._left.resumed
        seen = [r.reward for group in [*batch, *dropped] for r in group.scored if r.reward is not None]
        ages = [version - group.oldest_token(version) for group in batch]
        return BatchStats(
            rollouts=LifecycleCounts(
                started=self._started * size,
                resumed=self._resumed * size,
                finished=len(scored),
                dropped=len(lost) + left * size,
                carried=len(carried) * size,
                failed=failed,
            ),
            groups=LifecycleCounts(
                started=self._started,
                resumed=self._resumed,
                finished=len(batch) - unscored_groups,
                dropped=len(dropped) + left,
                carried=len(carried),
                failed=unscored_groups,
            ),
            requests=self._gate.counts(),
            without_signal=self._replaced,
            kept_tokens=sum(usage.tokens for group in batch for usage in group.played),
            dropped_tokens=sum(usage.tokens for usage in lost) + self._left.tokens,
            kept_s=sum(usage.seconds for group in batch for usage in group.played),
            cut=len(begun),
            cut_s=sum(usage.seconds for usage in begun),
            scored=len(seen),
            score=sum(seen),
            staleness=sum(ages),
            stalest=max(ages, default=0),
        )


class _Deadline:
    """Passes at 1.5 times the seconds after which 80 % of the rollouts were done."""

    def __init__(self, rollouts: int, passing: asyncio.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._began, self._left, self._passing = self._loop.time(), share_of(rollouts, DEADLINE_SHARE), passing
        self._timer: asyncio.TimerHandle | None = None
        self.passed = False

    def ended(self, count: int) -> None:
        """So many more rollouts are done, or will not be needed."""
        self._left -= count
        if self._left <= 0 and self._timer is None:
            took = self._loop.time() - self._began
            self._timer = self._loop.call_at(self._began + DEADLINE_FACTOR * took, self._pass)

    def _pass(self) -> None:
        self.passed = True
        self._passing.set()

    def cancel(self) -> None:
        """It will not pass any more."""
        if self._timer is not None:
            self._timer.cancel()
