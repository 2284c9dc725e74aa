"""Tools of an instance: the model sees them, their arguments are validated, and forks and sub-agents have them."""

import asyncio
import functools
import math
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

import agentgym as ag
from agentgym.errors.extras import install_line
from agentgym.testing import Scripted, call, calls, say
from agentgym.tools import DynamicTool, tools_of
from agentgym.tools.tool import WrongArguments

TASK = ag.Task.model_validate({"id": "t", "prompt": "Go."})
ASK: list[ag.Message] = [{"role": "user", "content": "?"}]
SEARCH = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["query"],
}
needs_jsonschema = pytest.mark.skipif(find_spec("jsonschema") is None, reason="needs the package jsonschema")


def search(query: str, n: Annotated[int, Field(ge=1)] = 3) -> str:
    """Search the notes."""
    return f"{n} notes on {query}, by {threading.current_thread().name}"


async def add(a: int, b: int) -> int:
    """Add."""
    await asyncio.sleep(0)
    return a + b


def unchecked(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accept any arguments."""
    return arguments


def made(name: str = "look", **given: Any) -> DynamicTool:
    fields: dict[str, Any] = {"description": "Look.", "parameters": {"type": "object"}, "call": search}
    return DynamicTool(name, **(fields | {"check": unchecked} | given))


class Desk(ag.ToolEnv[ag.Task]):
    limits = ag.Limits(turns=4)
    given: Sequence[DynamicTool] = ()

    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.name, self.order = "root", list[str]()
        last.append(self)

    async def setup(self) -> None:
        self.order.append("setup")

    async def extra_tools(self) -> Sequence[DynamicTool]:
        self.order.append("extra_tools")
        return [*self.given, *tools_of(self.who)]

    async def who(self) -> str:
        """Say whose copy of the env this is."""
        return self.name

    @ag.tool
    async def declared(self) -> str:
        """Do what the class declares."""
        return "declared"

    @ag.tool
    async def delegate(self, kind: str) -> str:
        """Ask another agent."""
        tools: list[Any] | None = None if kind == "fork" else ["who", self.declared]
        async with self.fork("fork" if kind == "fork" else "subagent", ASK, tools=tools) as agent:
            agent.env.name = kind
            return await agent.run()

    @ag.reward
    def right(self) -> float:
        return 1.0


last: list[Desk] = []


def desk(*given: DynamicTool) -> type[Desk]:
    return type("Desk", (Desk,), {"given": given})


async def told(env: type[Desk], *script: Any) -> list[str]:
    """Return the texts of the tool messages after the root's first turn."""
    rollout = await ag.rollout(env, TASK, Scripted([*script, say("done")]))
    assert rollout.error is None
    return [message["content"] for message in rollout.segments[0].turns[0].env_messages]


async def test_the_chat_template_gets_dynamic_tools_after_those_of_the_class() -> None:
    shown: list[str] = []

    def reply(text: str) -> ag.Message:
        shown.append(text)
        return say("done")

    await ag.rollout(desk(*tools_of(search)), TASK, Scripted(reply))
    places = [shown[0].index(f'"name": "{name}"') for name in ("declared", "search", "who")]
    assert places == sorted(places)
    assert '"query": {"type": "string"}' in shown[0]
    assert last[-1].order == ["setup", "extra_tools"]


async def test_plain_functions_run_in_a_thread_and_async_ones_in_the_event_loop(no_leaks: None) -> None:
    env = desk(*tools_of(search, add))
    script = calls(("search", {"query": "cats"}), ("add", {"a": 1, "b": 2}), ("declared", {}))
    assert await told(env, script) == ["3 notes on cats, by agentgym-tool search", "3", "declared"]


async def test_wrong_arguments_and_unknown_names_get_the_same_messages_as_declared_tools() -> None:
    env = desk(*tools_of(search))
    script = calls(("search", {"n": 0}), ("search", {"query": "x", "m": 1}), ("serach", {}))
    assert await told(env, script) == [
        "error: wrong arguments for tool 'search': query: Field required; "
        "n: Input should be greater than or equal to 1",
        "error: wrong arguments for tool 'search': m: Extra inputs are not permitted",
        "error: unknown tool 'serach'; the tools are: declared, delegate, search, who",
    ]
    assert last[-1].metrics["malformed_calls"] == 3


async def test_a_failure_is_counted_and_a_stop_ends_the_rollout() -> None:
    async def explode() -> str:
        """Fail."""
        raise KeyError("fuse")

    def finish() -> ag.Stop:
        """Hand in."""
        return ag.Stop("submitted", "thanks")

    script = Scripted([calls(("explode", {}), ("finish", {}))])
    rollout = await ag.rollout(desk(*tools_of(explode, finish)), TASK, script)
    assert (rollout.stop_reason, rollout.metrics["tool_errors/explode"]) == ("submitted", 1)
    assert last[-1].tool_failures == {"explode": 1}


async def test_dynamic_tools_have_time_limits_and_can_run_in_parallel() -> None:
    barrier = asyncio.Barrier(2)

    async def meet() -> str:
        """Meet another call."""
        await barrier.wait()
        return "met"

    async def late() -> str:
        """Wait for ever."""
        await asyncio.Event().wait()
        return "never"

    given = [*tools_of(meet, parallel=True, timeout_s=60), *tools_of(late, timeout_s=0.01)]
    script = calls(("meet", {}), ("meet", {}), ("late", {}))
    assert await told(desk(*given), script) == ["met", "met", "error: tool 'late' timed out after 0.01 s"]


@pytest.mark.parametrize("kind", ["fork", "subagent"])
async def test_forks_and_sub_agents_have_dynamic_tools_of_their_env_copy(kind: str) -> None:
    rollout = await ag.rollout(
        Desk, TASK, Scripted([call("delegate", kind=kind), call("who"), say("told"), call("who"), say("done")])
    )
    assert [m["content"] for m in rollout.segments[1].turns[0].env_messages] == [kind]
    assert [m["content"] for m in rollout.segments[0].turns[1].env_messages] == ["root"]


async def test_a_sub_agent_has_only_the_tools_it_was_given() -> None:
    script = [call("delegate", kind="subagent"), call("search", query="x"), say("told"), say("done")]
    rollout = await ag.rollout(desk(*tools_of(search)), TASK, Scripted(script))
    answer = rollout.segments[1].turns[0].env_messages[0]["content"]
    assert answer == "error: unknown tool 'search'; the tools are: declared, who"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([made("declared")], "ValueError: 'declared' is also the name of a declared tool"),
        ([made(), made()], "ValueError: 'look' is the name of two tools"),
        (made(), "TypeError: must return a list of agentgym.tools.DynamicTool, got DynamicTool("),
        ([search], "TypeError: must return a list of agentgym.tools.DynamicTool, got a list with <function search"),
        (None, "TypeError: must return a list of agentgym.tools.DynamicTool, got None"),
    ],
)
async def test_an_invalid_dynamic_tool_fails_the_rollout_by_name(given: Any, said: str) -> None:
    class Odd(Desk):
        async def extra_tools(self) -> Any:
            return given

    rollout = await ag.rollout(Odd, TASK, Scripted([say("done")]))
    assert rollout.failure is not None
    assert rollout.failure.message.startswith(f"Odd.extra_tools: {said}")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": ""}, "name: must be a non-empty string"),
        ({"description": None}, "tool 'look': description: must be text, got None"),
        ({"call": "search"}, "tool 'look': call: must be a function, got 'search'"),
        ({"parameters": {"query": "string"}}, "tool 'look': parameters: must be the JSON schema of an object"),
        ({"parameters": {"type": "object", "x": {1, 2}}}, "tool 'look': parameters: expected valid JSON"),
        ({"timeout_s": 0}, "timeout_s: must be positive"),
        ({"timeout_s": math.nan}, "timeout_s: must be positive"),
        ({"parallel": "yes"}, "parallel: must be True or False"),
    ],
)
def test_an_invalid_field_of_a_dynamic_tool_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="^" + said):
        made(**given)


