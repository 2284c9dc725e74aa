"""Delays full garbage collections until between batches.

The messages and states of a rollout are thousands of objects, and nearly all of them live until their batch is done.
With its default settings, the collector scans all of them again and again: with ten thousand live rollouts, that is
half of the driver's time, in pauses of up to two seconds. Decision 37 explains the settings used instead.
"""

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS = (20_000, 500, 10)
"""Thresholds: new objects before the young ones are collected, and collections of young ones before older ones are.

In practice, older ones are not collected before the batch has ended.
"""
_FULL = 10
"""Number of collections of old objects after which all objects of the process are scanned."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The process's own settings, once for each open block."""


@contextmanager
def collecting_between_batches() -> Iterator[None]:
    """Collect only young objects automatically in this block, and old ones with `collect_old`.

    Blocks may be nested or run in several threads; the end of the last one restores the process's settings. A disabled
    collector stays disabled, and settings that other code changes meanwhile stay, too.
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
    """Return the settings of the block, or the process's own if they are larger or disable the collector."""
    young, middle, old = SETTINGS
    return (max(own[0], young), max(own[1], middle), max(own[2], old)) if own[0] else own


def collect_old() -> None:
    """Collect objects that became old since the last call, and sometimes all objects; do nothing outside a block.

    The event loop is blocked while the objects are scanned.
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
