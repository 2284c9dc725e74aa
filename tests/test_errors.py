"""Six errors, and the one place where a foreign exception becomes one of them."""

import asyncio

import pytest

from agentgym import errors
from agentgym.errors import AgentGymError, EnvError, SandboxError, ToolError, boundary


def test_there_are_six_errors_of_one_base() -> None:
    raised = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    six = {"ContextOverflow", "EngineError", "EnvError", "SandboxError", "ToolError", "WireError"}
    assert {kind.__name__ for kind in raised} == six | {"AgentGymError"}
    assert all(issubclass(getattr(errors, name), AgentGymError) for name in six)


def test_a_foreign_exception_is_named_once_with_where_and_cause() -> None:
    with (
        pytest.raises(EnvError, match=r"^Bugfix\.step: KeyError: 'x', at test_errors\.py:\d+ in ") as raised,
        boundary(EnvError, "Bugfix.step"),
    ):
        raise KeyError("x")
    assert isinstance(raised.value.__cause__, KeyError)


def test_our_own_errors_cross_a_boundary_unchanged() -> None:
    dead = SandboxError("the box died")
    with pytest.raises(SandboxError) as raised, boundary(EnvError, "outer"), boundary(ToolError, "inner"):
        raise dead
    assert raised.value is dead


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_what_ends_the_program_is_never_turned_into_an_error(kind: type[BaseException]) -> None:
    with pytest.raises(kind), boundary(EnvError, "step"):
        raise kind


def test_nothing_raised_means_nothing_done() -> None:
    with boundary(EnvError, "step"):
        reached = True
    assert reached
