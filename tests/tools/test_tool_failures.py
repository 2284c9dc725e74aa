"""Mistakes in a tool's own code: the model reads them, the log shows them once, and they are counted by tool."""

import asyncio
import functools
import sqlite3
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, raw, say
from agentgym.errors import EngineError, SandboxError, SandboxKilledError, tracebacks as failures
from agentgym.tools.calls import dispatch

TASK = ag.Task.model_validate({"id": "t", "prompt": "Go."})


@pytest.fixture(autouse=True)
def _nothing_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_said", set())


class Note(BaseModel):
    text: str


def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function in one that is not a coroutine function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Unreadable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Nameless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Desk(ag.ToolEnv[ag.Task]):
    limits = ag.Limits(turns=4)

    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.db = sqlite3.connect(":memory:")

    async def close(self) -> None:
        self.db.close()

    @ag.tool
    @plainly
    async def wrapped(self) -> str:
        """Wait inside a decorator."""
        await asyncio.sleep(0)
        return "awaited"

    @ag.tool(timeout_s=0.05)
    @plainly
    async def wrapped_and_late(self) -> str:
        """Wait forever inside a decorator."""
        await asyncio.Event().wait()
        return "never"

    @ag.tool
    def leave(self) -> None:
        """End the program."""
        sys.exit(3)

    @ag.tool
    async def leave_async(self) -> None:
        """End the program."""
        sys.exit(3)

    @ag.tool
    def cancel(self) -> None:
        """Raise CancelledError, as a cancelled future does."""
        raise asyncio.CancelledError

    @ag.tool
    def look_up(self, key: str) -> str:
        """Look something up."""
        return {"a": "b"}[key]

    @ag.tool
    def query(self) -> Any:
        """Query the database from another thread than it was opened in."""
        return self.db.execute("select 1").fetchall()

    @ag.tool
    def refuse(self) -> None:
        """Say what to do instead."""
        raise ag.ToolError("list the folder first")

    @ag.tool
    def nameless(self) -> None:
        """Raise an exception without printable text."""
        raise Nameless

    @ag.tool
    def give(self, kind: str) -> Any:
        """Return something odd."""
        return ODD[kind]()

    @ag.reward
    def done(self) -> float:
        return 1.0


def circle() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(100_000):
        made = [made]
    return made


ODD: dict[str, Callable[[], Any]] = {
    "tuple keys": lambda: {(1, 2): 3},
    "a circle": circle,
    "depth": deep,
    "no text": Unreadable,
    "an object": object,
    "a generator": lambda: (n for n in range(3)),
    "a function": lambda: circle,
    "objects in a list": lambda: [object()],
    "a stop with an object": lambda: ag.Stop("end", object()),  # type: ignore[arg-type]
}


async def run(name: str, arguments: Any = None) -> Any:
    env = Desk(TASK)
    try:
        return await dispatch(env, name, arguments or {})
    finally:
        await env.close()


async def test_a_sandbox_that_its_own_code_ended_is_a_message_to_the_model() -> None:
    class Boxed(Desk):
        @ag.tool
        async def end(self) -> str:
            """End the sandbox."""
            raise SandboxKilledError("a program in it did not end")

    env = Boxed(TASK)
    try:
        result = await dispatch(env, "end", {})
    finally:
        await env.close()
    assert (result.content, result.error) == ("[sandbox terminated by your code]", True)
    assert not env.tool_failures


async def test_an_async_tool_inside_a_plain_decorator_is_awaited_within_its_limit() -> None:
    assert (await run("wrapped")).content == "awaited"
    assert (await run("wrapped_and_late")).content == "error: tool 'wrapped_and_late' timed out after 0.05 s"


@pytest.mark.parametrize("kind", ODD)
async def test_a_result_without_a_json_form_is_a_message_and_the_rollout_continues(kind: str) -> None:
    rollout = await ag.rollout(Desk, TASK, Scripted([call("give", kind=kind), say("done")]))
    assert (rollout.error, rollout.reward, len(rollout.messages)) == (None, 1.0, 2)
    content = (await run("give", {"kind": kind})).content
    assert content.startswith(
        "error: tool 'give' failed: TypeError: the tool returned a value that is neither text nor JSON: "
    )
    assert " at 0x" not in content


async def test_pydantic_models_inside_a_result_become_json() -> None:
    class Notes:
        @ag.tool
        def read(self) -> list[Note]:
            """Read the notes."""
            return [Note(text="a")]

    assert (await dispatch(Notes(), "read", {})).content == '[{"text": "a"}]'


@pytest.mark.parametrize("name", ["leave", "leave_async"])
async def test_a_tool_that_exits_does_not_end_the_program(name: str) -> None:
    assert (await run(name)).content == f"error: tool {name!r} failed: SystemExit: 3"


async def test_a_plain_tool_that_raises_cancelled_error_cancels_nothing() -> None:
    assert "failed: RuntimeError: CancelledError" in (await run("cancel")).content


async def test_an_error_without_printable_text_is_still_a_tool_message() -> None:
    assert (
        await run("nameless")
    ).content == "error: tool 'nameless' failed: Nameless: (its __str__ raised RuntimeError)"


async def test_a_tools_exception_is_logged_once_with_the_users_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = [call("look_up", key="x"), call("look_up", key="y"), call("look_up", key="a"), say("done")]
    for _ in range(2):
        await ag.rollout(Desk, TASK, Scripted(script))
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert said.startswith("tool 'look_up' of Desk raised KeyError: 'x', at test_tool_failures.py:")
    assert " in look_up" in said
    assert caplog.records[0].exc_info


