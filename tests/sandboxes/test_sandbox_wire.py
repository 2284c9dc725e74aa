"""The connection of a container's server, which is accepted once and never lost."""

import asyncio
import gc
import socket
from pathlib import Path
from typing import Any

import pytest

from agentgym.sandboxes.docker.client import EngineFailed
from agentgym.sandboxes.docker.sandbox_wire import accepted, listener


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_start_leaves_no_connection_open(tmp_path: Path, turns: int) -> None:
    folder = tmp_path / "sandbox"
    folder.mkdir()
    with listener(folder / "sandbox.sock") as listening, socket.socket(socket.AF_UNIX) as server:
        accepting = asyncio.create_task(accepted(listening, running))
        for _ in range(5):  # Until it waits for events of the socket.
            await asyncio.sleep(0)
        server.connect(str(folder / "sandbox.sock"))
        for _ in range(turns):
            await asyncio.sleep(0)
        accepting.cancel()
        await asyncio.wait({accepting})
        connection = listening.accept()[0] if accepting.cancelled() else accepting.result()
        connection.close()
        assert server.recv(1) == b""
    del accepting, connection
    gc.collect()


async def test_the_error_for_a_server_that_never_connects_includes_its_containers_state(tmp_path: Path) -> None:
    with (
        listener(tmp_path / "sandbox.sock") as listening,
        pytest.raises(EngineFailed, match="exited, exit code 3"),
    ):
        await accepted(listening, ended)


async def running() -> dict[str, Any]:
    return {"Running": True, "Status": "running", "ExitCode": 0, "Error": ""}


async def ended() -> dict[str, Any]:
    return {"Running": False, "Status": "exited", "ExitCode": 3, "Error": ""}
