"""SWE-ReX's side of `benchmarks.sandbox`, run by the Python of an environment that has swe-rex and no agentgym.

`python -m benchmarks.sandbox.theirs_swerex IMAGE`, with an IMAGE that has swe-rex, too. A call is a line for the
Python that runs in the container's shell session (`session`), or a new Python by `execute` (`program`). The
containers are those of its DockerDeployment. Each is started by a thread with its own event loop, because `start`
blocks its loop while it waits.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "ERROR")

from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest

from benchmarks.sandbox.measure import AS_PROGRAM, CELL
from benchmarks.sandbox.peer import answer

PROMPT = ">>> "
INTERPRETER = "python3 -I -S -q"


@dataclass
class Container:
    """A container with SWE-ReX's server in it."""

    deployment: Any
    has_session: bool = field(default=False)


@dataclass
class SweRex:
    """Containers of SWE-ReX."""

    image: str
    version: str = version("swe-rex")
    note: str = ""
    ways: tuple[str, ...] = ("program", "session")

    async def open(self) -> None:
        """Check that the image has the server."""
        there = ["docker", "run", "--rm", "--entrypoint", "swerex-remote", self.image, "--version"]
        done = await asyncio.to_thread(subprocess.run, there, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the image {self.image} has no working swerex-remote: {done.stderr.strip()}")

    async def new(self) -> Container:
        """Return a container whose server is running."""
        deployment = DockerDeployment(
            image=self.image, pull="never", python_standalone_dir=None, docker_args=["--entrypoint", ""]
        )
        await asyncio.to_thread(asyncio.run, deployment.start())
        read_on(deployment._container_process)
        return Container(deployment)

    async def call(self, sandbox: Container, way: str) -> None:
        """Run one cell, and check its result."""
        runtime = sandbox.deployment.runtime
        if way == "program":
            done = await runtime.execute(Command(command=AS_PROGRAM))
            assert done.stdout == "2\n", done
            return
        if not sandbox.has_session:
            await runtime.create_session(CreateBashSessionRequest())
            await runtime.run_in_session(interactive(INTERPRETER))
            sandbox.has_session = True
        said = await runtime.run_in_session(interactive(CELL))
        assert said.output == "2", said

    async def pid(self, sandbox: Container) -> int:
        """Return the id of the container's first process."""
        command = ["docker", "inspect", sandbox.deployment.container_name]
        found = await asyncio.to_thread(subprocess.check_output, command)
        return int(json.loads(found)[0]["State"]["Pid"])

    async def end(self, sandbox: Container) -> None:
        """End the container."""
        await asyncio.to_thread(asyncio.run, sandbox.deployment.stop())

    async def close(self) -> None:
        """Do nothing: `end` removes each container."""


def interactive(command: str) -> Any:
    """Return a line for the Python in the session, which answers with its prompt."""
    return BashAction(command=command, is_interactive_command=True, expect=[PROMPT])


def read_on(process: "subprocess.Popen[bytes]") -> None:
    """Read the server's output in threads.

    The server logs every request into pipes that SWE-ReX doesn't read; if they were full, it would block.
    """
    for stream in (process.stdout, process.stderr):
        assert stream
        threading.Thread(target=stream.read, daemon=True).start()


asyncio.run(answer(SweRex(sys.argv[1])))