@needs_jsonschema
async def test_arguments_are_validated_by_the_schema() -> None:
    env = desk(DynamicTool("find", "Find notes.", SEARCH, search))
    texts = await told(env, calls(("find", {"query": "cats"}), ("find", {"n": "x" * 600}), ("find", {"query": 1})))
    assert texts[0].startswith("3 notes on cats")
    assert texts[1].startswith(
        "error: wrong arguments for tool 'find': arguments: 'query' is a required property; n: 'x"
    )
    assert len(texts[1]) < 500
    assert texts[2] == "error: wrong arguments for tool 'find': query: 1 is not of type 'string'"


@needs_jsonschema
def test_the_model_reads_some_of_many_errors_and_the_number_of_the_rest() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    with pytest.raises(ValueError, match=r"e4: .*; and 3 more errors$"):
        DynamicTool("find", "", schema, search).bind({f"e{i}": "x" for i in range(8)})


@needs_jsonschema
def test_an_invalid_schema_is_refused_when_the_tool_is_created() -> None:
    schema = {"type": "object", "properties": {"query": {"type": "text"}}}
    with pytest.raises(
        ValueError, match=r"tool 'find': parameters: 'text' is not valid .* at \$.properties.query.type"
    ):
        DynamicTool("find", "", schema, search)


