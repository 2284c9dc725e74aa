"""Exhausted resources of the machine fail the rollout; those that a tool's own code used up fail only the tool."""

import asyncio
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import EnvError, MachineError, of_machine

TASK = ag.Task(id="t", prompt="Go.")
SCRIPT = [call("use"), say("done")]


@contextmanager
def files_at_most(more: int) -> Iterator[None]:
    """Limit this process to this many more open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Opening(ag.ToolEnv[ag.Task]):
    files = 1
    keeps = False

    async def setup(self) -> None:
        self.kept = list[int]()

    @ag.tool
    async def use(self) -> str:
        """Open files, and close them again unless they are kept."""
        opened = self.kept if self.keeps else list[int]()
        try:
            opened += [os.open(os.devnull, os.O_RDONLY) for _ in range(self.files)]
        finally:
            for file in [] if self.keeps else opened:
                os.close(file)
        return "done"

    @ag.reward
    async def right(self) -> float:
        return 1.0

    async def close(self) -> None:
        for file in self.kept:
            os.close(file)


async def test_a_tool_that_fails_because_the_process_has_no_file_left_fails_the_rollout() -> None:
    assert (await ag.rollout(Opening, TASK, Scripted(SCRIPT))).reward == 1.0
    with files_at_most(0):
        rollout = await ag.rollout(Opening, TASK, Scripted(SCRIPT))
    assert rollout.reward is None
    assert rollout.failure is not None
    assert rollout.failure.type == "MachineError"
    assert rollout.failure.where == "tool 'use' of Opening"
    assert "no more files can be opened on this machine: OSError: [Errno 24]" in rollout.failure.message
    assert "test_exhausted.py" in rollout.failure.message


async def test_a_tool_that_opens_too_many_files_itself_fails_only_the_tool() -> None:
    class Greedy(Opening):
        @ag.tool
        async def use(self) -> str:
            """Open as many files as possible."""
            files = []
            try:
                while True:
                    files.append(os.open(os.devnull, os.O_RDONLY))
            finally:
                for file in files:
                    os.close(file)

    with files_at_most(20):
        rollout = await ag.rollout(Greedy, TASK, Scripted(SCRIPT))
    assert rollout.reward == 1.0
    assert "failed: OSError" in rollout.segments[0].turns[0].env_messages[0]["content"]


async def test_a_memory_error_of_a_tool_fails_only_the_tool() -> None:
    class Large(Opening):
        @ag.tool
        async def use(self) -> str:
            """Allocate far too much memory."""
            return "x" * (1 << 62)

    rollout = await ag.rollout(Large, TASK, Scripted(SCRIPT))
    assert rollout.reward == 1.0
    assert rollout.metrics["tool_errors/use"] == 1


@pytest.mark.parametrize("method", ["setup", "right"])
async def test_a_setup_or_reward_that_runs_out_of_file_descriptors_names_the_machine(method: str) -> None:
    async def opens(self: Any) -> None:
        os.close(os.open(os.devnull, os.O_RDONLY))

    given = ag.reward(opens) if method == "right" else opens
    env: Any = type("Poor", (Opening,), {method: given})
    with files_at_most(0):
        rollout = await ag.rollout(env, TASK, Scripted([say("done")]))
    assert rollout.failure is not None
    assert rollout.failure.type == "MachineError"


NO_THREAD = """
import asyncio, threading
import agentgym as ag
from agentgym.testing import Scripted, call, say

class Env(ag.ToolEnv[ag.Task]):
    @ag.tool
    def plain(self) -> str:
        '''Look.'''
        return "seen"
    @ag.tool
    async def own(self) -> str:
        '''Look in a thread of its own.'''
        return await asyncio.to_thread(lambda: "seen")
    @ag.reward
    async def right(self) -> float:
        return 1.0

def refuse(self):
    raise RuntimeError("can't start new thread")

async def main():
    start, threading.Thread.start = threading.Thread.start, refuse
    for tool in ("plain", "own"):
        played = await ag.rollout(Env, ag.Task(id=tool, prompt="Go."), Scripted([call(tool), say("done")]))
        print(played.reward, played.failure.type, played.failure.message.partition(":")[0])
    threading.Thread.start = start

asyncio.run(main())
"""


def test_if_no_thread_can_be_started_the_tool_is_not_blamed() -> None:
    done = subprocess.run([sys.executable, "-c", NO_THREAD], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "None MachineError no thread can be started on this machine for agentgym-tool plain",
        "None MachineError no thread or process can be started on this machine",
    ]


def test_errors_on_a_machine_with_enough_resources_are_not_blamed_on_it() -> None:
    assert of_machine(OSError(errno.EMFILE, "Too many open files")) is None
    assert of_machine(BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")) is None
    assert of_machine(RuntimeError("can't start new thread")) is None
    assert of_machine(MemoryError()) is None
    assert of_machine(OSError(errno.ENOSPC, "No space left on device")) is None


async def test_a_rollout_that_ran_out_of_resources_before_its_first_action_is_retried() -> None:
    class Retried(Opening):
        limits = ag.Limits(retries=1)
        begun = 0

        async def setup(self) -> None:
            await super().setup()
            type(self).begun += 1
            if self.begun == 1:
                with files_at_most(0):
                    os.open(os.devnull, os.O_RDONLY)

    # The limit is lifted before the check, which then finds enough resources, so it counts as the env's own error.
    rollout = await ag.rollout(Retried, TASK, Scripted([say("done")]))
    assert (Retried.begun, rollout.failure and rollout.failure.type) == (1, EnvError.__name__)

    class Failing(Retried):
        begun = 0

        async def setup(self) -> None:
            type(self).begun += 1
            self.kept = []
            if self.begun == 1:
                raise MachineError("no thread")

    again = await ag.rollout(Failing, TASK, Scripted([say("done")]))
    assert (Failing.begun, again.reward, again.metrics["retries"]) == (2, 1.0, 1)
    await asyncio.sleep(0)
