"""Sandboxes of a living client are never removed, wherever it runs; those of an ended client always are."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.machine import process_identity
from agentgym.machine.process_identity import FORGOTTEN_S, dead_folders, lent_folder, new_folder, owner, state_of
from agentgym.sandboxes.docker import heartbeat
from agentgym.sandboxes.docker.client import connect
from agentgym.sandboxes.docker.docker import Docker, why_no_docker
from agentgym.sandboxes.docker.heartbeat import (
    DEAD_S,
    LOOKS_S,
    OWNER_LABEL,
    RUN_LABEL,
    Heart,
    Lookout,
    Traces,
    engine_time,
    remove_container,
    traces,
)
from agentgym.sandboxes.docker.images.names import default_image
from tests.sandboxes.conftest import below

TOKEN = secrets.token_hex(6)
ELSEWHERE = "host/another-boot/1/1/1"
CLIENT = """
import asyncio, sys
from agentgym.machine.process_identity import owner
from agentgym.sandboxes.docker.docker import Docker

async def main():
    async with Docker().open(1) as sandboxes, sandboxes.lease() as sandbox:
        await sandbox.python("1")
        print(owner(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print((await sandbox.python("6 * 7")).stdout, end="", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@pytest.fixture
def engine() -> Iterator[Any]:
    """Yield a client of the engine that runs here."""
    if (why_not := why_no_docker()) is not None:
        pytest.skip(f"docker: {why_not}")
    with ExitStack() as stack:
        client = connect()
        stack.callback(client.close)
        yield client


@contextmanager
def client_in_another_namespace() -> "Iterator[tuple[subprocess.Popen[str], str]]":
    """Run a client with the same host name whose process ids start at 1; yield it and its owner identity."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a separate PID namespace needs root and unshare")
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", CLIENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            who = client.stdout.readline().strip()
            assert who.startswith("/".join(owner().split("/")[:2])), "the client reports a different host or boot"
            yield client, who
        finally:
            client.kill()


def token_of(engine: Any, who: str) -> str:
    (token,) = [token for token, of in traces(engine).items() if of.who == who]
    return token


@pytest.mark.docker
async def test_a_client_in_another_namespace_keeps_its_sandboxes(engine: Any) -> None:
    with client_in_another_namespace() as (client, who):
        assert client.stdin is not None
        assert client.stdout is not None
        assert state_of(who) == "unknown"
        for _ in range(2):
            async with Docker().open(1) as sandboxes, sandboxes.lease():
                pass  # It sweeps when it opens.
        client.stdin.write("go on\n")
        client.stdin.flush()
        assert client.stdout.readline() == "42\n"


@pytest.mark.docker
async def test_leftovers_of_a_killed_client_in_another_namespace_are_found_by_its_silence(engine: Any) -> None:
    with client_in_another_namespace() as (_, who):
        token = token_of(engine, who)
    for container in traces(engine)[token].containers:
        engine.wait(container["Id"])  # Its wire has closed.
    left = traces(engine)[token]
    try:
        assert left.containers
        assert left.volumes
        found, times = {token: left}, [0.0]
        lookout = Lookout(lambda: times[0])
        assert lookout.ended(found, left.beat + 1) == []
        assert lookout.ended(found, left.beat + int(DEAD_S) + 1) == []
        times[0] += LOOKS_S
        assert lookout.ended(found, left.beat + int(DEAD_S + LOOKS_S) + 1) == [token]
    finally:
        for container in left.containers:
            remove_container(engine, container["Id"])
        for volume in left.volumes:
            engine.remove_volume(volume)


@pytest.mark.docker
async def test_a_client_that_is_blocked_for_long_keeps_its_sandboxes(engine: Any) -> None:
    with client_in_another_namespace() as (client, who):
        assert client.stdin is not None
        assert client.stdout is not None
        token, times = token_of(engine, who), [0.0]
        (stopped,) = below(client.pid)
        os.kill(stopped, signal.SIGSTOP)
        lookout = Lookout(lambda: times[0])
        for _ in range(3):
            silent = {token: traces(engine)[token]}
            assert lookout.ended(silent, silent[token].beat + 10 * int(DEAD_S)) == []
            times[0] += LOOKS_S
        os.kill(stopped, signal.SIGCONT)
        client.stdin.write("go on\n")
        client.stdin.flush()
        assert client.stdout.readline() == "42\n"


def test_missed_heartbeats_are_reported_once_with_their_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([OSError("down"), OSError("down"), None, OSError("down again"), None, None])
    times = iter([0.0, *(20.0 * number for number in range(1, 6)), 500.0])
    said: list[str] = []
    tell = lambda error: said.append(str(error))  # noqa: E731
    heart = Heart(TOKEN, lambda: pytest.fail("it must not query the engine"), tell, lambda: next(times, 500.0))

    def beat() -> None:
        outcome = next(outcomes, StopIteration())
        if isinstance(outcome, StopIteration):
            heart._stop.set()
        elif outcome is not None:
            raise outcome

    monkeypatch.setattr(heart, "beat", beat)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.0)
    heart._go_on()
    assert said == ["down", "down again", "400 s without a heartbeat: this process or the engine was delayed"]


def test_a_silent_client_whose_heartbeat_returns_is_alive() -> None:
    times = [0.0]
    lookout, silent = Lookout(lambda: times[0]), Traces(ELSEWHERE, beat=0)
    assert lookout.ended({"a": silent}, 1000) == []
    times[0] += LOOKS_S
    assert lookout.ended({"a": replace(silent, beat=500)}, 1000) == []
    times[0] += LOOKS_S
    assert lookout.ended({"a": replace(silent, beat=1050)}, 1100) == []
    times[0] += LOOKS_S
    assert lookout.ended({"a": replace(silent, beat=1050)}, 1400) == []
    times[0] += LOOKS_S
    assert lookout.ended({"a": replace(silent, beat=1050)}, 1500) == ["a"]


def test_a_visible_client_is_judged_by_its_process_alone() -> None:
    *same, _ = owner().split("/")
    lookout = Lookout(lambda: 0.0)
    assert lookout.ended({"a": Traces(owner()), "b": Traces("/".join([*same, "1"]), beat=10**10)}, 10**9) == ["b"]


def test_an_ended_client_is_found_at_once_even_if_its_host_name_changed() -> None:
    _, boot, namespace, pid, started = owner().split("/")
    lives = Traces(f"elsewhere/{boot}/{namespace}/{pid}/{started}")
    ended = Traces(f"elsewhere/{boot}/{namespace}/{pid}/1", beat=10**10)
    assert Lookout(lambda: 0.0).ended({"lives": lives, "ended": ended}, 10**9) == ["ended"]


def test_a_container_whose_owner_is_in_an_unknown_format_is_left_alone() -> None:
    times = [0.0]
    lookout = Lookout(lambda: times[0])
    for _ in range(3):
        assert lookout.ended({"a": Traces("nonsense")}, 10**9) == []
        times[0] += LOOKS_S


@pytest.mark.docker
def test_a_heartbeat_is_one_volume_with_the_engines_time(engine: Any) -> None:
    heart = Heart(TOKEN, lambda: engine, lambda error: None)
    try:
        heart.start()
        (first,) = traces(engine)[TOKEN].volumes
        assert abs(traces(engine)[TOKEN].beat - engine_time(engine)) <= 2
        while (now := traces(engine)[TOKEN].volumes) == [first]:
            heart.beat()
        assert len(now) == 1
    finally:
        heart.stop()
    assert TOKEN not in traces(engine)


@pytest.mark.docker
async def test_a_client_leaves_no_heartbeat_when_it_closes(engine: Any) -> None:
    mine = owner()

    def beats() -> set[str]:
        return {volume for of in traces(engine).values() if of.who == mine for volume in of.volumes}

    others = beats()
    async with Docker().open(1):
        assert len(beats() - others) == 1
    assert beats() == others


@pytest.mark.docker
def test_a_client_without_a_heartbeat_is_as_old_as_its_newest_container(engine: Any) -> None:
    labels = {OWNER_LABEL: ELSEWHERE, RUN_LABEL: TOKEN}
    made = engine.create_container(default_image(), ["{}"], labels=labels)["Id"]
    try:
        assert abs(traces(engine)[TOKEN].beat - engine_time(engine)) <= 5
    finally:
        remove_container(engine, made)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def old(folder: Path) -> Path:
    past = folder.stat().st_mtime - FORGOTTEN_S - 10
    os.utime(folder, (past, past))
    return folder


def test_a_folder_of_an_invisible_process_is_a_leftover_after_a_day_without_use(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = old(new_folder("sandbox"))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(process_identity, "owner", lambda: ELSEWHERE)
        fresh, forgotten = new_folder("sandbox"), old(new_folder("sandbox"))
        with lent_folder("sglang") as lent:
            old(lent)
            elsewhere.undo()
            assert set(dead_folders()) == {forgotten}
    assert mine.exists()
    assert fresh.exists()


def test_a_sweep_marks_the_folders_of_its_own_process_as_used(scratch: Path) -> None:
    folder = old(new_folder("sandbox"))
    before = folder.stat().st_mtime
    process_identity.sweep_folders()
    assert folder.stat().st_mtime > before
