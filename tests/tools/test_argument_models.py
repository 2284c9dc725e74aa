"""Types of tools' parameters: those that pydantic cannot read are named, and a signature becomes a model only once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import numpy as np
import pydantic
import pytest
from pydantic import BaseModel, Field

import agentgym as ag
from agentgym.testing import Scripted, say
from agentgym.tools import argument_models, tools_of
from agentgym.tools.tool import WrongArguments, class_tools

if TYPE_CHECKING:
    from decimal import Decimal

TASK = ag.Task(id="t", prompt="Go.")


class Pair(TypedDict):
    a: int


def numbers(self: Any, count: int, values: np.ndarray) -> str:
    """Take numbers."""
    return ""


def nested(self: Any, values: list[np.ndarray] | None = None) -> str:
    """Take numbers."""
    return ""


def pair(self: Any, both: Pair) -> str:
    """Take two."""
    return ""


def tool_env(function: Callable[..., Any]) -> type[ag.ToolEnv[ag.Task]]:
    return type("E", (ag.ToolEnv,), {"my_tool": ag.tool(function), "r": ag.reward(lambda self: 1.0)})


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (numbers, "parameter 'values': pydantic can't read the type numpy.ndarray: "),
        (nested, "parameter 'values': pydantic can't read the type list"),
        pytest.param(
            pair,
            "parameter 'both': pydantic can't ",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic reads it since Python 3.12"),
        ),
    ],
)
def test_a_type_that_pydantic_cannot_read_is_refused_when_the_class_is_created(
    function: Callable[..., Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"^tool 'my_tool' of E: {named}"):
        tool_env(function)
    with pytest.raises(ValueError, match=f"^tool '{function.__name__}' of App: {named}"):
        tools_of(bound(function))


def bound(function: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = function.__get__(App("a"))
    return made


class Later(ag.ToolEnv[ag.Task]):
    @ag.tool
    async def keep(self, note: Note, price: int = 0) -> Decimal:
        """Keep a note whose class is defined below this one; what it returns is nobody's type."""
        raise NotImplementedError

    @ag.reward
    async def right(self) -> float:
        return 1.0


class Note(BaseModel):
    text: str


class Absent(Later):
    @ag.tool
    async def pay(self, amount: int, price: Decimal) -> str:
        """Pay."""
        return ""


async def test_a_type_that_is_defined_later_is_resolved_when_needed() -> None:
    assert (await ag.rollout(Later, TASK, Scripted([say("done")]))).reward == 1
    assert class_tools(Later)["keep"].bind({"note": {"text": "a"}})["note"] == Note(text="a")


async def test_a_type_that_is_never_defined_fails_the_rollout_by_tool_and_parameter() -> None:
    rollout = await ag.rollout(Absent, TASK, Scripted([say("done")]))
    assert rollout.error is not None
    assert "tool 'pay' of Absent: parameter 'price': its type 'Decimal' can't be resolved (NameError" in rollout.error
    assert "extra_tools" not in rollout.error


class App:
    def __init__(self, name: str) -> None:
        self.name = name

    def look(self, at: list[str], times: Annotated[int, Field(ge=1)] = 1) -> str:
        """Look."""
        return f"{self.name}: {at} {times}"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the names of models created during the test."""
    names: list[str] = []
    create: Callable[..., Any] = pydantic.create_model

    def counted(name: str, **given: Any) -> Any:
        names.append(name)
        return create(name, **given)

    monkeypatch.setattr(argument_models, "create_model", counted)
    return names


def test_methods_of_many_objects_share_models_and_run_on_their_own_objects(made: list[str]) -> None:
    tools = [tools_of(App(name))[0] for name in "abc"]
    assert len(made) <= 1
    assert [tool.call(**tool.bind({"at": ["x"]})) for tool in tools] == [f"{name}: ['x'] 1" for name in "abc"]
    with pytest.raises(WrongArguments, match=r"times: Input should be greater"):
        tools[2].bind({"at": [], "times": 0})
    tools[0].parameters["properties"].clear()
    assert tools_of(App("d"))[0].parameters["properties"].keys() == {"at", "times"}


def choosing(hint: Any, default: Any = None) -> Callable[..., Any]:
    """Return a new function with this parameter type and default."""

    def choose(what: Any = default) -> str:
        """Choose."""
        return str(what)

    choose.__annotations__["what"] = hint
    return choose


def test_functions_that_share_code_but_differ_in_types_have_separate_models(made: list[str]) -> None:
    kinds = [
        (Literal["a", "b"], "a"),
        (Literal["c"], "c"),
        (int | str, 1),
        (str | int, 1),
        (int, 1),
        (bool, True),
        (int, True),
        (list[str], None),
    ]
    once = [tools_of(choosing(*kind))[0].parameters for kind in kinds]
    assert len(made) == len(kinds)
    assert [tools_of(choosing(*kind))[0].parameters for kind in kinds] == once
    assert len(made) == len(kinds)
    assert len({str(parameters) for parameters in once}) == len(kinds)
    assert len({id(tool) for tool in (tools_of(choosing(int), prefix=name)[0] for name in "xy")}) == 2


def test_changed_annotations_of_a_function_are_read_again() -> None:
    function = choosing(Literal["a"], "a")
    before = tools_of(function)[0]
    function.__annotations__["what"] = Literal["b"]
    assert (before.bind({"what": "a"}), tools_of(function)[0].bind({"what": "b"})) == ({"what": "a"}, {"what": "b"})
    with pytest.raises(WrongArguments):
        tools_of(function)[0].bind({"what": "a"})
