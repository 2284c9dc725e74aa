"""inspect_ai's side of `benchmarks.sandbox`, run by the Python of an environment with inspect_ai and no agentgym.

`python -m benchmarks.sandbox.theirs_inspect IMAGE`. A call is a new Python by `exec` of its docker sandbox, as its
tools `python` and `bash` do. The containers are those that it starts for samples, with the settings of its own default
file for `docker compose`. The results include no model and no log. It runs as many commands at once as requested: its
default limits, one command per processor and twice as many for `docker compose`, are raised.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import inspect_ai.util._spec.docker.docker as provider
from inspect_ai._util.error import PrerequisiteError
from inspect_ai.util._spec.docker.prereqs import validate_docker_compose, validate_docker_engine
from inspect_ai.util._subprocess import init_max_subprocesses

from benchmarks.sandbox.measure import AS_PROGRAM
from benchmarks.sandbox.peer import answer

COMPOSE = """services:
  default:
    image: {image}
    x-local: true
    init: true
    entrypoint: ["tail", "-f", "/dev/null"]
    network_mode: none
    stop_grace_period: 1s
"""
TASK = "sandbox-benchmark"
AT_ONCE = 8
Environments = dict[str, Any]


@dataclass
class Inspect:
    """Containers of inspect_ai."""

    image: str
    version: str = version("inspect_ai")
    note: str = ""
    ways: tuple[str, ...] = ("program",)
    folder: Any = field(default_factory=tempfile.TemporaryDirectory)

    def __post_init__(self) -> None:
        Path(self.config).write_text(COMPOSE.format(image=self.image))

    @property
    def config(self) -> str:
        """The file for `docker compose`."""
        return str(Path(self.folder.name, "compose.yaml"))

    async def open(self) -> None:
        """Check the engine and `docker compose`; an engine that inspect_ai finds too old is tried anyway, and noted."""
        init_max_subprocesses(AT_ONCE)
        os.environ["INSPECT_DOCKER_CLI_CONCURRENCY"] = str(AT_ONCE)
        await validate_docker_compose()
        try:
            await validate_docker_engine()
        except PrerequisiteError as error:
            self.note = " ".join(str(error).split()).partition(" Upgrade")[0].removeprefix("ERROR: ")
            provider.validate_prereqs = validate_docker_compose
        await provider.DockerSandboxEnvironment.task_init(TASK, self.config)

    async def new(self) -> Environments:
        """Return a container like one for a sample."""
        found: Environments = await provider.DockerSandboxEnvironment.sample_init(TASK, self.config, {})
        return found

    async def call(self, sandbox: Environments, way: str) -> None:
        """Run one cell, and check its result."""
        done = await sandbox["default"].exec(AS_PROGRAM)
        assert done.stdout == "2\n", done

    async def pid(self, sandbox: Environments) -> int:
        """Return the id of the container's first process."""
        name = (await sandbox["default"].connection()).container
        found = await asyncio.to_thread(subprocess.check_output, ["docker", "inspect", name])
        return int(json.loads(found)[0]["State"]["Pid"])

    async def end(self, sandbox: Environments) -> None:
        """End the container."""
        await provider.DockerSandboxEnvironment.sample_cleanup(TASK, self.config, sandbox, False)

    async def close(self) -> None:
        """Remove the file for `docker compose`."""
        self.folder.cleanup()


asyncio.run(answer(Inspect(sys.argv[1])))
