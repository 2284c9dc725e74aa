"""Docker engines that a test starts for itself, next to the one that runs here."""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.docker.images.names import default_image
from tests.sandboxes.conftest import below, wait_for_end


@dataclass
class Engine:
    """A separate Docker engine that a test can kill without harming anything else."""

    folder: Path
    flags: tuple[str, ...] = ()
    process: "subprocess.Popen[str] | None" = None

    @property
    def address(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    def start(self) -> None:
        """Start the engine and return once it answers."""
        folder = self.folder
        (folder / "docker.pid").unlink(missing_ok=True)  # Left by a killed engine; the id may be reused.
        # Don't start it without a bridge: that would remove the bridge of the engine that runs here.
        self.process = subprocess.Popen(
            [
                *("dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"),
                *("--pidfile", f"{folder}/docker.pid", "--host", self.address),
                *("--iptables=false", "--ip-forward=false"),
                *self.flags,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        said: list[str] = []
        listening = 0
        for line in self.process.stderr:
            said.append(line)
            if "API listen on" in line:
                listening += 1
            if listening == 1 + len([flag for flag in self.flags if flag.startswith("--host")]):
                break
        else:
            self.process.stderr.close()
            raise RuntimeError(f"the second Docker engine does not start: {''.join(said[-3:])}")
        threading.Thread(target=_drain, args=(self.process.stderr,), daemon=True).start()

    def kill(self) -> None:
        """Kill the engine with SIGKILL, so that it can't clean up.

        Its containerd dies too; its containers' shims stay.
        """
        assert self.process is not None
        containerd = self.folder / "exec/containerd/containerd.pid"
        pid = int(containerd.read_text())
        self.process.kill()
        self.process.wait()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        assert wait_for_end([pid]) == []
        containerd.unlink()

    def stop(self) -> None:
        """Stop the engine; its containers and its containerd end with it."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def shims(self) -> list[int]:
        """Return the engine's shim processes, one next to each container.

        A shim that was just starting when the engine died stays forever.
        """
        return [pid for pid, words in _command_lines() if b"containerd-shim" in words and bytes(self.folder) in words]

    def processes(self) -> list[int]:
        """Return the processes that run in its containers."""
        servers = {pid for pid, words in _command_lines() if b"/agentgym/server" in words}
        return [pid for shim in self.shims() for pid in below(shim) if pid in servers]


def _command_lines() -> Iterator[tuple[int, bytes]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield int(path.parent.name), path.read_bytes()


def _drain(stream: IO[str]) -> None:
    with stream:
        for _ in stream:
            pass


@contextmanager
def started(*flags: str) -> Iterator[Engine]:
    """Yield a separate engine with our image and end it with all that runs in it; skip the test if none can start."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("a separate Docker engine needs root and dockerd")
    why_not = why_no_docker()
    if why_not is not None:
        pytest.skip(f"docker: {why_not}")
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    folder.chmod(0o755)
    ours = Engine(folder, flags)
    try:
        try:
            ours.start()
        except RuntimeError as error:
            pytest.skip(str(error))
        _copy_image(ours)
        yield ours
    finally:
        ours.stop()
        for shim in ours.shims():
            for pid in (*below(shim), shim):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        subprocess.run(["umount", "--lazy", str(folder / "data")], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(folder, ignore_errors=True)


def _copy_image(ours: Engine) -> None:
    """Copy the image from the engine that runs here."""
    theirs, client = connect(), connect(host=ours.address)
    try:
        for _ in client.load_image(theirs.get_image(default_image())):  # type: ignore[no-untyped-call]
            pass
    finally:
        client.close()
        theirs.close()
