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
"""Rounds without a free task after which all of them are in play; a round leaves out what fills no whole batch."""
VERSION = 3
"""The form of the state that is written, and the only one that is read; an order of tasks is of one form."""

Count = Annotated[int, Field(ge=0)]
Outcome = Annotated[str, Field(pattern="^(started|resumed|finished|dropped|failed)$")]
_STRICT = ConfigDict(extra="forbid", strict=True)


class AllInPlay(ValueError):
    """Every task is in play, and no id is twice among the groups in play."""


@dataclass(frozen=True, slots=True, kw_only=True, config=_STRICT)
class InPlay:
    """What a process has in play between two batches; when the run stops there, it is lost."""

    started: Count = 0
    """Groups started since the last batch."""
    resumed: Count = 0
    """Groups in play that the last batch left in play."""
    tokens: Count = 0
    """Sampled tokens of the groups in play, in finished turns."""
    requests: dict[Outcome, Count] = field(default_factory=dict)
    """Counts of the engine's requests since the last batch by what became of them; those in flight are in `dropped`."""

    def __post_init__(self) -> None:
        LifecycleCounts(**self.requests)

    @property
    def groups(self) -> int:
        """The number of groups in play."""
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
    """Where the task sampler of one process stands between two batches."""

    version: int = VERSION
    rank: Count
    """The rank of the process."""
    world: Annotated[int, Field(ge=1)]
    """The number of processes of the run."""
    prompts: Annotated[int, Field(ge=1)]
    """Tasks in a batch of the whole run."""
    by_id: bool
    """Whether a task belongs to a process by its id, rather than by its position in the batch."""
    drawn: Count
    """Number from which on no task of this process has been drawn."""
    last_id: str | None
    """The id of the task before that number; None where nothing was drawn."""
    unplayed: tuple[Count, ...]
    """Numbers of the drawn tasks of this process that are still to be played, ascending."""
    batches: Count
    """Batches returned so far."""
    resting: dict[str, Annotated[int, Field(ge=1)]]
    """How often each resting task of this process is still to be passed over, by its id."""
    in_play: InPlay
    """What this process has in play."""

    def __post_init__(self) -> None:
        if self.rank >= self.world:
            raise ValueError(f"rank: must be below world ({self.world}), got {self.rank}")
        if list(self.unplayed) != sorted(set(self.unplayed)) or any(n >= self.drawn for n in self.unplayed):
            raise ValueError(f"unplayed: must be ascending numbers below drawn ({self.drawn}), got {self.unplayed}")

    def played(self, number: int) -> bool:
        """Whether the task of this number, one of this process, has been played."""
        return number < self.drawn and number not in self.unplayed

    def refuse_another(self, number: int, task_id: str) -> None:
        """Raise ValueError where the task of this number is the last one drawn, and was another one then."""
        if self.drawn == number + 1 and self.last_id != task_id:
            raise ValueError(
                f"tasks: number {number} is {task_id!r}, and was {self.last_id!r} in the run that is "
                f"resumed; resume with the same env, prompts and seed"
            )

    def to_json(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        values: dict[str, Any] = asdict(self)
        return values | {"unplayed": list(self.unplayed)}


def read_states(states: Sequence[Mapping[str, Any]]) -> list[SamplerState]:
    """Check the states of all processes of one run, in the order of their ranks.

    Raises ValueError, naming the field, for another version, for a field that is wrong, and where a process is missing.
    """
    _refuse_no_states(states)
    read = [_read(state) for state in states]
    if [state.rank for state in read] != list(range(len(states))) or any(s.world != len(states) for s in read):
        found = [f"{state.rank} of {state.world}" for state in read]
        raise ValueError(f"sampler: give the states of all processes in the order of their ranks, got those of {found}")
    for name in ("prompts", "by_id"):
        values = {getattr(state, name) for state in read}
        if len(values) > 1:
            raise ValueError(f"sampler.{name}: the states are not of one run, they have {sorted(values)}")
    return read


def _refuse_no_states(states: Any) -> None:
    wanted = "sampler: give a list with the state_dict() of each process, in the order of their ranks"
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
            f"sampler.version: the state has {version!r}, and only {VERSION} can be read; "
            f"resume the run with the agentgym that wrote it, or start a new run"
        )
    try:
        text = json.dumps(dict(state))
    except (TypeError, ValueError, RecursionError) as wrong:
        raise ValueError(f"sampler: the state is none that state_dict() gave, JSON cannot say it: {wrong}") from None
    try:
        return _adapter().validate_json(text)
    except ValidationError as wrong:
        first = wrong.errors()[0]
        name = ".".join(["sampler", *map(str, first["loc"])])
        raise ValueError(f"{name}: {first['msg'].removeprefix('Value error, ')}") from None


@cache
def _adapter() -> TypeAdapter[SamplerState]:
    return TypeAdapter(SamplerState)
