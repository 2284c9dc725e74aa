"""Every mistake that is planted in an env is found, with a message that names the fix, and all are reported."""

import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import agentgym as ag
from agentgym.testing import check_env
from tests.testing.env_checks import looking
from tests.testing.env_checks.modules import load

PLANTED = sorted(Path(__file__).with_name("planted").glob("*.py"))


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect temporary files to the test's folder, with which the mistakes' leftovers are removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def loaded() -> Iterator[Callable[[Path], ModuleType]]:
    """Yield a function that loads a module with a mistake; its leftovers are ended after the test."""
    modules: list[ModuleType] = []

    def load_it(path: Path) -> ModuleType:
        modules.append(load(path))
        return modules[-1]

    yield load_it
    for module in modules:
        for left in getattr(module, "KEPT", ()):
            end = left.communicate if hasattr(left, "communicate") else left.close
            end()
        if hasattr(module, "END"):
            module.END.set()


async def checked(planted: ModuleType) -> None:
    """Check the env with the mistake; some mistakes are refused as soon as the class is created."""
    env = planted.planted() if hasattr(planted, "planted") else planted.Planted
    task, oracle = getattr(planted, "TASK", looking.TASK), getattr(planted, "ORACLE", looking.ORACLE)
    await check_env(env, task, oracle=oracle, **getattr(planted, "OPTIONS", {}))


@pytest.mark.parametrize("path", PLANTED, ids=[path.stem for path in PLANTED])
async def test_a_planted_mistake_is_found_and_named(path: Path, loaded: Callable[[Path], ModuleType]) -> None:
    planted = loaded(path)
    with pytest.raises((AssertionError, ValueError), match=f"(^|\n)({planted.FOUND})"):
        await checked(planted)


async def test_the_env_without_a_mistake_passes(no_leaks: None) -> None:
    await check_env(looking.Looking, looking.TASK, oracle=looking.ORACLE)


async def test_a_task_may_be_a_dict_of_its_fields() -> None:
    task: Any = looking.TASK.model_dump()
    await check_env(looking.Looking, task, oracle=looking.ORACLE)


async def test_several_mistakes_are_reported_together() -> None:
    class Several(looking.Looking):
        @ag.reward
        async def right(self) -> float:
            return 1.0

    with pytest.raises(AssertionError) as raised:
        await check_env(Several, looking.TASK, oracle=looking.ORACLE[:1])
    lines = str(raised.value).splitlines()
    assert lines[0] == "check_env(Several): 2 findings"
    assert [line.split(":")[0] for line in lines[1:]] == ["oracle", "no-op"]


async def test_thread_ids_in_an_error_do_not_give_a_second_finding() -> None:
    class Shelf(looking.Looking):
        async def setup(self) -> None:
            self.db = sqlite3.connect(":memory:")

        @ag.tool
        def look(self) -> str:  # type: ignore[override]
            """Look."""
            return str(self.db.execute("select 1").fetchall())

        async def close(self) -> None:
            self.db.close()

    with pytest.raises(AssertionError, match=r"^check_env\(Shelf\): 1 finding\ntool: tool 'look' raised Programming"):
        await check_env(Shelf, looking.TASK, oracle=looking.ORACLE)


async def test_leftovers_of_several_rollouts_are_one_finding() -> None:
    class Leaving(looking.Looking):
        async def setup(self) -> None:
            self.folder = tempfile.mkdtemp(prefix="planted-")

    with pytest.raises(
        AssertionError, match=r"1 finding\nleak: .*planted-\S* still exists \(and \d+ more\): end it in close"
    ):
        await check_env(Leaving, looking.TASK, oracle=looking.ORACLE)
