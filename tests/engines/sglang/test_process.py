"""A launched process ends with its launcher, and reports why if it ends earlier."""

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from agentgym.engines.sglang.config import LORA_MODULES
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.engines.sglang.http import JsonClient
from agentgym.engines.sglang.launching.process import _GRACE_S, ServerProcess, free_port
from agentgym.engines.sglang.launching.supervise import die_with
from agentgym.errors import EngineError

MODEL = Path(__file__).parents[3] / "recipes" / "checkpoints" / "chase"

FAMILY = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN) if "deaf" in sys.argv else None
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], pass_fds=[int(sys.argv[1])])
os.write(int(sys.argv[1]), b"up")
child.wait()
"""
"""A server with a child; both hold the test's pipe open as long as they live."""

OWNER = """
import asyncio, os, sys
from pathlib import Path
from agentgym.engines.sglang.launching.process import ServerProcess
async def main():
    process = ServerProcess(sys.argv[2:], Path(sys.argv[1]))
    await process.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def read(pipe: int) -> bytes:
    return await asyncio.to_thread(os.read, pipe, 100)


@pytest.fixture
def process_group(tmp_path: Path) -> tuple[int, list[str]]:
    """Return the read end of a named pipe, and a command for a process group that writes to it once it runs."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    opening = f"import os, sys; sys.argv[1:1] = [str(os.open({str(fifo)!r}, os.O_WRONLY))]"
    return reading, [sys.executable, "-c", opening + FAMILY]


async def until_up(pipe: int) -> None:
    """Wait until the pipe has a writer: reading it before that returns nothing."""
    while await read(pipe) != b"up":
        pass


@pytest.mark.parametrize("deaf", [[], ["deaf"]], ids=["hears_the_signal", "deaf"])
async def test_closing_ends_the_process_and_its_children(
    tmp_path: Path, process_group: tuple[int, list[str]], deaf: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, command = process_group
    process = ServerProcess([*command, *deaf], tmp_path / "log", grace_s=0.5 if deaf else 600)
    await process.start()
    await until_up(pipe)
    assert process.pid is not None
    await process.close()
    assert await read(pipe) == b""
    assert process.pid is None
    await process.close()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_the_process_ends_however_its_owner_ends(
    tmp_path: Path, process_group: tuple[int, list[str]], kill: signal.Signals
) -> None:
    pipe, command = process_group
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(tmp_path / "log"), *command), stderr=asyncio.subprocess.DEVNULL
    )
    await until_up(pipe)
    owner.send_signal(kill)
    await owner.wait()
    assert await read(pipe) == b""


def test_a_server_whose_supervisor_ended_before_its_start_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"], preexec_fn=partial(die_with, 1)) as server:
        assert server.wait() == -signal.SIGKILL


async def test_a_server_that_ends_during_startup_is_an_engine_error_with_its_log(tmp_path: Path) -> None:
    said: list[str] = []
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    process = ServerProcess(command, tmp_path / "log")
    await process.start()
    with pytest.raises(EngineError, match=r"(?s)ended during startup: no such model\n\[ended with exit code 3\]"):
        await process.ready(JsonClient(f"http://127.0.0.1:{free_port()}"), startup_s=60, progress=said.append)
    await process.close()


async def test_a_starting_server_reports_its_last_log_line_once_with_the_elapsed_seconds(tmp_path: Path) -> None:
    said: list[str] = []
    spoken = asyncio.Event()

    def hear(line: str) -> None:
        said.append(line)
        spoken.set()

    process = ServerProcess(
        [sys.executable, "-uc", "print('loading weights'); import signal; signal.pause()"], tmp_path / "log"
    )
    await process.start()
    starting = asyncio.create_task(
        process.ready(JsonClient(f"http://127.0.0.1:{free_port()}"), startup_s=600, progress=hear)
    )
    await spoken.wait()
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await process.close()
    assert len(said) == 1
    assert re.fullmatch(r"\d+ s of at most 600 s: loading weights", said[0])


