"""Delays full garbage collections until between batches.

The messages and states of a rollout are thousands of objects, and nearly all of them live until their batch is done.
With its default settings, Python's garbage collector scans all of them again and again. A process that runs ten
thousand rollouts at once spends half of its time on these scans, in pauses of up to two seconds. Decision 37 explains
the settings used instead.
"""

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS = (20_000, 500, 10)
"""Thresholds for `gc.set_threshold`.

The first is the number of new objects after which the young objects are collected. The second is the number of such
collections after which older objects are collected, too. The third is the number of collections of older objects
after which all objects are collected. In practice, older objects are not collected before the batch has ended.
"""
_FULL = 10
"""Number of collections of older objects after which `collect_old` scans all objects of the process."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The process's own thresholds, once for each call of `collecting_between_batches` whose `with` has not ended. The end
of the last one restores them.
"""


@contextmanager
def collecting_between_batches() -> Iterator[None]:
    """Let Python collect only young objects by itself until the `with` ends; `collect_old` collects older ones.

    Calls may be nested or run in several threads; the end of the last `with` restores the process's settings. A
    disabled collector stays disabled. If other code changes the settings inside the `with`, its changes stay, too.
    """
    with _lock:
        if not _before:
            _before.append(gc.get_threshold())
            gc.set_threshold(*_enlarged(_before[0]))
        else:
            _before.append(_before[0])
    try:
        yield
    finally:
        with _lock:
            own = _before.pop()
            if not _before and gc.get_threshold() == _enlarged(own):
                gc.set_threshold(*own)


def _enlarged(own: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return the thresholds to set: for each, the larger one of SETTINGS and the process's `own`.

    If the process's own thresholds disable the collector, they are returned unchanged.
    """
    young, middle, old = SETTINGS
    return (max(own[0], young), max(own[1], middle), max(own[2], old)) if own[0] else own


def collect_old() -> None:
    """Collect objects that became old since the last call; called between two batches.

    After several such collections, all objects are scanned instead. Outside of `collecting_between_batches`, nothing
    is collected. The event loop is blocked while objects are scanned.
    """
    if _before and gc.isenabled() and gc.get_count()[1]:
        gc.collect(2 if gc.get_count()[2] >= _FULL else 1)


def import_for_good(module: str) -> None:
    """Import a module, if it isn't imported yet, and exclude its objects from all garbage collections.

    This is for programs that import torch, whose modules stay until the process ends. Scanning them for cycles, at
    the latest when the process ends, takes a third of the import's time.
    """
    if module in sys.modules:
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(module)
        gc.freeze()
    finally:
        if collects:
            gc.enable()
