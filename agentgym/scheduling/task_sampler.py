"""The order of a run's tasks, the share of each process, and the cursor from which a resumed run continues."""

import random
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any, Generic, Self

from agentgym.data.endless import Endless
from agentgym.environments.env import Env, TaskT
from agentgym.environments.mixture import Mixture
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import split_tasks
from agentgym.scheduling.accounting import BatchStats
from agentgym.scheduling.sampler_state import ROUNDS, AllInPlay, InPlay, SamplerState, read_states
from agentgym.seeds import seed_for

REPEATED_AT_MOST = 10_000
"""Maximum number of consecutive tasks skipped because their ids are already in the batch; after that, an error is
raised.
"""


def batches(env: str | type[Env[TaskT]], prompts: int, steps: int, *, seed: int) -> Iterator[list[TaskT]]:
    """Yield `steps` batches of `prompts` training tasks, in an order that the seed determines.

    No task is repeated before all have been yielded, except that the last tasks of a round that don't fill a whole
    batch are skipped. An `ag.Endless` yields its tasks in its own order, from a seed derived from this one. A
    mixture's members alternate by weight, each with separate rounds.

    Args:
        env: The env's class or registered name.
        prompts: Number of tasks in a batch.
        steps: Number of batches.
        seed: The seed of the order.

    Yields:
        The tasks of one batch, with distinct ids.

    Raises:
        ValueError: If the env, or a member of a mixture, has fewer tasks than a batch takes from it.
    """
    cls = find_env(env)
    if issubclass(cls, Mixture):
        yield from _mixed_batches(cls, prompts, steps, seed)
        return
    rounds = _rounds("the env", split_tasks(cls, "train"), seed)
    yield from (rounds.take(prompts) for _ in range(steps))


def _mixed_batches(env: type[Mixture], prompts: int, steps: int, seed: int) -> Iterator[list[Any]]:
    rounds = {name: _rounds(name, env.tasks_of(name, "train"), seed, name) for name in env.members}
    turns = env.turns()
    for _ in range(steps):
        names = list(islice(turns, prompts))
        taken = {name: iter(rounds[name].take(count)) for name, count in Counter(names).items()}
        yield [next(taken[name]) for name in names]


def _rounds(name: str, tasks: Sequence[TaskT], seed: int, *of: str) -> "_Rounds[TaskT] | _InOrder[TaskT]":
    if isinstance(tasks, Endless):
        return _InOrder(tasks.begin(seed_for("generator", seed, *of, bits=31)))
    return _Rounds(name, tasks, random.Random(seed_for("task order", seed, *of)))


class _InOrder(Generic[TaskT]):
    """The tasks of an endless env, in the order of their generator."""

    def __init__(self, tasks: Iterator[TaskT]) -> None:
        self._tasks = tasks

    def take(self, wanted: int) -> list[TaskT]:
        """Return the next `wanted` tasks with distinct ids."""
        return _of_ids_that_differ(self._tasks, wanted, "the env")


class _Rounds(Generic[TaskT]):
    """The tasks of one env, round after round."""

    def __init__(self, name: str, tasks: Sequence[TaskT], rng: random.Random) -> None:
        self._name, self._tasks, self._rng = name, tasks, rng
        self._seen: set[int] = set()

    def take(self, wanted: int) -> list[TaskT]:
        """Return the next `wanted` tasks with distinct ids. Start a new round first if this one has too few left."""
        if wanted > len(self._tasks):
            raise ValueError(
                f"prompts_per_step: a batch needs {wanted} tasks, but {self._name} has only "
                f"{len(self._tasks)} training tasks"
            )
        if len(self._seen) + wanted > len(self._tasks):
            self._seen.clear()
        return _of_ids_that_differ(self._drawn(), wanted, self._name)

    def _drawn(self) -> Iterator[TaskT]:
        """Yield tasks that are new in this round, one by one, because a procedural env has too many to shuffle."""
        while True:
            index = self._rng.randrange(len(self._tasks))
            if index not in self._seen:
                self._seen.add(index)
                yield self._tasks[index]
            if len(self._seen) == len(self._tasks):
                self._seen.clear()


