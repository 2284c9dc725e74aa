"""The memory and the processors that a process may use, in a container and outside of it."""

import os
from pathlib import Path

import pytest

from agentgym.machine.resources import usable_memory, usable_processors


def test_a_containers_limit_on_memory_counts_if_it_is_below_the_machines(tmp_path: Path) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_memory(tmp_path) == machine
    for text, usable in {"max\n": machine, f"{machine // 2}\n": machine // 2, f"{machine * 2}\n": machine}.items():
        (tmp_path / "memory.max").write_text(text)
        assert usable_memory(tmp_path) == usable


def test_processors_are_limited_by_a_containers_quota_and_shared_by_torchruns_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert usable_processors(tmp_path) == 8
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_processors(tmp_path) == 8
    (tmp_path / "cpu.max").write_text("350000 100000\n")
    assert usable_processors(tmp_path) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert usable_processors(tmp_path) == 1


def test_omp_num_threads_sets_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert usable_processors(tmp_path) == 3
