"""The order of a run's tasks, the share of each process, and the cursor that a resumed run goes on from."""

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
"""Tasks that may be passed over one after the other, as their ids are in the batch, before it is said that they are."""


def batches(env: str | type[Env[TaskT]], prompts: int, steps: int, *, seed: int) -> Iterator[list[TaskT]]:
    """`steps` batches of `prompts` training tasks, in an order that the seed determines.

    No task comes twice before all were seen, except that the few tasks that fill no whole batch at the end of a round
    are skipped in it. An `ag.Endless` gives its tasks in its own order, by a seed derived from this one. A mixture's
    members come in turns by weight, each with rounds of its own. Raises ValueError where the env, or a member, has
    fewer tasks than a batch takes of it.
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
    """The tasks of one env that are endless, in the order of their generator."""

    def __init__(self, tasks: Iterator[TaskT]) -> None:
        self._tasks = tasks

    def take(self, wanted: int) -> list[TaskT]:
        """The next tasks, of ids that differ."""
        return _of_ids_that_differ(self._tasks, wanted, "the env")


class _Rounds(Generic[TaskT]):
    """The tasks of one env, round after round."""

    def __init__(self, name: str, tasks: Sequence[TaskT], rng: random.Random) -> None:
        self._name, self._tasks, self._rng = name, tasks, rng
        self._seen: set[int] = set()

    def take(self, wanted: int) -> list[TaskT]:
        """The next tasks of this round, of ids that differ; of a new one where it has too few left."""
        if wanted > len(self._tasks):
            raise ValueError(
                f"prompts_per_step: {wanted} in a batch, and {self._name} has {len(self._tasks)} training tasks"
            )
        if len(self._seen) + wanted > len(self._tasks):
            self._seen.clear()
        return _of_ids_that_differ(self._drawn(), wanted, self._name)

    def _drawn(self) -> Iterator[TaskT]:
        """Yield tasks that this round has not had; drawn one by one, as a procedural env has too many to shuffle."""
        while True:
            index = self._rng.randrange(len(self._tasks))
            if index not in self._seen:
                self._seen.add(index)
                yield self._tasks[index]
            if len(self._seen) == len(self._tasks):
                self._seen.clear()


def _of_ids_that_differ(tasks: Iterator[TaskT], wanted: int, name: str) -> list[TaskT]:
    """Take the next tasks; one whose id is among them already is passed over, for it would be one group with that.

    What is made from an index or by a generator may have an id twice; of rows of data `refuse_twice` refuses it.
    """
    taken: dict[str, TaskT] = {}
    repeated = 0
    while len(taken) < wanted:
        task = next(tasks)
        repeated = repeated + 1 if task.id in taken else 0
        taken.setdefault(task.id, task)
        if repeated == REPEATED_AT_MOST:
            raise ValueError(
                f"prompts_per_step: {wanted} in a batch, and {name} gives {len(taken)} ids, then one of these "
                f"{repeated} times, "
                f"such as {task.id!r}; give each task an id of its own"
            )
    return list(taken.values())


@dataclass(frozen=True, slots=True)
class SampledTask(Generic[TaskT]):
    """A task and its number in the run's order of tasks."""

    number: int
    """Counts from 0 over the tasks of all processes; stays the same in a resumed run."""
    task: TaskT
    time: int = 0
    """What tells this time that the task is played from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The rule by which the tasks of a run belong to its processes."""

    prompts: int = 1
    """Tasks in a batch of the whole run."""
    rank: int = 0
    """The rank of this process."""
    world: int = 1
    """The number of processes."""
    by_id: bool = False
    """Give each task id to one process alone. Where one process draws more tasks for a batch than its share, or carries
    groups over, two could otherwise play the same task for one batch."""

    def owner(self, sampled: SampledTask[Any]) -> int:
        """The rank of the process that plays the task."""
        return self._key(sampled) % self.world

    def owns(self, sampled: SampledTask[Any]) -> bool:
        """Whether this process plays the task."""
        return self.owner(sampled) == self.rank

    def owns_id(self, task_id: str) -> bool:
        """Whether this process plays the tasks of that id, where they are shared out by id."""
        return zlib.crc32(task_id.encode()) % self.world == self.rank

    @property
    def share(self) -> int:
        """How many tasks of a batch this process plays, where they are not shared out by id."""
        return len(range(self.rank, self.prompts, self.world))

    def _key(self, sampled: SampledTask[Any]) -> int:
        return zlib.crc32(sampled.task.id.encode()) if self.by_id else sampled.number % self.prompts