def _of_ids_that_differ(tasks: Iterator[TaskT], wanted: int, name: str) -> list[TaskT]:
    """Return the next `wanted` tasks, all with different ids, because two tasks with the same id would form one group.

    Tasks created from an index or by a generator may repeat an id; a repeated one is skipped. For rows of data,
    `refuse_twice` rejects repeated ids.

    Raises:
        ValueError: If `REPEATED_AT_MOST` tasks in a row are skipped. The message calls the env `name`.
    """
    taken: dict[str, TaskT] = {}
    repeated = 0
    while len(taken) < wanted:
        task = next(tasks)
        repeated = repeated + 1 if task.id in taken else 0
        taken.setdefault(task.id, task)
        if repeated == REPEATED_AT_MOST:
            raise ValueError(
                f"prompts_per_step: a batch needs {wanted} tasks, but {name} has only {len(taken)} different ids, and "
                f"then repeated them {repeated} times, such as {task.id!r}; give each task a unique id"
            )
    return list(taken.values())


@dataclass(frozen=True, slots=True)
class SampledTask(Generic[TaskT]):
    """A task and its number in the run's order of tasks."""

    number: int
    """Counts from 0 over the tasks of all processes; stays the same in a resumed run."""
    task: TaskT
    time: int = 0
    """A number that differs each time the task is drawn, so that each group of the task gets a different seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The rule that assigns the tasks of a run to its processes."""

    prompts: int = 1
    """Number of tasks in a batch of the whole run."""
    rank: int = 0
    """The rank of this process."""
    world: int = 1
    """Number of processes."""
    by_id: bool = False
    """Whether each task id is assigned to a single process. Otherwise, if a process draws more tasks for a batch than
    its share, or carries groups over, two processes could run the same task for one batch.
    """

    def owner(self, sampled: SampledTask[Any]) -> int:
        """Return the rank of the process that runs the task."""
        return self._key(sampled) % self.world

    def owns(self, sampled: SampledTask[Any]) -> bool:
        """Return whether this process runs the task."""
        return self.owner(sampled) == self.rank

    def owns_id(self, task_id: str) -> bool:
        """Return whether this process runs the tasks with that id, if tasks are assigned by id."""
        return zlib.crc32(task_id.encode()) % self.world == self.rank

    @property
    def share(self) -> int:
        """Number of tasks of a batch that this process runs, if tasks aren't assigned by id."""
        return len(range(self.rank, self.prompts, self.world))

    def _key(self, sampled: SampledTask[Any]) -> int:
        return zlib.crc32(sampled.task.id.encode()) if self.by_id else sampled.number % self.prompts