def find(**parameters: Any) -> DynamicTool:
    return DynamicTool("find", "", {"type": "object"} | parameters, search)


@needs_jsonschema
@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (
            {"properties": {"q": {"$ref": "http://127.0.0.1:9/s.json"}}},
            r"\$ref: 'http://127.0.0.1:9/s.json' does not exist in the schema",
        ),
        ({"properties": {"q": {"$ref": "#/$defs/q"}}}, r"\$ref: '#/\$defs/q' does not exist in the schema"),
        ({"properties": {"q": {"$ref": "#/type"}}}, r".*points to 'object', which is not a schema"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, r"\$ref: '#/\$defs/a' refers back to itself"),
        ({"allOf": [{"anyOf": [{"$ref": "#"}]}]}, r"\$ref: '#' refers back to itself"),
        ({"properties": {"q": {"pattern": "(?=a)b"}}}, r"pattern: '\(\?=a\)b' can't be .* \(look-around"),
        ({"patternProperties": {r"(a)\1": {}}}, r".*can't be .* \(backreferences"),
        (
            {"patternProperties": {"a": {}}, "unevaluatedProperties": False},
            "unevaluatedProperties: can't be combined with",
        ),
    ],
)
def test_an_unsatisfiable_or_endless_schema_is_refused_when_the_tool_is_created(parameters: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"tool 'find': parameters: " + said):
        find(**parameters)


EXPONENTIAL = "^([a-z]+)+$"
OF_THE_DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}


@needs_jsonschema
@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"properties": {"q": {"pattern": EXPONENTIAL}}}, {"q": "a" * 60 + "!"}),
        (
            OF_THE_DRAFT | {"properties": {"q": {"pattern": EXPONENTIAL}, "below": {"$ref": "#"}}},
            {"below": {"q": "a" * 60 + "!"}},
        ),
        ({"patternProperties": {EXPONENTIAL: False}, "additionalProperties": False}, {"a" * 60 + "!": 1}),
        ({"properties": {"q": {"uniqueItems": True}}}, {"q": [{"n": n} for n in range(20_000)] + [{"n": 1.0}]}),
    ],
    ids=["pattern", "reference", "name", "unique"],
)
def test_refusing_an_argument_takes_at_most_linear_time(parameters: Any, arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"q: 'a+!' does not match|\('a+!' was unexpected|q: \[{'n': 0}"):
        find(**parameters).bind(arguments)


@needs_jsonschema
@pytest.mark.parametrize("pattern", ["a" * 50_000, "[ab]{0,9000}c"])
def test_a_long_text_is_not_matched_against_a_large_pattern(pattern: str) -> None:
    long = {"q": "a" * 100_000}
    with pytest.raises(WrongArguments, match="a text of 100000 characters is too long for the pattern"):
        find(properties={"q": {"pattern": pattern}}).bind(long)
    assert find(properties={"q": {"pattern": r"^\w{1,64}"}}).bind(long) == long


@needs_jsonschema
def test_arguments_that_need_too_many_steps_or_levels_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentgym.tools.argument_schemas.STEPS_AT_MOST", 5000)
    either = [{"properties": {"op": {"const": op}, "of": {"$ref": "#/$defs/any"}}} for op in ("and", "or", "not")]
    nested: dict[str, Any] = {"op": "nor"}
    for _ in range(20):
        nested = {"op": "not", "of": nested}
    with pytest.raises(WrongArguments, match="the check needs more than 5,000 steps"):
        find(properties={"q": {"$ref": "#/$defs/any"}}, **{"$defs": {"any": {"anyOf": either}}}).bind({"q": nested})
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"of": deep}
    with pytest.raises(WrongArguments, match="nested too deeply"):
        find(properties={"of": {"$ref": "#"}}).bind(deep)
    with pytest.raises(WrongArguments, match="too large"):
        find(properties={"n": {"multipleOf": 0.1}}).bind({"n": 10**400})


@needs_jsonschema
@pytest.mark.parametrize(("letters", "is_whole"), [(273, True), (274, False)])
def test_a_validation_error_has_at_most_300_characters(letters: int, is_whole: bool) -> None:
    with pytest.raises(WrongArguments) as wrong:
        find(properties={"n": {"type": "integer"}}).bind({"n": "a" * letters})
    said = str(wrong.value).removeprefix("n: ")
    assert (said.endswith("is not of type 'integer'"), said.endswith(" [...]")) == (is_whole, not is_whole)
    assert len(said.removesuffix(" [...]")) == 300


@needs_jsonschema
def test_tools_that_differ_only_in_their_checks_are_equal() -> None:
    assert find() == find()
    assert "check" not in repr(find())