class TaskSampler(Generic[TaskT]):
    """Hands out the tasks of one process, each once, and knows which of them are still to be played.

    `tasks` are those of the whole run, in its order; `sharding` says which of them this process plays. The state
    between two batches (`state_dict`) is all that a new sampler over the same tasks needs to go on (`load_state_dict`),
    on any number of processes: no task is lost, and none is played twice.
    """

    def __init__(
        self, tasks: Iterable[TaskT], sharding: Sharding | None = None, *, rest_epochs: int = 0, order: str = ""
    ) -> None:
        self.order = order
        """The name of the order of tasks, the same in a resumed run; "" where the tasks are of one call alone."""
        self._sharding = sharding or Sharding()
        if rest_epochs and not self._sharding.by_id:
            raise ValueError("rest_epochs: only the process that plays a task knows whether it rests; set by_id=True")
        self._rest_epochs = rest_epochs
        self._resting: dict[str, int] = {}
        """How often each resting task is still to be passed over, by its id."""
        self._rests = Counter[str]()
        """What became of tasks by their rests since the last batch."""
        self._stream = _numbered(tasks, is_order=bool(order))
        self._drawn = 0
        self._last_id: str | None = None
        self._waiting: list[SampledTask[TaskT]] = []
        self._in_play: set[int] = set()
        self.batches = 0
        """Batches returned so far, before a stop too."""
        self.lost = InPlay()
        """What the stopped run had in play; this process counts it as dropped in its first batch."""

    @classmethod
    def for_training(cls, env: str | type[Env[TaskT]], sharding: Sharding, *, seed: int, rest_epochs: int = 0) -> Self:
        """Return a sampler of the env's training tasks, which come round for ever, in the order of `batches`.

        Raises ValueError on every process where one of them has fewer tasks than it plays of a batch.
        """
        if sharding.by_id and sharding.world > 1:
            _refuse_idle_processes(env, sharding)
        stream = chain.from_iterable(batches(env, sharding.prompts, sys.maxsize, seed=seed))
        return cls(stream, sharding, rest_epochs=rest_epochs, order=f"{find_env(env).__qualname__}, seed {seed}")

    def next(self, taken: Collection[str] = ()) -> SampledTask[TaskT] | None:
        """The next task whose id is not in `taken`, in play from now on; None if the tasks have run out.

        A task that is passed over, in however many rounds, comes next when it is free; AllInPlay if none is.
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
        raise AllInPlay(f"tasks: all of them are in play ({len(taken)}); play fewer groups at once, or have more tasks")

    def _draw(self) -> SampledTask[TaskT] | None:
        for sampled in self._stream:
            if self._sharding.owns(sampled):
                self._drawn, self._last_id = sampled.number + 1, sampled.task.id
                if not self._rests_once(sampled.task.id):
                    return sampled
        return None

    def _rests_once(self, task_id: str) -> bool:
        """Whether the task is passed over this time."""
        left = self._resting.pop(task_id, 0)
        if not left:
            return False
        self._rests["passed_over"] += 1
        if left > 1:
            self._resting[task_id] = left - 1
        return True

    def taught_nothing(self, task_id: str, *, solved: bool) -> None:
        """The task's rollouts were all worth the same: it is passed over the next `rest_epochs` times."""
        if self._rest_epochs:
            self._resting[task_id] = self._rest_epochs
            self._rests["rested_solved" if solved else "rested_unsolved"] += 1

    def rests(self) -> BatchStats:
        """The counts of rests since the last batch, for its account, and how many tasks rest."""
        counts = self._rests
        return BatchStats(
            rested_solved=counts["rested_solved"],
            rested_unsolved=counts["rested_unsolved"],
            passed_over=counts["passed_over"],
            resting=len(self._resting),
        )

    def played(self, number: int) -> None:
        """The task's group has been returned or dropped: a resumed run does not play it again."""
        self._in_play.remove(number)

    def batch_done(self) -> None:
        """A batch has been returned, and what the stopped run had lost is in its account."""
        self.batches += 1
        self.lost = InPlay()
        self._rests.clear()

    def state_dict(self, in_play: InPlay | None = None) -> dict[str, Any]:
        """Where this sampler stands, as JSON values; `in_play` is what the process would lose by a stop here."""
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
        """Go on where the samplers of a stopped run were: `states` are those of all its processes, by rank.

        What was drawn and not played comes first; what was in play is counted by the first process. With `alone` this
        process was lost and the others go on: it counts what it had in play itself. Raises ValueError, naming the
        field, for states that are wrong or of another run, and where this sampler has been used already.
        """
        if self._drawn or self.batches:
            raise ValueError("sampler: it has handed out tasks already; load the state into a new one")
        saved = read_states(states)
        for name in ("prompts", "by_id"):
            was, now = getattr(saved[0], name), getattr(self._sharding, name)
            if was != now:
                raise ValueError(
                    f"sampler.{name}: the state has {was}, and this run {now}; resume with the same settings"
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
        """Move the cursor behind all that was drawn, and keep of it what was not played and is this process's."""
        before = replace(self._sharding, world=len(saved))
        end = max(state.drawn for state in saved)
        for sampled in islice(self._stream, end):
            for state in saved:
                state.refuse_another(sampled.number, sampled.task.id)
            if not saved[before.owner(sampled)].played(sampled.number) and self._sharding.owns(sampled):
                self._waiting.append(sampled)
            self._drawn, self._last_id = sampled.number + 1, sampled.task.id
        if self._drawn < end:
            raise ValueError(f"tasks: there are {self._drawn}, and the run that is resumed had drawn {end}")


def _numbered(tasks: Iterable[TaskT], *, is_order: bool) -> Iterator[SampledTask[TaskT]]:
    """Yield the tasks with their numbers; what is no order of a run may be a share, whose numbers say nothing."""
    times = defaultdict[str, Iterator[int]](count)
    for number, task in enumerate(tasks):
        yield SampledTask(number, task, number if is_order else next(times[task.id]))


def _refuse_idle_processes(env: str | type[Env[Any]], sharding: Sharding) -> None:
    """Raise ValueError where a process has fewer tasks than it plays of a batch: it would look for them for ever."""
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
            f"prompts_per_step: process {rank} of {sharding.world} plays {share} tasks of a batch, and "
            f"{share - missing[rank]} "
            f"of the {len(tasks)} training tasks belong to it: with max_staleness, rest_epochs, or "
            "oversample.extra_groups, carry or replace each belongs to one; use more tasks, fewer prompts or processes"
        )