async def test_a_server_has_time_to_clean_up_before_it_is_killed(tmp_path: Path) -> None:
    """SGLang checks every 5 s whether it was told to stop."""
    tidies = "import signal; signal.signal(signal.SIGTERM, lambda *_: (print('tidy'), exit()));"
    process = ServerProcess([sys.executable, "-c", f"{tidies} print('up'); signal.pause()"], tmp_path / "log")
    await process.start()
    while "up" not in process.log_tail():  # noqa: ASYNC110  a log sends no notification
        await asyncio.sleep(0.01)
    await process.close()
    assert "tidy\n[ended with exit code 0]" in process.log_tail()
    assert _GRACE_S > 5


async def test_a_missing_program_is_an_engine_error_that_names_it(tmp_path: Path) -> None:
    engine = SGLangEngine.launch(MODEL, SGLangConfig(command="/no/such/python -m sglang.launch_server"))
    with pytest.raises(
        EngineError, match="command: cannot launch a server, because there is no program '/no/such/python'"
    ):
        await engine.__aenter__()


async def test_a_program_that_cannot_run_is_reported_in_one_line_without_a_traceback(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    process = ServerProcess([str(broken)], tmp_path / "log")
    await process.start()
    with pytest.raises(EngineError, match=r"during startup: \[cannot run .*broken: No such file or directory\]$"):
        await process.ready(JsonClient(f"http://127.0.0.1:{free_port()}"), startup_s=60, progress=None)
    await process.close()


async def test_a_launched_server_without_the_ready_endpoint_is_too_old_and_not_awaited(tmp_path: Path) -> None:
    serve = "import http.server as h, sys; h.HTTPServer(('127.0.0.1', int(sys.argv[1])), h.SimpleHTTPRequestHandler)"
    port = free_port()
    command = [sys.executable, "-c", serve + ".serve_forever()", str(port)]
    process = ServerProcess(command, tmp_path / "log")
    await process.start()
    client = JsonClient(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineError, match=r"neither /ready nor /health_generate: it is not an SGLang server"):
        await process.ready(client, startup_s=600, progress=None)
    client.close()
    await process.close()


async def test_a_server_that_is_never_ready_is_ended(process_group: tuple[int, list[str]]) -> None:
    pipe, command = process_group
    engine = SGLangEngine.launch(MODEL, SGLangConfig(command=shlex.join(command), startup_s=0.5))
    with pytest.raises(EngineError, match=r"not ready after 0\.5 s"):
        await engine.__aenter__()
    assert await read(pipe) in (b"up", b"")
    assert await read(pipe) == b""


async def test_a_cancelled_launch_leaves_nothing(process_group: tuple[int, list[str]], no_leaks: None) -> None:
    pipe, command = process_group
    engine = SGLangEngine.launch(MODEL, SGLangConfig(command=shlex.join(command)))
    opening = asyncio.create_task(engine.__aenter__())
    await until_up(pipe)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert await read(pipe) == b""


def test_the_command_line_contains_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTGYM_SGLANG", "'/a b/python' -m sglang.launch_server")
    config = SGLangConfig(slots=8, context_tokens=100, max_lora_rank=4, tp=2, arguments="--x y")
    words = config.launch_command("model", port=5, context_limit=110)
    assert words[:3] == ["/a b/python", "-m", "sglang.launch_server"]
    text = " ".join(words[3:])
    assert "--model-path model --host 127.0.0.1 --port 5 --max-running-requests 8 --context-length 110" in text
    assert "--tp-size 2" in text
    assert f"--enable-lora --max-lora-rank 4 --lora-target-modules {' '.join(LORA_MODULES)} --x y" in text
    assert SGLangConfig(command="run").launch_command("m", port=1, context_limit=1)[0] == "run"


@pytest.mark.parametrize("field", ["servers", "slots", "context_tokens", "health_s", "stall_s"])
def test_an_invalid_config_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be (above 0|at least 1), got 0"):
        SGLangConfig(**{field: 0})  # type: ignore[arg-type]


def test_a_negative_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="server_wait_s: must be at least 0"):
        SGLangConfig(server_wait_s=-1)