async def test_the_logged_traceback_of_a_tool_has_only_the_users_frames(caplog: pytest.LogCaptureFixture) -> None:
    await ag.rollout(Desk, TASK, Scripted([call("look_up", key="x"), say("done")]))
    assert caplog.records[0].exc_info is not None
    frames = traceback.extract_tb(caplog.records[0].exc_info[2])
    assert [(Path(frame.filename).name, frame.name) for frame in frames] == [(Path(__file__).name, "look_up")]


def test_the_logged_traceback_of_an_agentgym_bug_keeps_its_frames(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AttributeError) as wrong:
        failures.encodable(7)  # type: ignore[arg-type]  # as a mistake of ours would
    error = wrong.value.with_traceback(wrong.tb.tb_next)  # without this file's frame
    failures.log_once("tool 'ours'", error, failures.encodable)
    assert caplog.records[0].exc_info is not None
    frames = traceback.extract_tb(caplog.records[0].exc_info[2])
    assert [frame.name for frame in frames] == ["encodable"]


async def test_sqlite_used_in_another_thread_is_logged_with_the_fix(caplog: pytest.LogCaptureFixture) -> None:
    assert "ProgrammingError" in (await run("query")).content
    assert "check_same_thread=False, or make the method async" in caplog.records[0].getMessage()


async def test_a_tool_error_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert not (await run("refuse")).failed
    assert caplog.records == []


async def test_failures_are_counted_by_tool_without_the_models_mistakes() -> None:
    env = Desk(TASK)
    for made in (
        call("look_up", key="x"),
        call("look_up", key="y"),
        call("look_up", key="a"),
        call("look_up", kee="a"),
        call("wrapped_and_late"),
        call("give", kind="a circle"),
        call("refuse"),
    ):
        await env.step(made)
    await env.close()
    assert env.tool_failures == {"look_up": 2, "wrapped_and_late": 1, "give": 1}
    assert env.metrics["tool_errors"] == 6


@pytest.mark.parametrize("depth", [101, 600, 5000])
async def test_arguments_nested_too_deep_are_a_message_and_the_rollout_continues(depth: int) -> None:
    arguments = f'{{"key": {"[" * (depth - 1)}{"]" * (depth - 1)}}}'
    result = await run("look_up", arguments)
    assert result.malformed
    assert "more than 100 levels of nesting" in result.content or "recursion" in result.content
    written = raw(f'<tool_call>\n{{"name": "look_up", "arguments": {arguments}}}\n</tool_call>')
    env = type("Roomy", (Desk,), {"limits": ag.Limits(turns=3, context_tokens=1 << 16, turn_tokens=1 << 15)})
    rollout = await ag.rollout(env, TASK, Scripted([written, say("done")]))
    assert (rollout.error, rollout.stop_reason, rollout.metrics["malformed_calls"]) == (None, "answer", 1)


async def test_a_stray_cancelled_error_is_a_failure_of_the_tool() -> None:
    class Shared(ag.ToolEnv[ag.Task]):
        @ag.tool
        async def wait(self) -> str:
            """Wait for a future that has been cancelled elsewhere."""
            shared: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            shared.cancel()
            return await shared

    result = await dispatch(Shared(TASK), "wait", {})
    assert (result.error, result.failed, result.malformed) == (True, True, False)
    assert result.content.startswith("error: tool 'wait' failed: CancelledError")


class Mute(ag.ToolError):
    def __str__(self) -> str:
        raise ValueError("no text")


class Leaving(Exception):
    def __str__(self) -> str:
        raise GeneratorExit


ODD_ERRORS = [Mute(), Leaving(), GeneratorExit(), BaseExceptionGroup("two", [SystemExit(1), ValueError("x")])]


@pytest.mark.parametrize("error", ODD_ERRORS)
async def test_an_exception_without_printable_text_fails_only_its_call(error: BaseException) -> None:
    class Odd(ag.ToolEnv[ag.Task]):
        @ag.tool
        async def look(self) -> str:
            """Look."""
            raise error

        @ag.reward
        async def done(self) -> float:
            return 1.0

    rollout = await ag.rollout(Odd, TASK, Scripted([call("look"), say("done")]))
    assert (rollout.error, rollout.reward, rollout.metrics["tool_errors"]) == (None, 1.0, 1)


@pytest.mark.parametrize(
    ("error", "failure", "read"),
    [
        (SandboxError("the sandbox died"), "SandboxError", None),
        (EngineError("no answer"), "EngineError", None),
        (ag.ToolError("look elsewhere"), None, "error: look elsewhere"),
        (ValueError("v"), None, "error: tool 'look' failed: ValueError: v"),
    ],
)
async def test_an_error_in_a_tools_task_group_counts_as_the_tools_error(
    error: Exception, failure: str | None, read: str | None
) -> None:
    class Parted(ag.ToolEnv[ag.Task]):
        @ag.tool
        async def look(self) -> str:
            """Look."""
            raise ExceptionGroup("unhandled errors in a TaskGroup", [error])

        @ag.reward
        async def done(self) -> float:
            return 1.0

    rollout = await ag.rollout(Parted, TASK, Scripted([call("look"), say("done")]))
    assert (None if rollout.failure is None else rollout.failure.type) == failure
    if read is not None:
        assert rollout.segments[0].turns[0].env_messages[0]["content"] == read
