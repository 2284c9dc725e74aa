"""Several envs combined into one; each task is played by the env that it comes from."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import count, islice
from typing import Any, ClassVar

from agentgym.data.endless import Endless
from agentgym.environments.env import Env, Split
from agentgym.environments.parameters import parameters
from agentgym.environments.task_rows import split_tasks
from agentgym.sandboxes.protocol import SandboxSpec
from agentgym.tools.declarations import check_number
from agentgym.types.task import Task


@dataclass(frozen=True, slots=True)
class Member:
    """One env of a mixture."""

    env: type[Env[Any]]
    weight: float
    """How often its tasks are drawn, relative to the other members' weights; a finite number above 0."""

    def __post_init__(self) -> None:
        check_number("weight", self.weight)
        if self.weight <= 0:
            raise ValueError(
                f"weight: must be above 0, got {self.weight!r}; leave out a member that should not be played"
            )


class Mixture(Env[Any]):
    """Several envs that can be used as one env class; `mix` creates it.

    A task's id is NAME/ID: the member's name, and the task's id in that member. A mixture is never instantiated.
    """

    members: ClassVar[Mapping[str, Member]] = {}
    """The envs by name, in alphabetical order."""

    @classmethod
    def tasks(cls, split: Split) -> Sequence[Task]:
        """Return the tasks of all members, alternating by weight; when one has none left, the others continue."""
        return _InTurns({name: cls.tasks_of(name, split) for name in cls.members}, cls.turns)

    @classmethod
    def tasks_of(cls, name: str, split: Split) -> Sequence[Task]:
        """Return one member's tasks, with their ids in the mixture."""
        env = cls.members[name].env
        tasks = split_tasks(env, split)
        return tasks.mapped(partial(_renamed, name)) if isinstance(tasks, Endless) else _Renamed(name, tasks)

    @classmethod
    def sandbox_for(cls, task: Task) -> SandboxSpec | None:
        """Return the kind of sandbox that the task's own env chooses for it."""
        return member_of(cls, task).sandbox_for(task)

    @classmethod
    def turns(cls, names: Sequence[str] | None = None) -> Iterator[str]:
        """Yield members' names forever, in proportion to their weights.

        Among the first n names, each member's count differs from n times its share by less than one. Of the members
        that are below their share, the one that would be the first to fall a whole turn behind comes next (Baruah et
        al., 1996, Proportionate Progress, for one processor).

        Args:
            names: The members to use; None uses all.
        """
        shares = cls._shares(names or list(cls.members))
        had = dict.fromkeys(shares, 0)
        for turn in count(1):
            below = [name for name, share in shares.items() if had[name] < share * turn]
            name = min(below, key=lambda name: (had[name] + 1) / shares[name])
            had[name] += 1
            yield name

    @classmethod
    def most(cls, prompts: int, steps: int) -> Counter[str]:
        """Return, for each member, the largest number of its tasks in any of the first `steps` batches.

        Args:
            prompts: Number of tasks in a batch.
            steps: Number of batches.
        """
        turns, most = cls.turns(), Counter[str]()
        shares = cls._shares(list(cls.members)).values()
        for step in range(1, steps + 1):
            most |= Counter(islice(turns, prompts))
            if all((share * step * prompts).denominator == 1 for share in shares):
                break  # Each member has had its exact share, so the turns repeat.
        return most

    @classmethod
    def _shares(cls, names: Sequence[str]) -> dict[str, Fraction]:
        """Return each member's share of the total weight; weights count as written, so 0.3 is exactly three tenths."""
        weights = {name: Fraction(str(cls.members[name].weight)) for name in names}
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def mix(members: Mapping[str, Member]) -> type[Mixture]:
    """Return a mixture class of these members.

    Args:
        members: The members by name.

    Raises:
        ValueError: If a name contains a slash.
    """
    for name in members:
        if "/" in name:
            raise ValueError(f"env: {name!r} has a slash, which separates a member's name from a task's id; rename it")
    made: type[Mixture] = type("Mixture", (Mixture,), {"members": dict(sorted(members.items()))})
    return made


def member_of(env: type[Env[Any]], task: Any) -> type[Env[Any]]:
    """Return the class that plays the task: the mixture's member, or the env itself if it isn't a mixture.

    Raises:
        ValueError: If the task belongs to none of the members.
    """
    if not issubclass(env, Mixture):
        return env
    name, slash, _ = task.id.partition("/")
    if not slash or name not in env.members:
        raise ValueError(
            f"task: {task.id!r} belongs to no member of the mixture; its id must begin with NAME/, where NAME is "
            f"one of {', '.join(env.members)}"
        )
    return env.members[name].env


def parameter_values(env: type[Env[Any]]) -> dict[str, Any]:
    """Return the values of an env's parameters by name; those of a mixture's members are named MEMBER.NAME."""
    if not issubclass(env, Mixture):
        return {name: found.value for name, found in parameters(env).items()}
    members = ((name, parameter_values(member.env)) for name, member in env.members.items())
    return {f"{name}.{parameter}": value for name, values in members for parameter, value in values.items()}


class _Renamed(Sequence[Task]):
    """A member's tasks in a mixture. When a task is accessed, it is copied with the id `MEMBER/ID`."""

    def __init__(self, name: str, tasks: Sequence[Task]) -> None:
        self.name, self.tasks = name, tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _Renamed(self.name, self.tasks[index])
        return _renamed(self.name, self.tasks[index])


def _renamed(name: str, task: Task) -> Task:
    return task.model_copy(update={"id": f"{name}/{task.id}"})


class _InTurns(Sequence[Task]):
    """The tasks of several members, each once; the order is computed only up to the accessed index."""

    def __init__(self, tasks: Mapping[str, Sequence[Task]], turns: Any) -> None:
        self.tasks, self._turns = tasks, turns
        self._order: list[tuple[str, int]] = []
        self._coming = self._all()

    def __len__(self) -> int:
        return min(sum(map(len, self.tasks.values())), sys.maxsize)  # an endless member alone has sys.maxsize tasks

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        wanted = range(len(self))[index]
        while len(self._order) <= wanted:
            self._order.append(next(self._coming))
        name, number = self._order[wanted]
        return self.tasks[name][number]

    def _all(self) -> Iterator[tuple[str, int]]:
        """Yield the name and index of each task; a member without tasks left drops out, and the turns restart."""
        given = dict.fromkeys((name for name, tasks in self.tasks.items() if len(tasks)), 0)
        while given:
            for name in self._turns(list(given)):
                yield name, given[name]
                given[name] += 1
                if given[name] == len(self.tasks[name]):
                    del given[name]
                    break
