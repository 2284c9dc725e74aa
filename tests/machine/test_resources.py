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


def test_the_lowest_limit_of_the_control_groups_that_contain_the_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (job := tmp_path / "jobs/job_7").mkdir(parents=True)
    (step := job / "step_0").mkdir()
    (member := tmp_path / "member").write_text("1:name=systemd:/other\n0::/jobs/job_7/step_0\n")
    for group, memory, quota in ((step, "max", "max"), (job, str(3 << 30), "200000"), (tmp_path, str(4 << 30), "max")):
        (group / "memory.max").write_text(f"{memory}\n")
        (group / "cpu.max").write_text(f"{quota} 100000\n")
    assert (usable_memory(tmp_path, member), usable_processors(tmp_path, member)) == (3 << 30, 2)
    member.write_text("4:memory:/jobs/job_8\n0::/\n")
    (old := tmp_path / "memory/jobs/job_8").mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(f"{2 << 30}\n")
    assert usable_memory(tmp_path, member) == 2 << 30


def test_torchruns_processes_share_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = usable_memory(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert usable_memory(tmp_path) == whole // 4


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
