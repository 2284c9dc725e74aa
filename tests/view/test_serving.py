"""`agentgym view` as a process: what it prints, what it refuses, and how it ends."""

import http.client
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from agentgym.cli import main as cli
from agentgym.errors.extras import install_line
from agentgym.store.reader import RolloutStore
from agentgym.store.schema import FILE
from agentgym.store.writer import RolloutWriter
from agentgym.view.runs import run_of
from tests.store.test_store import group, rollout
from tests.view.made_runs import make_run

ROOT = Path(__file__).parents[2]


@contextmanager
def viewer(*args: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a viewer that responds, and yield it with the URL that it printed."""
    command = [sys.executable, "-m", "agentgym", "view", *map(str, args), "--no-browser"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def opened(address: str) -> str:
    """Return the response that a browser with cookies and redirects would get."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    with browser.open(address) as answer:
        return str(answer.read().decode())


def test_view_prints_its_url_and_serves_only_requests_with_the_token(tmp_path: Path) -> None:
    make_run(tmp_path / "mine")
    with viewer(tmp_path) as (_, address):
        assert address.startswith("http://127.0.0.1:")
        assert "<!doctype html>" in opened(address)
        place, _, token = address.partition("?")
        assert json.loads(opened(f"{place}api/runs?{token}"))["runs"][0]["name"] == "mine"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            opened(f"{place}api/runs")
        port = int(place.split(":")[2].rstrip("/"))
        with pytest.raises(ConnectionRefusedError):  # it only listens on the loopback address
            socket.create_connection(("127.0.0.2", port))


def test_pipes_and_devices_in_place_of_a_runs_files_do_not_block_the_viewer(
    tmp_path: Path,
) -> None:
    for name in ("pipes", "sound", "zeros"):
        make_run(tmp_path / name)
    for file in ("metrics.jsonl", "settings.json", "summary.json", ".lock"):
        for name in ("pipes", "zeros"):
            (tmp_path / name / file).unlink(missing_ok=True)
        os.mkfifo(tmp_path / "pipes" / file)
        (tmp_path / "zeros" / file).symlink_to("/dev/zero")
    with viewer(tmp_path, "--no-token") as (process, address):
        runs = json.loads(opened(f"{address}api/runs"))["runs"]
        assert [run["name"] for run in runs] == ["pipes", "sound", "zeros"]
        for run in runs:
            assert json.loads(opened(f"{address}api/runs/{run['run']}/state"))["rollouts"] == 10
        with pytest.raises(urllib.error.HTTPError, match="409"):
            opened(f"{address}api/runs/{runs[0]['run']}/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


def test_an_unnormalized_path_leads_nowhere(tmp_path: Path) -> None:
    with viewer(tmp_path, "--no-token") as (_, address):
        for path in ("/../guard.py", "/..%2fguard.py", "/%2e%2e/guard.py", "/page/../../server.py"):
            asked = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"))
            asked.request("GET", path)
            answer = asked.getresponse()
            assert (path, answer.status, b"import" in answer.read()) == (path, 404, False)
            asked.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_viewer_silently_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "mine")
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "files"))
    with viewer(tmp_path, "--no-token") as (process, address):
        assert "mine" in opened(f"{address}api/runs")
        process.send_signal(number)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (0 if number == signal.SIGINT else 128 + number, "", "")
    assert list((tmp_path / "files").iterdir()) == []


def test_leftovers_of_a_killed_viewer_are_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with viewer(tmp_path, "--no-token") as (process, _):
        process.kill()
        process.wait()
        (left,) = tmp_path.glob("agentgym-view-*")
        with viewer(tmp_path, "--no-token"):
            assert left not in tmp_path.iterdir()


def test_a_run_that_starts_later_is_shown_while_it_writes(tmp_path: Path) -> None:
    with viewer(tmp_path, "--no-token") as (_, address), RolloutWriter(tmp_path / "mine") as writer:
        key = run_of((tmp_path / "mine").resolve()).key
        while key not in opened(f"{address}api/runs"):  # new runs are looked for every two seconds
            pass
        for number in range(5):
            writer.add([group(rollout(f"a{number}/0"))], step=number)
            writer.flush()
            assert json.loads(opened(f"{address}api/runs/{key}/rollouts"))["total"] == number + 1


def test_a_folder_without_runs_is_served_with_a_notice(tmp_path: Path) -> None:
    with viewer(tmp_path, "--no-token") as (process, address):
        assert json.loads(opened(f"{address}api/runs"))["runs"] == []
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert said == f"agentgym: no run in {tmp_path} yet; the page shows runs that start there\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["missing"], "runs: there is no folder missing; name the folder of a run"),
        ([], "runs: name the folder of a run, or one that has runs below it"),
        ([".", "--port", "-1"], "--port: expected a number from 0 to 65535, got -1"),
        ([".", "--port", "99999"], "--port: expected a number from 0 to 65535, got 99999"),
        ([".", "--host", "203.0.113.7"], "--host: 203.0.113.7 is not an address of this machine"),
        ([".", "--host", "no.such.host.invalid"], "--host: no.such.host.invalid is not an address of this machine"),
    ],
)
def test_errors_of_view_are_one_line(args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["view", *args]) == 1
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["view", ".", "--port", str(port)]) == 1
    assert f"--port: {port} is used" in capsys.readouterr().err


def test_without_its_packages_view_prints_one_line_with_what_to_install(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['starlette'] = None; from agentgym.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", hide, "view", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"agentgym: starlette is not installed: {install_line('view')}\n"


def test_a_long_read_never_blocks_the_writer(tmp_path: Path) -> None:
    """The longest possible read is open all the time; data written meanwhile is on disk, and none is lost."""
    make_run(tmp_path)
    with RolloutStore(tmp_path) as reader, reader.one_moment():
        before = len(reader)
        with RolloutWriter(tmp_path, done=9) as writer:
            for number in range(50):
                writer.add([group(rollout(f"more{number}/0"))], step=9)
                writer.flush()
                with RolloutStore(tmp_path) as other:
                    assert len(other) == before + number + 1
        assert writer.lost == 0
        assert len(reader) == before  # it still sees the state at which it started


def test_a_file_name_with_control_characters_is_escaped_in_the_log(tmp_path: Path) -> None:
    run = make_run(tmp_path / "\x1b[31mred\x1b[2J\u202e")
    with closing(sqlite3.connect(run / FILE)) as store, store:
        store.execute("UPDATE rollouts SET detail = x'00'")
    store.close()
    with viewer(tmp_path, "--no-token") as (process, address):
        key = json.loads(opened(f"{address}api/runs"))["runs"][0]["run"]
        while json.loads(opened(f"{address}api/runs/{key}/state"))["indexed"] is not None:
            pass
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert "\\x1b[31mred\\x1b[2J\\u202e: cannot be indexed for now" in said
    assert not set(said) & {"\x1b", "\u202e"}
