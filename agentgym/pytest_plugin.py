"""The pytest plugin: fixtures for env tests, transcripts of failed tests, and async tests without configuration.

This is the only file that imports pytest; pytest finds it by its entry point.
"""

import functools
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from agentgym.rollouts.rollout import observers
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.testing.env_checks.check import forgotten
from agentgym.testing.env_checks.leaks import LeakWatch
from agentgym.testing.env_checks.plays import is_of_check
from agentgym.types.rollout import Rollout
from agentgym.types.transcript import printable

SHOWN_ROLLOUTS = 3
"""Maximum number of a test's own rollouts that are printed if it fails; these are the last ones."""
SHOWN_OF_CHECK = 4
"""Maximum number of rollouts of `check_env` that are printed in addition."""
WATCH = pytest.StashKey[LeakWatch]()
ASYNC_PLUGINS = ("asyncio", "trio", "tornasync", "twisted", "aiohttp")


class Played:
    """The last rollouts of a test and, separately, those that `check_env` itself ran."""

    def __init__(self) -> None:
        self.own: deque[Rollout] = deque(maxlen=SHOWN_ROLLOUTS)
        self.of_check: deque[Rollout] = deque(maxlen=SHOWN_OF_CHECK)

    def add(self, rollout: Rollout) -> None:
        """Store a rollout, dropping the oldest of its kind if there are too many."""
        (self.of_check if is_of_check(rollout.rollout_id) else self.own).append(rollout)

    def clear(self) -> None:
        """Drop all rollouts."""
        self.own.clear()
        self.of_check.clear()

    def sections(self) -> Iterator[tuple[str, str]]:
        """Yield the title and transcript of each rollout, those of the test itself first."""
        yield from ((printable(f"rollout {rollout.rollout_id}"), str(rollout)) for rollout in self.own)
        for rollout in self.of_check:
            yield printable(f"rollout {rollout.rollout_id}, run by check_env itself"), str(rollout)


PLAYED = pytest.StashKey[Played]()


@pytest.fixture
def sandboxes() -> FakeSandboxPool:
    """Return a FakeSandboxPool without a shell."""
    return FakeSandboxPool()


@pytest.fixture
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves a thread, a child process, an open file, a temporary folder or an asyncio task behind.

    The check first waits for objects that are about to end. Each line of the failure message names a remaining thread
    or command line.
    """
    with LeakWatch() as watch:
        request.node.stash[WATCH] = watch
        yield
        left = [*watch.tasks_left, *watch.left()]
    assert not left, "the test left something behind:\n" + "\n".join(left)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Store the last rollouts of each test, and run async tests if the project doesn't configure how."""
    config.stash[PLAYED] = Played()
    observers.append(config.stash[PLAYED].add)
    if config.pluginmanager.hasplugin("asyncio") and not _configured(config, "asyncio_mode"):
        config.option.asyncio_mode = "auto"
        # pytest-asyncio requests this option from every project without a configuration, right after this hook.
        warnings.filterwarnings("ignore", 'The configuration option "asyncio_default_fixture_loop_scope" is unset')


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop storing rollouts."""
    if PLAYED in config.stash:
        observers.remove(config.stash[PLAYED].add)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Drop the rollouts of a test when it has ended."""
    try:
        return (yield)
    finally:
        item.config.stash[PLAYED].clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the transcripts of a failed test's last rollouts to its report, each as a separate section."""
    report = yield
    if report.failed:
        played = item.config.stash[PLAYED]
        report.sections += played.sections()
        played.clear()  # so that a failure in the teardown doesn't print them again
    return report


def _configured(config: pytest.Config, name: str) -> bool:
    if config.getoption(name, None) is not None:
        return True
    if any(line.partition("=")[0].strip() == name for line in config.getoption("override_ini", None) or ()):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pytest 9 has no other way to distinguish defaults from user settings
        return name in config.inicfg


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Fail an async test that no plugin runs, and name the plugin to install."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj) or pyfuncitem.get_closest_marker("anyio"):
        return
    if not any(pyfuncitem.config.pluginmanager.hasplugin(name) for name in ASYNC_PLUGINS):
        pytest.fail("an async test needs pytest-asyncio: pip install pytest-asyncio", pytrace=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that forgot to await `check_env`.

    In an async test with the fixture `no_leaks`, also watch the asyncio tasks.
    """
    forgotten()
    watch = item.stash.get(WATCH, None)
    if watch is None or not isinstance(item, pytest.Function) or not inspect.iscoroutinefunction(item.obj):
        result = yield
    else:
        original, item.obj = item.obj, _seeing_tasks(item.obj, watch)
        try:
            result = yield
        finally:
            item.obj = original
    names = ", ".join(forgotten())
    if names:
        pytest.fail(
            f"check_env({names}) was never awaited and checked nothing: write `await check_env(...)` in an async test",
            pytrace=False,
        )
    return result


def _seeing_tasks(test: Callable[..., Any], watch: LeakWatch) -> Callable[..., Any]:
    """Wrap an async test so that `watch` sees the asyncio tasks in the test's event loop before and after the test."""

    @functools.wraps(test)
    async def seen(*args: Any, **kwargs: Any) -> Any:
        watch.see_tasks()
        result = await test(*args, **kwargs)
        watch.tasks_left = await watch.left_tasks()
        return result

    return seen
