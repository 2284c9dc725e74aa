"""Processes that train together: each one's GPU, and the closing of their group."""

import subprocess
import sys

import pytest

from agentgym.hub import gpu_number
from agentgym.train.distributed import find_device

CLOSES_WHILE_GLOO_WORKS = """
import torch
import torch.distributed as dist
from agentgym.train.distributed import open_ranks

ranks = open_ranks("cpu", group=True)
kept = dist.group.WORLD  # as FSDP keeps it, by its mesh
given, taken = torch.ones(1 << 24), torch.ones(1 << 24)
works = [dist.all_gather([taken], given, async_op=True) for _ in range(20)]
ranks.close()
print(sum(work.is_completed() for work in works))
"""


def test_a_closed_process_group_has_no_running_collective() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSES_WHILE_GLOO_WORKS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr[-2000:]


def place(monkeypatch: pytest.MonkeyPatch, rank: int, processes: int) -> None:
    """Set the environment variables that torchrun gives a process."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))


@pytest.mark.parametrize("rank", [0, 3])
def test_more_processes_than_gpus_are_refused_on_each_with_advice(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    place(monkeypatch, rank, 4)
    said = r"^device: 4 processes were started .* torch sees 2 GPUs here; .*--nproc-per-node 2.*CUDA_VISIBLE_DEVICES"
    with pytest.raises(ValueError, match=said) as refused:
        gpu_number("cuda", 2)
    assert "\n" not in str(refused.value)
    assert gpu_number("cuda", 4) == rank


def test_a_gpu_number_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert gpu_number("cuda:1", 2) == 1
    with pytest.raises(ValueError, match=r"^device: there is no cuda:2: torch sees 2 GPUs here, numbered from 0"):
        gpu_number("cuda:2", 2)
    with pytest.raises(ValueError, match=r"^device: cuda was requested, but torch finds no GPU here; set device"):
        gpu_number("cuda", 0)


def test_one_gpu_for_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 0, 2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(
        ValueError, match=r"^device: each process needs its own GPU, but cuda:1 is a single one; set device to cuda"
    ):
        find_device("cuda:1")


def test_a_name_of_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^device: expected auto, cpu, cuda or cuda:N, got 'cuda:x'"):
        find_device("cuda:x")
