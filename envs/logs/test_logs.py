"""Tests of logs in real sandboxes; the slow tests use a gigabyte."""

import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

import agentgym as ag
from agentgym.sandboxes.choose import Kind
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Reply, Scripted, call, check_env, say
from envs.logs.env import MB, Logs, LogTask, make_task, pieces

KINDS = ["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)]
ORACLE = [call("bash", cmd="grep -Ev '^(DEBUG|TRACE) ' app.log > clean.log && rm app.log"), say("Done.")]


@asynccontextmanager
async def sandboxes_for(task: LogTask, kind: Kind) -> AsyncIterator[SandboxPool]:
    """Yield a pool of one sandbox of this kind, with space for the task's log."""
    why_not = why_no_docker() if kind == "docker" else why_no_bubblewrap()
    if why_not is not None:
        pytest.skip(f"{kind}: {why_not}")
    async with replace(Logs.sandbox_for(task), kind=kind).open(1) as pool:
        yield pool


async def play(sandboxes: SandboxPool, task: LogTask, *script: Reply) -> ag.Rollout:
    rollout = await ag.rollout(Logs, task, Scripted(script), sandboxes=sandboxes)
    assert rollout.error is None
    return rollout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("megabytes", [128, pytest.param(1024, marks=pytest.mark.slow)])
async def test_a_log_of_any_size_can_be_transferred_and_cleaned(kind: Kind, megabytes: int) -> None:
    small, task = make_task("train", 1, 24), make_task("train", 0, megabytes)
    async with sandboxes_for(task, kind) as sandboxes:
        await play(sandboxes, small, *ORACLE)  # Everything that any rollout loads is loaded by now.
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rollout = await play(sandboxes, task, *ORACLE)
    assert rollout.rewards == {"clean": 1.0, "returned": 1.0}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


@pytest.mark.parametrize("kind", KINDS)
async def test_the_env_keeps_its_contract(kind: Kind) -> None:
    task = make_task("train", 0, 1)
    async with sandboxes_for(task, kind) as sandboxes:
        await check_env(Logs, task, oracle=ORACLE, sandboxes=sandboxes)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_log_that_is_not_clean_or_lacks_lines_or_is_not_a_file_is_not_rewarded(kind: Kind) -> None:
    task = make_task("test", 0, 1)
    commands = (
        "true",
        "cp app.log clean.log",
        "grep -v ^DEBUG app.log > clean.log",
        "grep -Ev '^(DEBUG|TRACE) ' app.log | sort > clean.log",
        "mkdir clean.log; cp app.log clean.log",
        "head -c 3000000 /dev/zero > clean.log",
    )
    async with sandboxes_for(task, kind) as sandboxes:
        for command in commands:
            assert (await play(sandboxes, task, call("bash", cmd=command), say("Done."))).reward == 0.0, command


def test_no_two_logs_or_parts_of_one_are_equal() -> None:
    tasks = [make_task(split, index, 4) for split in ("train", "test") for index in range(3)]
    made = [piece for task in tasks for piece, _ in pieces(task)]
    assert len(set(made)) == len(made) == 24
    assert all(0.99 * MB < len(piece) <= MB for piece in made)