class TaskSampler(Generic[TaskT]):
    """Hands out the tasks of one process, each once, and tracks which of them still have to be run.

    The state between two batches (`state_dict`) is all that a new sampler over the same tasks needs to continue
    (`load_state_dict`), on any number of processes: no task is lost, and none is run twice.

    Args:
        tasks: The tasks of the whole run, in its order.
        sharding: Which of them this process runs; None runs all of them.
        rest_epochs: Number of times that a task is skipped after all its rollouts had the same reward.
        order: The name of the order of tasks; "" if the tasks' positions mean nothing outside this sampler.

    Raises:
        ValueError: If `rest_epochs` is set but tasks aren't assigned by id.
    """

    def __init__(
        self, tasks: Iterable[TaskT], sharding: Sharding | None = None, *, rest_epochs: int = 0, order: str = ""
    ) -> None:
        self.order = order
        """The name of the order of tasks, the same in a resumed run; "" if the tasks' positions mean nothing outside
        this sampler.
        """
        self._sharding = sharding or Sharding()
        if rest_epochs and not self._sharding.by_id:
            raise ValueError("rest_epochs: only the process that runs a task knows whether it rests; set by_id=True")
        self._rest_epochs = rest_epochs
        self._resting: dict[str, int] = {}
        """For each resting task, by its id: how many more times it is to be skipped."""
        self._rests = Counter[str]()
        """How many tasks began to rest, and how often resting tasks were skipped, since the last batch; by field of
        `BatchStats`.
        """
        self._stream = _numbered(tasks, is_order=bool(order))
        self._drawn = 0
        self._last_id: str | None = None
        self._waiting: list[SampledTask[TaskT]] = []
        self._in_play: set[int] = set()
        self.batches = 0
        """Number of batches returned so far, including those before a stop."""
        self.lost = InPlay()
        """The work that the stopped run had in progress; this process counts it as dropped in its first batch."""

    @classmethod
    def for_training(cls, env: str | type[Env[TaskT]], sharding: Sharding, *, seed: int, rest_epochs: int = 0) -> Self:
        """Return a sampler of the env's training tasks, which repeat forever, in the order of `batches`.

        Args:
            env: The env's class or registered name.
            sharding: Which of the tasks this process runs.
            seed: The seed of the order.
            rest_epochs: Number of times that a task is skipped after all its rollouts had the same reward.

        Raises:
            ValueError: On every process, if one of them has fewer tasks than it runs per batch.
        """
        if sharding.by_id and sharding.world > 1:
            _refuse_idle_processes(env, sharding)
        stream = chain.from_iterable(batches(env, sharding.prompts, sys.maxsize, seed=seed))
        return cls(stream, sharding, rest_epochs=rest_epochs, order=f"{find_env(env).__qualname__}, seed {seed}")

    def next(self, taken: Collection[str] = ()) -> SampledTask[TaskT] | None:
        """Return the next task whose id is not in `taken`, or None if the tasks have run out.

        The returned task is then in progress. A task that is passed over because its id is taken, even in several
        rounds, comes next once its id is free.

        Args:
            taken: The ids of tasks that can't be used now.

        Raises:
            AllInPlay: If no task is free.
        """
        sampled = self._next_free(taken)
        if sampled is not None:
            self._in_play.add(sampled.number)
        return sampled

    def _next_free(self, taken: Collection[str]) -> SampledTask[TaskT] | None:
        for i, sampled in enumerate(self._waiting):
            if sampled.task.id not in taken:
                return self._waiting.pop(i)
        waiting = {sampled.task.id for sampled in self._waiting}
        for _ in range(1 + ROUNDS * len(taken)):
            fresh = self._draw()
            if fresh is None or fresh.task.id not in taken:
                return fresh
            if fresh.task.id not in waiting:
                self._waiting.append(fresh)
                waiting.add(fresh.task.id)
        raise AllInPlay(
            f"tasks: all of them are in progress ({len(taken)}); run fewer groups at once, or use more tasks"
        )

    def _draw(self) -> SampledTask[TaskT] | None:
        for sampled in self._stream:
            if self._sharding.owns(sampled):
                self._drawn, self._last_id = sampled.number + 1, sampled.task.id
                if not self._rests_once(sampled.task.id):
                    return sampled
        return None

    def _rests_once(self, task_id: str) -> bool:
        """Return whether the task rests, and is therefore skipped this time. If so, count the skip."""
        left = self._resting.pop(task_id, 0)
        if not left:
            return False
        self._rests["passed_over"] += 1
        if left > 1:
            self._resting[task_id] = left - 1
        return True

    def taught_nothing(self, task_id: str, *, solved: bool) -> None:
        """Skip the task the next `rest_epochs` times, because all its rollouts had the same reward.

        Args:
            task_id: The task's id.
            solved: Whether all its rollouts solved the task.
        """
        if self._rest_epochs:
            self._resting[task_id] = self._rest_epochs
            self._rests["rested_solved" if solved else "rested_unsolved"] += 1

    def rests(self) -> BatchStats:
        """Return stats with the counts of rests since the last batch, and with the number of tasks that rest now."""
        counts = self._rests
        return BatchStats(
            rested_solved=counts["rested_solved"],
            rested_unsolved=counts["rested_unsolved"],
            passed_over=counts["passed_over"],
            resting=len(self._resting),
        )

    def played(self, number: int) -> None:
        """Record that the task's group has been returned or dropped, so that a resumed run doesn't run it again.

        Args:
            number: The task's number.
        """
        self._in_play.remove(number)

    def batch_done(self) -> None:
        """Record that a batch has been returned.

        Its stats included the work that the stopped run had lost and the counts of rests, so both are reset.
        """
        self.batches += 1
        self.lost = InPlay()
        self._rests.clear()

    def state_dict(self, in_play: InPlay | None = None) -> dict[str, Any]:
        """Return the state of this sampler as JSON values.

        Args:
            in_play: The work that the process would lose if it stopped now. If None, the state has the work
                that the stopped run had lost.
        """
        sharding = self._sharding
        return SamplerState(
            rank=sharding.rank,
            world=sharding.world,
            prompts=sharding.prompts,
            by_id=sharding.by_id,
            drawn=self._drawn,
            last_id=self._last_id,
            unplayed=tuple(sorted([*self._in_play, *(sampled.number for sampled in self._waiting)])),
            batches=self.batches,
            resting=dict(self._resting),
            in_play=in_play or self.lost,
        ).to_json()

    def load_state_dict(self, states: Sequence[Mapping[str, Any]], *, alone: bool = False) -> None:
        """Continue from the samplers of a stopped run.

        Tasks that were drawn but not run come first. The process of rank 0 counts the groups that were in progress as
        dropped.

        Args:
            states: The states of all the run's processes, by rank.
            alone: Whether only this process was lost and the others continue; it then counts the groups that it had in
                progress itself.

        Raises:
            ValueError: If the states are invalid or belong to another run, or if this sampler has already been used;
                the message names the field.
        """
        if self._drawn or self.batches:
            raise ValueError("sampler: has already handed out tasks; load the state into a new one")
        saved = read_states(states)
        for name in ("prompts", "by_id"):
            was, now = getattr(saved[0], name), getattr(self._sharding, name)
            if was != now:
                raise ValueError(
                    f"sampler.{name}: the state has {was}, but this run has {now}; resume with the same settings"
                )
        self._go_on(saved)
        self.batches = max(state.batches for state in saved)
        found = {name: left for state in saved for name, left in state.resting.items()}
        self._resting = {name: left for name, left in found.items() if self._sharding.owns_id(name)}
        if alone:
            self.lost = saved[self._sharding.rank].in_play
        elif self._sharding.rank == 0:
            self.lost = sum((state.in_play for state in saved), start=InPlay())

    def _go_on(self, saved: Sequence[SamplerState]) -> None:
        """Skip all tasks that the stopped run has drawn, but retain those of this process that were not run.

        `saved` has the states of all processes of the stopped run.
        """
        before = replace(self._sharding, world=len(saved))
        end = max(state.drawn for state in saved)
        for sampled in islice(self._stream, end):
            for state in saved:
                state.refuse_another(sampled.number, sampled.task.id)
            if not saved[before.owner(sampled)].played(sampled.number) and self._sharding.owns(sampled):
                self._waiting.append(sampled)
            self._drawn, self._last_id = sampled.number + 1, sampled.task.id
        if self._drawn < end:
            raise ValueError(f"tasks: there are only {self._drawn}, but the resumed run had drawn {end}")


