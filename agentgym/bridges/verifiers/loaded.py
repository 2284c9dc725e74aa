"""Loaded verifiers environments: opened once per class, scored with a record of errors, and torn down."""

import inspect
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from agentgym.errors import EnvError
from agentgym.errors.tracebacks import describe

_environments: dict[type, Any] = {}
"""The environments that are loaded and not torn down, by the class that runs them."""
_raised: ContextVar[list[str]] = ContextVar("raised")
"""The errors that reward functions raised for the rollout that is being scored in this context."""


def loaded(cls: type, load: Callable[[], Any]) -> Any:
    """Return the environment of a class, loading it on first use.

    Raises:
        EnvError: If the environment can't be run here.
    """
    if cls not in _environments:
        with _signals_kept():
            environment = load()
        if environment.requires_group_rollouts:
            raise EnvError(
                f"{cls.__name__}: its rubric compares the rollouts of a task, but here each is scored separately; "
                "use another environment"
            )
        for rubric in _rubrics(environment.rubric):
            rubric.funcs = [_noting(function) for function in rubric.funcs]
        _environments[cls] = environment
    return _environments[cls]


async def close(cls: type) -> None:
    """Tear down the environment of a class."""
    environment = _environments.pop(cls)
    await environment._teardown()
    environment._teardown = _nothing  # Otherwise it would tear itself down again at process exit.


async def scored(environment: Any, state: Any) -> list[str]:
    """Score a rollout with the environment's rubric, and return its reward functions' errors; each counts as 0.0."""
    raised: list[str] = []
    token = _raised.set(raised)
    try:
        await environment.rubric.score_rollout(state)
    finally:
        _raised.reset(token)
    return raised


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Yield a rubric and all its parts."""
    yield rubric
    for part in getattr(rubric, "rubrics", ()):
        yield from _rubrics(part)
    for member in getattr(rubric, "env_map", {}).values():
        yield from _rubrics(member.rubric)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the reward function to record its errors, which a rubric turns into 0.0."""

    @wraps(function)
    async def called(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            _raised.get([]).append(f"reward {function.__name__!r}: {describe(error)}")
            raise

    return called


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers at the end of the block, since creating an environment replaces them."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def _nothing() -> None:
    pass
