"""Tasks with fields of all kinds. It has few imports, so that tests can load it quickly in separate processes."""

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

import agentgym as ag


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True)
class Place:
    name: str
    around: frozenset[str] = frozenset()


class Inner(BaseModel):
    names: set[str] = set()
    data: bytes = b""


class Holder(ag.Task):
    """A task with a field of any type."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    value: Any = None


class Typed(ag.Task):
    """A task with fields of types that JSON lacks."""

    names: set[str] = Field(default_factory=set)
    pairs: frozenset[tuple[int, str]] = frozenset()
    color: Color = Color.RED
    by_color: dict[Color, set[int]] = Field(default_factory=dict)
    place: Place = Place("a")
    inner: Inner = Inner()
    many: list[Inner] = Field(default_factory=list)
    when: datetime = datetime(2024, 1, 1, tzinfo=UTC)
    price: Decimal = Decimal("1.10")
    who: UUID = UUID(int=1)
    where: Path = Path("a/b")
    point: Point = Point(1, 2)
    data: bytes = b"text"
    score: float = 0.0


def made(of: type[ag.Task] = Holder, **fields: Any) -> Any:
    return of(id="a", prompt="x", **fields)
