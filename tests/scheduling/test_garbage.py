"""The garbage collector while a scheduler runs."""

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
    """An env that records the collector's settings while it runs."""

    seen: ClassVar[list[tuple[int, int, int]]] = []

    @ag.reward
    async def fine(self) -> float:
        """Return 1."""
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
    """An object that refers to itself, so only the collector can free it."""

    def __init__(self) -> None:
        self.itself = self


def old_garbage() -> "ref[Node]":
    """Create a reference cycle that survived a collection while alive and has since become garbage."""
    node = Node()
    gc.collect(0)
    return ref(node)


async def test_collector_thresholds_are_raised_during_a_batch_and_restored_afterwards(
    own: tuple[int, int, int],
) -> None:
    Asks.seen.clear()
    await run_groups(Asks, [TASK], Scripted([say("so")]), n=2)
    assert Asks.seen == [SETTINGS] * 2
    assert gc.get_threshold() == own


def test_collector_thresholds_are_restored_after_an_error(own: tuple[int, int, int]) -> None:
    with pytest.raises(KeyError), collecting_between_batches():
        raise KeyError
    assert gc.get_threshold() == own


def test_thresholds_are_restored_after_the_last_overlapping_block(own: tuple[int, int, int]) -> None:
    one, other = collecting_between_batches(), collecting_between_batches()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold() == SETTINGS
    other.__exit__(None, None, None)
    assert gc.get_threshold() == own


def test_thresholds_set_by_others_during_a_block_are_kept() -> None:
    with collecting_between_batches():
        gc.set_threshold(1234, 5, 6)
    assert gc.get_threshold() == (1234, 5, 6)


def test_a_disabled_collector_stays_disabled() -> None:
    gc.set_threshold(0, 10, 10)
    with collecting_between_batches():
        assert gc.get_threshold() == (0, 10, 10)
    assert gc.get_threshold() == (0, 10, 10)


def test_larger_thresholds_of_the_process_are_kept() -> None:
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


def test_nothing_is_collected_if_nothing_runs() -> None:
    garbage = old_garbage()
    collect_old()
    assert garbage() is not None


async def test_a_scheduler_collects_old_garbage_before_each_batch() -> None:
    settings = Schedule(group_size=1)
    other = TASK.model_copy(update={"id": "u"})
    async with Scheduler(Asks, [TASK, other], Scripted([say("so")]), settings) as scheduler:
        await scheduler.collect(1)
        garbage = old_garbage()
        await scheduler.collect(1)
        assert garbage() is None


@pytest.fixture
def new_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the name of a new module, which holds a list and whether the collector was on during its import."""
    (tmp_path / "imported_for_good.py").write_text("import gc\nheld, collects = [[]], gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "imported_for_good"
    sys.modules.pop("imported_for_good", None)
    gc.unfreeze()


def test_permanent_imports_are_frozen_and_later_objects_are_not(new_module: str) -> None:
    import_for_good(new_module)
    made = sys.modules[new_module]
    assert not made.collects
    assert gc.isenabled()
    assert all(made.held is not tracked for tracked in gc.get_objects())
    later = [made]
    assert any(later is tracked for tracked in gc.get_objects())


def test_an_already_imported_module_freezes_nothing(new_module: str) -> None:
    import_for_good(new_module)
    gc.unfreeze()
    import_for_good(new_module)
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("is_on", [True, False])
def test_a_failed_permanent_import_leaves_the_collector_unchanged(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(ImportError):
            import_for_good("no_such_module")
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