def _numbered(tasks: Iterable[TaskT], *, is_order: bool) -> Iterator[SampledTask[TaskT]]:
    """Yield the tasks with their numbers and times (see `SampledTask`).

    If `is_order`, the tasks are those of the whole run in its order, and a task's number is also its time. Otherwise,
    they may be one process's share of a batch. Their numbers then mean nothing outside this call, so each time is
    counted per task id instead.
    """
    times = defaultdict[str, Iterator[int]](count)
    for number, task in enumerate(tasks):
        yield SampledTask(number, task, number if is_order else next(times[task.id]))


def _refuse_idle_processes(env: str | type[Env[Any]], sharding: Sharding) -> None:
    """Raise ValueError if a process has fewer tasks than it runs per batch, since it would search for them forever."""
    tasks = split_tasks(find_env(env), "train")
    processes = [replace(sharding, rank=rank) for rank in range(sharding.world)]
    missing = {process.rank: process.share for process in processes if process.share}
    for index in range(len(tasks)):
        if not missing:
            return
        owner = sharding.owner(SampledTask(index, tasks[index]))
        missing[owner] = missing.get(owner, 0) - 1
        if missing[owner] <= 0:
            del missing[owner]
    if missing:
        share = processes[rank := min(missing)].share
        raise ValueError(
            f"prompts_per_step: process {rank} of {sharding.world} runs {share} tasks of a batch, but only "
            f"{share - missing[rank]} of the {len(tasks)} training tasks belong to it; with max_staleness, rest_epochs "
            "or oversample.extra_groups, carry or replace, each task belongs to one process; use more tasks, or fewer "
            "prompts or processes"
        )
