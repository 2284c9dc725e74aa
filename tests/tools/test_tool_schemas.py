"""The description of a tool that the model gets: one schema, read from the signature."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import agentgym as ag
from agentgym.tools.calls import dispatch
from agentgym.tools.tool import class_tools


class Point(BaseModel):
    x: int


class Desk:
    """Tools work without an env."""

    @ag.tool
    async def search(
        self,
        query: Annotated[str, Field(max_length=5, description="what to find")],
        where: Literal["web", "disk"] = "web",
        limit: Annotated[int, Field(ge=1)] = 3,
        title: str | None = None,
    ) -> str:
        """Search somewhere."""
        raise NotImplementedError

    @ag.tool
    def plot(self, at: Point) -> None:
        """Plot a point."""

    @ag.tool
    def greet(self) -> None:
        """Say hello."""

    @ag.tool(name="submit")
    def finish(self) -> None:
        """Hand in."""


class Wider(Desk):
    @ag.tool
    def close(self) -> None:
        """Shut the desk."""

    greet = None  # type: ignore[assignment]


def schema(name: str) -> dict[str, Any]:
    made: dict[str, Any] = class_tools(Desk)[name].schema["function"]
    return made


def test_the_schema_comes_from_the_signature() -> None:
    assert schema("search") == {
        "name": "search",
        "description": "Search somewhere.",
        "parameters": {
            "type": "object",
            "required": ["query"],
            "properties": {
                "query": {"type": "string", "maxLength": 5, "description": "what to find"},
                "where": {"type": "string", "enum": ["web", "disk"], "default": "web"},
                "limit": {"type": "integer", "minimum": 1, "default": 3},
                "title": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            },
        },
    }


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    assert schema("greet")["parameters"] == {"type": "object", "properties": {}}


def test_a_schema_has_no_generated_titles() -> None:
    assert "'title': 'Point'" not in str(schema("plot"))
    assert "'title': 'X'" not in str(schema("plot"))


def test_a_tool_may_be_renamed_and_tools_are_in_class_order() -> None:
    assert list(class_tools(Desk)) == ["search", "plot", "greet", "submit"]


def test_tools_are_inherited_and_cannot_be_removed_by_a_plain_override() -> None:
    assert list(class_tools(Wider)) == ["search", "plot", "submit", "close"]


@pytest.mark.parametrize("parameter", ["json", "copy", "schema"])
@pytest.mark.parametrize("prefix", ["", "_", "model_"])
async def test_a_parameter_may_have_any_name(parameter: str, prefix: str) -> None:
    name = prefix + parameter
    made: dict[str, Any] = {}
    exec(f"async def echo(self, {name}: str) -> str:\n    'Echo.'\n    return {name}", made)
    owner = type("Owner", (), {"echo": ag.tool(made["echo"])})
    assert (await dispatch(owner(), "echo", {name: "said"})).content == "said"
    assert list(class_tools(owner)["echo"].schema["function"]["parameters"]["properties"]) == [name]


def silent(self: object) -> None: ...


def untyped(self: object, x) -> None:  # type: ignore[no-untyped-def]
    """Take anything."""


def many(self: object, *xs: int) -> None:
    """Take many."""


def test_users_names_and_values_called_title_are_kept() -> None:
    class title(BaseModel):
        title: str

    def store(self: object, at: title, filed: dict[str, str] = {"title": "none"}) -> None:  # noqa: B006
        """Store."""

    store.__annotations__["at"] = title
    owner = type("Owner", (), {"store": ag.tool(store)})
    assert class_tools(owner)["store"].schema["function"]["parameters"] == {
        "$defs": {"title": {"type": "object", "required": ["title"], "properties": {"title": {"type": "string"}}}},
        "type": "object",
        "required": ["at"],
        "properties": {
            "at": {"$ref": "#/$defs/title"},
            "filed": {"type": "object", "additionalProperties": {"type": "string"}, "default": {"title": "none"}},
        },
    }


@pytest.mark.parametrize(
    ("function", "why"),
    [(silent, "docstring"), (untyped, "'x' needs a type"), (many, "'xs' must be a named parameter")],
)
def test_a_tool_that_the_model_could_not_call_is_refused_by_name(function: Any, why: str) -> None:
    owner = type("Owner", (), {"broken": ag.tool(function)})
    with pytest.raises(ValueError, match=f"^tool 'broken' of Owner.*{why}"):
        class_tools(owner)
