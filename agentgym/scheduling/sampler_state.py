"""The state of a task sampler between two batches, as plain JSON values."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from functools import cache
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from agentgym.scheduling.accounting import LifecycleCounts

ROUNDS = 64
"""Number of rounds without a free task after which all tasks count as in progress.

A single round isn't enough, because it omits the tasks that don't fill a whole batch.
"""
VERSION = 3
"""Version of the state's format; only this version can be loaded, because it also determines the order of tasks."""

Count = Annotated[int, Field(ge=0)]
Outcome = Annotated[str, Field(pattern="^(started|resumed|finished|dropped|failed)$")]
_STRICT = ConfigDict(extra="forbid", strict=True)


class AllInPlay(ValueError):
    """Raised if no task is free: all are in progress, and no id may occur twice among the groups in progress."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class InPlay:
    """The work that a process has in progress between two batches, which is lost if the run stops then."""

    started: Count = 0
    """Number of groups started since the last batch."""
    resumed: Count = 0
    """Number of groups that were in progress when the last batch ended."""
    tokens: Count = 0
    """Sampled tokens, in finished turns, of the groups in progress and of those dropped since the last batch."""
    requests: dict[Outcome, Count] = field(default_factory=dict)
    """Counts of the engine's requests since the last batch by outcome; requests in progress count as `dropped`."""

    def __post_init__(self) -> None:
        LifecycleCounts(**self.requests)

    @property
    def groups(self) -> int:
        """Number of groups in progress."""
        return self.started + self.resumed

    def __add__(self, other: "InPlay") -> "InPlay":
        return InPlay(
            started=self.started + other.started,
            resumed=self.resumed + other.resumed,
            tokens=self.tokens + other.tokens,
            requests=dict(Counter(self.requests) + Counter(other.requests)),
        )


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class SamplerState:
    """The state of one process's task sampler between two batches."""

    version: int = VERSION
    rank: Count
    """The rank of the process."""
    world: Annotated[int, Field(ge=1)]
    """Number of processes of the run."""
    prompts: Annotated[int, Field(ge=1)]
    """Number of tasks in a batch of the whole run."""
    by_id: bool
    """Whether a task is assigned to a process by its id instead of its position in the batch."""
    drawn: Count
    """The number of the last task drawn, plus 1; 0 if none was drawn. All of this process's tasks with numbers below
    this value have been drawn.
    """
    last_id: str | None
    """The id of the task whose number is `drawn` - 1; None if no task has been drawn."""
    unplayed: tuple[Count, ...]
    """The numbers of this process's drawn tasks that still have to be run, in ascending order."""
    batches: Count
    """Number of batches returned so far."""
    resting: dict[str, Annotated[int, Field(ge=1)]]
    """For each resting task of this process, by its id: how many more times it is to be skipped."""
    in_play: InPlay
    """The work that this process has in progress."""

    def __post_init__(self) -> None:
        if self.rank >= self.world:
            raise ValueError(f"rank: must be below world ({self.world}), got {self.rank}")
        if list(self.unplayed) != sorted(set(self.unplayed)) or any(n >= self.drawn for n in self.unplayed):
            raise ValueError(f"unplayed: must be ascending numbers below drawn ({self.drawn}), got {self.unplayed}")

    def played(self, number: int) -> bool:
        """Return whether this process's task with this number has been run."""
        return number < self.drawn and number not in self.unplayed

    def refuse_another(self, number: int, task_id: str) -> None:
        """Raise ValueError if the stopped run's last task drawn had this number, but another id."""
        if self.drawn == number + 1 and self.last_id != task_id:
            raise ValueError(
                f"tasks: number {number} is {task_id!r}, but was {self.last_id!r} in the resumed run; "
                f"resume with the same env, prompts and seed"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        values: dict[str, Any] = asdict(self)
        return values | {"unplayed": list(self.unplayed)}


def read_states(states: Sequence[Mapping[str, Any]]) -> list[SamplerState]:
    """Validate the states of all processes of one run, in the order of their ranks.

    Raises:
        ValueError: If a state's format has another version or a field is invalid, if a process is missing, or if the
            states are from different runs; the message names the field.
    """
    _refuse_no_states(states)
    read = [_read(state) for state in states]
    if [state.rank for state in read] != list(range(len(states))) or any(s.world != len(states) for s in read):
        found = [f"{state.rank} of {state.world}" for state in read]
        raise ValueError(f"sampler: pass the states of all processes in the order of their ranks, got those of {found}")
    for name in ("prompts", "by_id"):
        values = {getattr(state, name) for state in read}
        if len(values) > 1:
            raise ValueError(f"sampler.{name}: the states are from different runs: they have {sorted(values)}")
    return read


def _refuse_no_states(states: Any) -> None:
    wanted = "sampler: pass a list with the state_dict() of each process, in the order of their ranks"
    if isinstance(states, str | bytes) or not isinstance(states, Sequence):
        kind = "one dict; write [state]" if isinstance(states, Mapping) else type(states).__name__
        raise ValueError(f"{wanted}; got {kind}")
    if not states:
        raise ValueError(f"{wanted}; got an empty list")
    for rank, state in enumerate(states):
        if not isinstance(state, Mapping):
            raise ValueError(f"{wanted}; got {type(state).__name__} at position {rank}")


def _read(state: Mapping[str, Any]) -> SamplerState:
    version = state.get("version")
    if version != VERSION:
        raise ValueError(
            f"sampler.version: the state has version {version!r}, but only {VERSION} can be loaded; "
            f"resume the run with the version of agentgym that wrote it, or start a new run"
        )
    try:
        text = json.dumps(dict(state))
    except (TypeError, ValueError, RecursionError) as wrong:
        raise ValueError(
            f"sampler: the state was not returned by state_dict(), because it cannot be written as JSON: {wrong}"
        ) from None
    try:
        return _adapter().validate_json(text)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        name = ".".join(["sampler", *map(str, first["loc"])])
        raise ValueError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None


@cache
def _adapter() -> TypeAdapter[SamplerState]:
    return TypeAdapter(SamplerState)
