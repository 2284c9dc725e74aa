"""The garbage collector while rollouts are played: it looks at young objects, and at older ones between batches.

What a rollout has said and done is thousands of objects, and nearly all of them live until their batch is done with. By
its own settings the collector looks at all of them again and again: with ten thousand rollouts alive that is half of
the driver's time, in pauses of up to two seconds. Decision 37 says what is set instead, and why.
"""

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SETTINGS = (20_000, 500, 10)
"""New objects after which the young ones are looked at, and how many times that until the older ones are: in practice
not before the batch has ended."""
_FULL = 10
"""Batches that made old objects after which all objects of the process are looked at."""

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []
"""The process's own settings, once for each block that is open."""


@contextmanager
def collecting_between_batches() -> Iterator[None]:
    """Collect only young objects by themselves in this block, and old ones by `collect_old`; then set all back.

    Blocks may lie in each other or beside each other, in several threads: the end of the last one sets it back. A
    collector that is off stays off, and what somebody sets meanwhile stays as well.
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
    """The settings of the block; the process's own where they are larger, or where they turn the collector off."""
    young, middle, old = SETTINGS
    return (max(own[0], young), max(own[1], middle), max(own[2], old)) if own[0] else own


def collect_old() -> None:
    """Collect what has become old since the last call, at times all objects; nothing where no block is open.

    It takes time for the objects that are looked at, in which the event loop stands still.
    """
    if _before and gc.isenabled() and gc.get_count()[1]:
        gc.collect(2 if gc.get_count()[2] >= _FULL else 1)


def import_for_good(module: str) -> None:
    """Import a module, and let no collection look at what was imported, then or later; nothing, where it is there.

    It is for a program that imports torch: its modules stay until the process ends. To look for circles among them, at
    last when it ends, takes a third as long as importing them.
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
