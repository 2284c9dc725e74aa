"""The garbage collector while a scheduler plays."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from weakref import ref

import pytest

import agentgym as ag
from agentgym.scheduling import Schedule, Scheduler, run_groups
from agentgym.scheduling.garbage import SETTINGS, collect_old, collecting_between_batches, import_for_good
from agentgym.testing import Scripted, say


class Asks(ag.ToolEnv[ag.Task]):
    """Notes the collector's settings while it is played."""

    seen: ClassVar[list[tuple[int, int, int]]] = []

    @ag.reward
    async def fine(self) -> float:
        """Always."""
        self.seen.append(gc.get_threshold())
        return 1.0


TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="?"),))


@pytest.fixture(autouse=True)
def own() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield (700, 10, 10)
    gc.set_threshold(*before)


class Node:
    """An object that holds itself, which only the collector can end."""

    def __init__(self) -> None:
        self.itself = self


def old_garbage() -> "ref[Node]":
    """A circle that has been looked at while it was alive, and is garbage since."""
    node = Node()
    gc.collect(0)
    return ref(node)


async def test_old_objects_are_left_alone_while_a_batch_is_played_and_the_settings_are_back_behind_it(
    own: tuple[int, int, int],
) -> None:
    Asks.seen.clear()
    await run_groups(Asks, [TASK], Scripted([say("so")]), n=2)
    assert Asks.seen == [SETTINGS] * 2
    assert gc.get_threshold() == own


def test_the_settings_are_back_behind_an_error(own: tuple[int, int, int]) -> None:
    with pytest.raises(KeyError), collecting_between_batches():
        raise KeyError
    assert gc.get_threshold() == own


def test_of_blocks_in_and_beside_each_other_the_last_one_sets_it_back(own: tuple[int, int, int]) -> None:
    one, other = collecting_between_batches(), collecting_between_batches()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold() == SETTINGS
    other.__exit__(None, None, None)
    assert gc.get_threshold() == own


def test_what_somebody_sets_meanwhile_stays() -> None:
    with collecting_between_batches():
        gc.set_threshold(1234, 5, 6)
    assert gc.get_threshold() == (1234, 5, 6)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0, 10, 10)
    with collecting_between_batches():
        assert gc.get_threshold() == (0, 10, 10)
    assert gc.get_threshold() == (0, 10, 10)


def test_larger_settings_of_the_process_stay() -> None:
    gc.set_threshold(10**6, 10, 10**4)
    with collecting_between_batches():
        assert gc.get_threshold() == (10**6, SETTINGS[1], 10**4)


def test_old_garbage_is_collected_between_batches() -> None:
    with collecting_between_batches():
        garbage = old_garbage()
        gc.collect(0)
        assert garbage() is not None
        collect_old()
        assert garbage() is None


def test_nothing_is_collected_where_nothing_is_played() -> None:
    garbage = old_garbage()
    collect_old()
    assert garbage() is not None


async def test_a_scheduler_collects_what_is_old_before_each_batch() -> None:
    settings = Schedule(group_size=1)
    other = TASK.model_copy(update={"id": "u"})
    async with Scheduler(Asks, [TASK, other], Scripted([say("so")]), settings) as scheduler:
        await scheduler.collect(1)
        garbage = old_garbage()
        await scheduler.collect(1)
        assert garbage() is None


@pytest.fixture
def new_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that is imported for the first time; it holds a list, and whether the collector was on."""
    (tmp_path / "imported_for_good.py").write_text("import gc\nheld, collects = [[]], gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "imported_for_good"
    sys.modules.pop("imported_for_good", None)
    gc.unfreeze()


def test_what_is_imported_for_good_is_looked_at_no_more_and_what_comes_later_is(new_module: str) -> None:
    import_for_good(new_module)
    made = sys.modules[new_module]
    assert not made.collects
    assert gc.isenabled()
    assert all(made.held is not tracked for tracked in gc.get_objects())
    later = [made]
    assert any(later is tracked for tracked in gc.get_objects())


def test_a_module_that_is_there_freezes_nothing(new_module: str) -> None:
    import_for_good(new_module)
    gc.unfreeze()
    import_for_good(new_module)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("is_on", [True, False])
def test_a_failed_import_for_good_leaves_the_collector_as_it_was(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(ImportError):
            import_for_good("no_such_module")
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