@needs_jsonschema
def test_patterns_and_unique_items_follow_the_standard() -> None:
    letters = {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False, "properties": {"b": {}}}
    assert find(**letters).bind({"a1": 1, "b": "x"}) == {"a1": 1, "b": "x"}
    with pytest.raises(WrongArguments, match=r"a1: 'x' is not of type 'integer'; .*'c' was unexpected"):
        find(**letters).bind({"a1": "x", "c": 1})
    word = find(properties={"q": {"pattern": r"^\p{L}+$"}, "n": {"uniqueItems": True}})
    assert word.bind({"q": "né", "n": [1, True, "1", [1], {"a": 1}, None]})
    recursive = find(properties={"of": {"items": {"$ref": "#"}}}, **{"$defs": {"unused": {"$ref": "#/nowhere"}}})
    assert recursive.bind({"of": [{"of": []}]}) == {"of": [{"of": []}]}


def test_without_jsonschema_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['jsonschema'] = None; from agentgym.tools import DynamicTool\n"
    code += "DynamicTool('find', '', {'type': 'object'}, print)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd(), check=False)
    line = f"agentgym.errors.extras.MissingPackage: jsonschema is not installed: {install_line('tools')}"
    assert done.stderr.splitlines()[-1] == line


def test_a_custom_check_may_change_the_arguments_and_its_error_reaches_the_model() -> None:
    def check(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if "query" not in arguments:
            raise ValueError("say what to look for")
        return {"query": arguments["query"].lower()}

    look = made(check=check)
    assert look.bind({"query": "CATS"}) == {"query": "cats"}
    with pytest.raises(ValueError, match="say what to look for"):
        look.bind({})


class Notes:
    """A plain object."""

    kind = "paper"

    def __init__(self) -> None:
        self.notes: list[str] = []

    def write(self, text: Annotated[str, Field(max_length=9)]) -> int:
        """Write a note."""
        self.notes.append(text)
        return len(self.notes)

    @ag.tool(name="read_all", timeout_s=7, parallel=True)
    async def read(self) -> list[str]:
        """Read the notes."""
        return self.notes

    @staticmethod
    def help() -> str:
        """Say what notes are."""
        return "paper"

    @property
    def size(self) -> int:
        return len(self.notes)

    def _tear(self) -> None: ...


class Binder(Notes):
    def clear(self) -> None:
        """Forget all notes."""
        self.notes.clear()


async def test_an_objects_public_methods_are_tools_with_its_state() -> None:
    binder = Binder()
    given = tools_of(binder, prefix="notes_")
    assert [one.name for one in given] == ["notes_write", "notes_read_all", "notes_help", "notes_clear"]
    script = calls(("notes_write", {"text": "milk"}), ("notes_read_all", {}), ("notes_write", {"text": "x" * 10}))
    texts = await told(desk(*given), script)
    assert texts[:2] == ["1", '["milk"]']
    assert texts[2].endswith("text: String should have at most 9 characters")
    assert binder.notes == ["milk"]


def test_names_select_methods_and_a_methods_decorator_overrides_the_settings() -> None:
    read, clear = tools_of(Binder(), names=["read", "clear"], timeout_s=3)
    assert (read.name, read.timeout_s, read.parallel) == ("read_all", 7, True)
    assert (clear.name, clear.timeout_s, clear.parallel) == ("clear", 3, False)


class Untold:
    def look(self, where: str) -> str:
        return where


class Untyped:
    def look(self, where):  # type: ignore[no-untyped-def]
        """Look."""


def listed(*where: str) -> None:
    """Look."""


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (Binder, TypeError, "expected functions and objects, got the class Binder"),
        (math, TypeError, "expected functions and objects, got the module math"),
        (3.5, ValueError, "tool 'as_integer_ratio'|has no public method"),
        (Untold(), ValueError, "tool 'look' of Untold needs a docstring"),
        (Untyped(), ValueError, "tool 'look' of Untyped: parameter 'where' needs a type annotation"),
        (listed, ValueError, "tool 'listed': parameter 'where' must be a named parameter"),
        (math.sqrt, ValueError, "tool 'sqrt': parameter 'x' is positional-only"),
        (functools.partial(search, n=2), ValueError, "partial has no public method"),
    ],
)
def test_a_source_that_cannot_give_tools_is_refused_by_name(source: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        tools_of(source)


def test_an_unknown_name_is_refused_with_the_available_ones() -> None:
    with pytest.raises(ValueError, match="names: 'shred' is not one of the tools: write, read, help"):
        tools_of(Notes(), names=["shred"])
    with pytest.raises(TypeError, match=r"names: must be a list of names, such as \['read'\]"):
        tools_of(Notes(), names="read")
