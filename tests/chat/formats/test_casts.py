"""Arguments are cast to the types that a tool's schema allows, also behind references and in unions."""

from enum import Enum, IntEnum
from typing import Any

import pytest
from pydantic import BaseModel

import agentgym as ag
from agentgym.chat.formats import RESPONSE_FORMATS
from agentgym.tools.tool import class_tools
from tests.support.response_formats import calls


class Point(BaseModel):
    x: int
    y: int = 0


class Line(BaseModel):
    start: Point
    name: str = ""


class Tree(BaseModel):
    children: list["Tree"] = []


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Color(Enum):
    RED = "red"
    ONE = "1"


class Draws(ag.ToolEnv[ag.Task]):
    @ag.tool
    async def draw(
        self,
        must: Point = Point(x=0),  # noqa: B008
        place: Point | None = None,
        path: list[Point] | None = None,
        line: Line | None = None,
        tree: Tree | None = None,
        either: Point | Line | None = None,
        by_name: dict[str, Point] | None = None,
        level: Level = Level.LOW,
        color: Color = Color.RED,
        words: str | int = "",
    ) -> str:
        """Draw."""
        return ""

    @ag.reward
    def none(self) -> float:
        return 0.0


DRAW = class_tools(Draws)["draw"]
WRITTEN = {
    "qwen_coder": "<tool_call><function=draw><parameter={}>\n{}\n</parameter></function></tool_call>",
    "glm": "<tool_call>draw\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}


def cast(form: str, key: str, value: str, tool: dict[str, Any]) -> Any:
    (read,) = calls(RESPONSE_FORMATS[form].parse(WRITTEN[form].format(key, value), [tool]))
    return read["arguments"][key]


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("must", '{"x": 1, "y": 2}', Point(x=1, y=2)),
        ("place", '{"x": 1}', Point(x=1)),
        ("place", "null", None),
        ("place", "None", None),
        ("path", '[{"x": 1}]', [Point(x=1)]),
        ("line", '{"start": {"x": 1}, "name": "5"}', Line(start=Point(x=1), name="5")),
        ("tree", '{"children": [{"children": []}]}', Tree(children=[Tree()])),
        ("either", '{"start": {"x": 1}}', Line(start=Point(x=1))),
        ("by_name", '{"a": {"x": 1}}', {"a": Point(x=1)}),
        ("level", "2", Level.HIGH),
        ("color", "red", Color.RED),
        ("color", "1", Color.ONE),
        ("words", "5", 5),
        ("words", "007", "007"),
        ("words", "five", "five"),
        ("words", '"5"', '"5"'),
    ],
)
def test_a_text_becomes_a_value_of_its_parameters_type(form: str, key: str, value: str, bound: object) -> None:
    assert DRAW.bind({key: cast(form, key, value, DRAW.schema)})[key] == bound


def tool_of(schema: object, **definitions: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": definitions}
    return {"type": "function", "function": {"name": "draw", "parameters": parameters}}


@pytest.mark.parametrize(
    ("schema", "value", "read"),
    [
        ({"$ref": "#/$defs/A"}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/A"}]}, "5", 5),
        ({"$ref": "#/$defs/two~1parts"}, "5", 5),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"$ref": "#/$defs/Missing"}, "5", "5"),
        ({"$ref": "https://example.org/a.json"}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"enum": [5, None]}, "null", None),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": "integer"}, " 5\n", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "5.5", "5.5"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "9" * 5000, "9" * 5000),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "array"}, "[1, 2", "[1, 2"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": "object"}, "{} {}", "{} {}"),
        ({}, "5", "5"),
    ],
)
def test_a_text_stays_a_text_if_the_schema_allows_no_value_that_it_is(schema: Any, value: str, read: object) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]}
    tool = tool_of(
        schema, A={"$ref": "#/$defs/B"}, B={"type": "integer"}, Loop=loop, **{"two/parts": {"type": "integer"}}
    )
    for form in WRITTEN:
        assert cast(form, "a", value, tool) == read


def test_a_json_string_is_cast_only_if_the_schema_allows_no_string() -> None:
    for schema, read in (({"type": "integer"}, 5), ({"type": ["string", "integer"]}, "5"), ({}, "5")):
        written = '<tool_call>{"name": "draw", "arguments": {"a": "5"}}</tool_call>'
        (call,) = calls(RESPONSE_FORMATS["hermes"].parse(written, [tool_of(schema)]))
        assert call["arguments"] == {"a": read}


def test_the_schemas_that_the_model_reads_stay_as_they_are() -> None:
    tool = tool_of({"$ref": "#/$defs/A"}, A={"type": "integer"})
    before = repr(tool)
    cast("glm", "a", "5", tool)
    assert repr(tool) == before
