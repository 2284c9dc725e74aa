"""The errors, and the one place where a foreign exception becomes one of them."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from agentgym import errors
from agentgym.errors import AgentGymError, EnvError, Failure, SandboxError, ToolError, boundary
from agentgym.errors.tracebacks import place_of


def test_every_agentgym_error_has_the_same_base() -> None:
    raised = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    ours = {
        "SandboxContentError",
        "SandboxKilledError",
        "ClosedError",
        "ContextOverflow",
        "EngineError",
        "EnvError",
        "MachineError",
        "ModelLimitError",
        "PolicyContentError",
        "SandboxError",
        "ToolError",
        "WireError",
    }
    assert {kind.__name__ for kind in raised} == ours | {"AgentGymError"}
    assert all(issubclass(getattr(errors, name), AgentGymError) for name in ours)


def test_an_error_without_a_line_names_the_line_that_led_to_it() -> None:
    late = TimeoutError("late")  # as asyncio's timeouts raise it in Python 3.11.2
    try:
        raise KeyError("x")
    except KeyError as error:
        late.__context__ = error
    assert re.fullmatch(r"test_errors\.py:\d+ in test_an_error_without_a_line_\w+", place_of(late))
    late.__suppress_context__ = True  # raise ... from None
    assert place_of(late) == ""


@pytest.mark.parametrize(
    "folder", ["home/.local/lib/python3.11/site-packages", "usr/lib/python3/dist-packages", "other/site-packages"]
)
def test_a_misspelled_field_is_reported_at_the_users_line(folder: str, tmp_path: Path) -> None:
    package = tmp_path / folder / "tasks.py"  # an installed package, such as pydantic
    source = "class Task:\n    def __getattr__(self, name):\n        raise AttributeError(name)\n"
    names: dict[str, Any] = {}
    exec(compile(source, package, "exec"), names)
    with pytest.raises(AttributeError) as raised:
        _ = names["Task"]().nope
    place = place_of(raised.value)
    assert re.fullmatch(r"test_errors\.py:\d+ in test_a_misspelled_field_is_reported_\w+", place)


def test_a_foreign_exception_is_named_once_with_its_place_and_cause() -> None:
    with (
        pytest.raises(EnvError, match=r"^Bugfix\.step: KeyError: 'x', at test_errors\.py:\d+ in ") as raised,
        boundary(EnvError, "Bugfix.step"),
    ):
        raise KeyError("x")
    assert isinstance(raised.value.__cause__, KeyError)


def test_agentgym_errors_cross_a_boundary_unchanged() -> None:
    dead = SandboxError("the sandbox died")
    with pytest.raises(SandboxError) as raised, boundary(EnvError, "outer"), boundary(ToolError, "inner"):
        raise dead
    assert raised.value is dead


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt])
def test_exceptions_that_end_the_program_are_never_converted(kind: type[BaseException]) -> None:
    with pytest.raises(kind), boundary(EnvError, "step"):
        raise kind


def test_generator_exit_crosses_a_boundary_unchanged() -> None:
    with pytest.raises(GeneratorExit), boundary(EnvError, "step"):
        raise GeneratorExit


class Odd(BaseException):
    """An error that is a BaseException but not an Exception."""


@pytest.mark.parametrize("kind", [GeneratorExit, Odd])
async def test_other_base_exceptions_become_errors_of_the_code_that_raised_them(kind: type[BaseException]) -> None:
    with pytest.raises(EnvError, match=rf"^step: {kind.__name__}: , at test_errors"), boundary(EnvError, "step"):
        raise kind


def test_an_exit_in_user_code_is_an_error_of_that_code() -> None:
    with pytest.raises(EnvError, match=r"^step: SystemExit: 2, at test_errors"), boundary(EnvError, "step"):
        raise SystemExit(2)


def test_a_tool_error_outside_a_tool_says_where_it_was_raised() -> None:
    with pytest.raises(EnvError, match=r"^reward: ToolError: no, at test_errors"), boundary(EnvError, "reward"):
        raise ToolError("no")


@pytest.mark.parametrize(
    ("raised", "kept"),
    [
        (ExceptionGroup("g", [ValueError("v")]), False),
        (BaseExceptionGroup("g", [SystemExit(1)]), False),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), True),
    ],
)
def test_an_exception_group_is_an_error_unless_one_of_them_ends_the_program(raised: BaseException, kept: bool) -> None:
    with pytest.raises(type(raised) if kept else EnvError), boundary(EnvError, "step"):
        raise raised


async def test_an_agentgym_error_in_an_exception_group_is_unwrapped_with_its_cause() -> None:
    async def broken_sandbox() -> None:
        raise broken from cause

    async def step() -> None:
        with boundary(EnvError, "step"):
            async with asyncio.TaskGroup() as tasks, asyncio.TaskGroup() as inner:
                inner.create_task(broken_sandbox())
                await tasks.create_task(asyncio.sleep(0))

    broken, cause = SandboxError("the sandbox died"), OSError("gone")
    with pytest.raises(SandboxError) as met:
        await asyncio.create_task(step())
    assert met.value is broken
    assert (broken.where, broken.__cause__) == ("step", cause)
    assert "the sandbox died" in Failure.of(broken).message


@pytest.mark.parametrize("error", [ValueError("v"), ToolError("v")])
def test_a_group_of_one_error_has_that_errors_name(error: Exception) -> None:
    with pytest.raises(EnvError, match=rf"^step: {type(error).__name__}: v"), boundary(EnvError, "step"):
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [error])])


async def test_a_cancelled_error_is_foreign_if_the_task_was_not_cancelled() -> None:
    shared = asyncio.get_running_loop().create_future()
    shared.cancel()
    with pytest.raises(EnvError, match=r"^step: CancelledError: nobody cancelled") as met, boundary(EnvError, "step"):
        await shared
    assert isinstance(met.value.__cause__, asyncio.CancelledError)


async def test_cancellation_of_the_task_passes_every_boundary() -> None:
    async def wait() -> None:
        with boundary(EnvError, "step"):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_boundary_without_an_exception_has_no_effect() -> None:
    with boundary(EnvError, "step"):
        reached = True
    assert reached


def test_an_error_remembers_the_first_boundary_that_it_crossed() -> None:
    with pytest.raises(EnvError) as raised, boundary(EnvError, "outer"), boundary(EnvError, "reward 'fixed'"):
        raise KeyError("x")
    assert raised.value.where == "reward 'fixed'"


def test_an_agentgym_error_also_remembers_it_and_is_empty_before_any_boundary() -> None:
    dead = SandboxError("the sandbox died")
    assert dead.where == ""
    with pytest.raises(SandboxError), boundary(EnvError, "Bugfix.step"):
        raise dead
    assert dead.where == "Bugfix.step"


def test_a_failure_from_an_exception_group_has_each_traceback() -> None:
    with pytest.raises(EnvError) as raised, boundary(EnvError, "step"):
        raise ExceptionGroup("two", [ValueError("one"), KeyError("other")])
    failure = Failure.of(raised.value)
    assert "ValueError: one" in failure.traceback
    assert "KeyError: 'other'" in failure.traceback


def test_a_failure_can_be_encoded_whatever_its_message_is() -> None:
    error = EnvError("half a character: \ud800")
    error.add_note("\udfff")
    failure = Failure.of(error)
    str(failure).encode()
    assert str(failure) == r"EnvError: half a character: \ud800; \udfff"
