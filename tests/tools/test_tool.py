"""Tools: one signature gives schema, validation and call; a tool's failure is a message to the model."""

import asyncio
import re
import threading
import time
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

import agentgym as ag
from agentgym.errors import SandboxError
from agentgym.tools.calls import ToolResult, dispatch


class Point(BaseModel):
    x: int


class Desk:
    """Tools work without an env."""

    def __init__(self) -> None:
        self.ran: list[object] = []
        self.died = SandboxError("the sandbox died")
        self.lamp = asyncio.Event()
        self.free = threading.Event()
        self.thread: threading.Thread | None = None

    @ag.tool
    async def search(
        self,
        query: Annotated[str, Field(max_length=5, description="what to find")],
        where: Literal["web", "disk"] = "web",
        limit: Annotated[int, Field(ge=1)] = 3,
        title: str | None = None,
    ) -> str:
        """Search somewhere."""
        return f"{query} {where} {limit} {title}"

    @ag.tool
    async def add(self, items: list[int]) -> int:
        """Add numbers."""
        self.ran.append(items)
        return sum(items)

    @ag.tool
    def plot(self, at: Point) -> Point:
        """Plot a point."""
        self.ran.append(at)
        return at

    @ag.tool
    def greet(self) -> dict[str, str]:
        """Say hello."""
        return {"hello": "wörld"}

    @ag.tool
    async def explode(self) -> str:
        """Fail."""
        raise KeyError("fuse")

    @ag.tool
    def refuse(self) -> str:
        """Say what to do instead."""
        raise ag.ToolError("no such file; list the folder first")

    @ag.tool
    async def unplug(self) -> str:
        """Lose the sandbox."""
        raise self.died

    @ag.tool(name="submit")
    def finish(self) -> ag.Stop:
        """Hand in."""
        return ag.Stop("submitted", "thanks")

    @ag.tool
    def wait_for_lamp(self) -> str:
        """Block until the loop has run something else."""
        return "lit" if self.free.wait(timeout=30) else "dark"

    @ag.tool(timeout_s=0.01)
    async def sleep(self) -> None:
        """Never end."""
        await self.lamp.wait()

    @ag.tool(timeout_s=0.01)
    def hang(self) -> None:
        """Never end, in a thread."""
        self.thread = threading.current_thread()
        self.free.wait()

    @ag.tool
    async def impatient(self) -> None:
        """Raise its own TimeoutError."""
        raise TimeoutError("no route")

    @ag.tool(timeout_s=2)
    def exhaust(self) -> str:
        """Read past an end."""
        return next(iter(()))


async def run(name: str, arguments: Any) -> ToolResult:
    return await dispatch(Desk(), name, arguments)


def test_a_time_limit_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"^timeout_s: "):
        ag.tool(timeout_s=0)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "query: Field required"),
        ({"query": "too long"}, "query: .*at most 5"),
        ({"query": "a", "where": "moon"}, "where: .*'web' or 'disk'"),
        ({"query": "a", "limit": 0}, "limit: .*greater than or equal to 1"),
        ({"query": "a", "speed": 3}, "speed: Extra inputs"),
        (["query"], "arguments: "),
    ],
)
async def test_wrong_arguments_get_a_message_that_names_the_field(arguments: Any, field: str) -> None:
    result = await run("search", arguments)
    assert result.malformed
    assert re.search(f"wrong arguments for tool 'search': {field}", result.content)


async def test_a_code_string_for_an_array_stays_a_string_and_is_not_executed() -> None:
    desk = Desk()
    for code in ("[1, 2]", "__import__('os').getcwd()", "list(range(3))"):
        result = await dispatch(desk, "add", {"items": code})
        assert result.malformed
        assert "items: Input should be a valid list" in result.content
    assert desk.ran == []


async def test_an_unknown_tool_gets_a_message_with_the_available_tools() -> None:
    result = await run("serach", {})
    assert result.malformed
    assert "unknown tool 'serach'; the tools are: search, add, plot" in result.content


@pytest.mark.parametrize("text", ["", "{", "{'query': 1}", "null", "[1]", '"text"', "search(query=1)", "[" * 5000])
async def test_malformed_empty_or_missing_json_gets_a_message_with_the_tools_name(text: str) -> None:
    result = await run("search", text)
    assert result.malformed
    assert "invalid JSON in the call to tool 'search'" in result.content


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        pytest.param("search", '{"query": "a"}', "a web 3 None", id="arguments may be JSON text"),
        pytest.param("plot", {"at": {"x": 3}}, '{"x":3}', id="a nested model is validated and returned as JSON"),
        pytest.param("greet", {}, '{"hello": "wörld"}', id="other values are JSON without escapes"),
        pytest.param(
            "explode", {}, "error: tool 'explode' failed: KeyError: 'fuse'", id="an exception without its traceback"
        ),
        pytest.param("refuse", {}, "error: no such file; list the folder first", id="the text of a ToolError"),
        pytest.param("sleep", {}, "error: tool 'sleep' timed out after 0.01 s", id="a timeout"),
        pytest.param(
            "impatient", {}, "error: tool 'impatient' failed: TimeoutError: no route", id="the tool's own TimeoutError"
        ),
    ],
)
async def test_the_model_reads_a_calls_result_or_error(name: str, arguments: Any, content: str) -> None:
    result = await run(name, arguments)
    assert result.content == content
    assert result.error == content.startswith("error: ")
    assert not result.malformed


async def test_a_dead_sandbox_is_raised_with_the_tools_name_unless_its_place_is_known() -> None:
    for said, where in (("", "tool 'unplug' of Desk"), ("exec", "exec")):
        desk = Desk()
        desk.died.where = said
        with pytest.raises(SandboxError, match="the sandbox died") as raised:
            await dispatch(desk, "unplug", {})
        assert raised.value.where == where


async def test_stop_has_a_reason_and_final_content() -> None:
    result = await run("submit", {})
    assert (result.stop, result.content, result.error) == ("submitted", "thanks", False)


def test_a_stop_needs_a_reason() -> None:
    with pytest.raises(ValueError, match=r"^reason: "):
        ag.Stop("")


async def test_a_plain_tool_never_blocks_the_event_loop() -> None:
    desk = Desk()

    async def light() -> None:
        desk.free.set()

    async with asyncio.TaskGroup() as running:
        waiting = running.create_task(dispatch(desk, "wait_for_lamp", {}))
        running.create_task(light())
    assert waiting.result().content == "lit"


async def test_a_hanging_plain_tool_times_out_and_its_late_end_does_no_harm() -> None:
    desk, complaints = Desk(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, complaint: complaints.append(complaint))
    while desk.thread is None:  # A call does nothing if its thread had not started by its time limit.
        result = await dispatch(desk, "hang", {})
        assert result.content == "error: tool 'hang' timed out after 0.01 s"
    desk.free.set()
    await asyncio.to_thread(desk.thread.join)
    await asyncio.sleep(0)
    assert complaints == []


async def test_a_plain_tool_that_raises_stop_iteration_gets_its_message_at_once() -> None:
    result = await run("exhaust", {})
    assert "failed" in result.content
    assert "StopIteration" in result.content


async def test_a_calls_seconds_are_its_duration() -> None:
    begun = time.perf_counter()
    result = await dispatch(Desk(), "greet", {})
    assert 0 < result.seconds <= time.perf_counter() - begun


def test_a_tool_result_has_success_defaults() -> None:
    well = ToolResult(content="x", error=False, malformed=False, failed=False, stop=None, seconds=0.0)
    assert ToolResult(content="x") == well
