"""SWE-ReX's side of `benchmarks.sandbox`, run by the Python of an environment that has swe-rex and no agentgym.

`python -m benchmarks.sandbox.theirs_swerex IMAGE`, where IMAGE has swe-rex, too. A call is a line for the Python that
runs in the container's shell session (`session`), or a new Python by `execute` (`program`). The containers are those of
its DockerDeployment, each started by a thread with a loop of its own: `start` holds up its loop while it waits.
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
            raise RuntimeError(f"the image {self.image} has no swerex-remote that runs: {done.stderr.strip()}")

    async def new(self) -> Container:
        """A container whose server is alive."""
        deployment = DockerDeployment(
            image=self.image, pull="never", python_standalone_dir=None, docker_args=["--entrypoint", ""]
        )
        await asyncio.to_thread(asyncio.run, deployment.start())
        read_on(deployment._container_process)
        return Container(deployment)

    async def call(self, sandbox: Container, way: str) -> None:
        """One cell and its answer."""
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
        """The container's first process."""
        command = ["docker", "inspect", sandbox.deployment.container_name]
        found = await asyncio.to_thread(subprocess.check_output, command)
        return int(json.loads(found)[0]["State"]["Pid"])

    async def end(self, sandbox: Container) -> None:
        """The container's end."""
        await asyncio.to_thread(asyncio.run, sandbox.deployment.stop())

    async def close(self) -> None:
        """Nothing is left: each container is removed by its end."""


def interactive(command: str) -> Any:
    """A line for the Python in the session, which answers with its prompt."""
    return BashAction(command=command, is_interactive_command=True, expect=[PROMPT])


def read_on(process: "subprocess.Popen[bytes]") -> None:
    """The server logs every request into pipes that SWE-ReX does not read: full ones would hold it up."""
    for stream in (process.stdout, process.stderr):
        assert stream
        threading.Thread(target=stream.read, daemon=True).start()


asyncio.run(answer(SweRex(sys.argv[1])))
