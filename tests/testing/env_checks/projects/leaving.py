"""Tests that each leave something, and one that leaves nothing."""

import asyncio
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

KEPT: list[Any] = []


async def test_leaves_a_thread(no_leaks: None) -> None:
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()


def test_leaves_a_process(no_leaks: None) -> None:
    KEPT.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


def test_leaves_an_open_file(no_leaks: None) -> None:
    KEPT.append(Path(__file__).open())  # noqa: SIM115


def test_leaves_a_temporary_folder(no_leaks: None) -> None:
    tempfile.mkdtemp(prefix="left-")


async def test_leaves_a_task(no_leaks: None) -> None:
    KEPT.append(asyncio.create_task(asyncio.Event().wait(), name="beat"))


async def test_leaves_nothing(no_leaks: None) -> None:
    ending = threading.Event()
    threading.Thread(target=ending.wait).start()
    with tempfile.TemporaryFile(), tempfile.TemporaryDirectory():
        await asyncio.create_task(asyncio.sleep(0))
    ending.set()
    await (await asyncio.create_subprocess_exec(sys.executable, "-c", "")).wait()
