"""The sandbox benchmark: its ratios, its turns, the pipe to another kit's program, and a complete quick run."""

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentgym.sandboxes.local.local import why_no_bubblewrap
from benchmarks.harness import at_least, at_most, report
from benchmarks.sandbox import measure
from benchmarks.sandbox.__main__ import other_kits, runnable
from benchmarks.sandbox.goals import LIMITS, NAMES, goals, ratios
from benchmarks.sandbox.measure import CALLS_PER_EPISODE, Rate, by_turns, cpu_s, rate
from benchmarks.sandbox.peer import Peer

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.benchmarks.processes_kit"


def test_a_kit_with_several_ways_is_compared_by_its_fastest_one() -> None:
    figures = {
        "ours_session_calls_per_s_8": 4000.0,
        "swerex_program_calls_per_s_8": 50.0,
        "swerex_session_calls_per_s_8": 100.0,
        "inspect_program_calls_per_s_8": 10.0,
    }
    found = ratios(figures)
    assert found["calls over SWE-ReX, 8 at once"] == (40, 10)
    assert found["calls over inspect_ai, 8 at once"] == (400, 10)


def test_episodes_are_only_compared_at_equal_concurrency() -> None:
    figures = {
        "ours_reset_episodes_per_s_1": 100.0,
        "docker_exec_new_episodes_per_s_1": 1.0,
        "ours_reset_episodes_per_s_8": 900.0,
    }
    found = ratios(figures)
    assert found["episodes over docker exec, 1 at once"] == (100, 50)
    assert found["episodes over docker exec, 8 at once"] == (None, 50)


def test_programs_are_compared_with_programs_and_sessions_with_sessions() -> None:
    figures = {
        "ours_session_calls_per_s_1": 4000.0,
        "ours_program_calls_per_s_1": 60.0,
        "swerex_session_calls_per_s_1": 100.0,
        "swerex_program_calls_per_s_1": 20.0,
    }
    found = ratios(figures)
    assert found["programs over SWE-ReX, 1 at once"] == (3, 1)
    assert found["sessions over SWE-ReX, 1 at once"] == (40, 10)


def test_new_containers_are_compared_with_our_new_containers() -> None:
    figures = {
        "ours_reset_episodes_per_s_1": 100.0,
        "ours_new_episodes_per_s_1": 2.0,
        "docker_exec_new_episodes_per_s_1": 1.0,
    }
    assert ratios(figures)["new containers over docker exec, 1 at once"] == (2, 1)


def test_every_goal_is_reported_and_unmeasured_ones_are_not_met() -> None:
    found = goals({})
    assert {goal["met"] for goal in found.values()} == {None}
    for kind, limits in LIMITS.items():
        assert {f"{kind}_{name}" for name in limits} < found.keys()
    for means in NAMES.values():
        for work in ("calls", "episodes", "programs", "new containers"):
            assert f"{work} over {means}, 8 at once" in found


@pytest.mark.parametrize(
    ("opened", "failures", "met"), [(500, 0, True), (16, 0, None), (499, 1, False), (15, 1, False)]
)
def test_fewer_sandboxes_than_the_goal_or_failures_do_not_meet_it(opened: int, failures: int, met: bool | None) -> None:
    figures = {"docker_sandboxes_at_once": float(opened), "docker_sandboxes_at_once_failures": float(failures)}
    assert goals(figures)["docker_sandboxes_at_once"] == {"value": opened, "goal": 500, "met": met}


def test_the_table_lists_what_was_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    report("b", figures={}, reference={}, goals={"a": at_most(None, 1), "b": at_least(1, 2)}, as_json=False)
    said = capsys.readouterr().out
    assert "goal 1: NOT MEASURED" in said
    assert "goal 2: MISSED" in said


def test_a_skipped_kind_is_in_the_report_with_its_reason() -> None:
    ran, left_out = runnable([], None)
    assert ran == {}
    assert left_out == dict.fromkeys(("docker", "bubblewrap"), "left out: not requested")


async def test_sides_take_turns_and_each_rate_uses_its_own_time() -> None:
    order: list[str] = []

    async def quick(seconds: float) -> Rate:
        order.append("quick")
        return Rate(100.0, int(100 * seconds))

    async def slow(seconds: float) -> Rate:
        order.append("slow")
        return Rate(2.0, 4)  # it ran for longer than it was given

    found = await by_turns({"quick": quick, "slow": slow}, 8.0, 4)
    assert found == {"quick": pytest.approx(100), "slow": pytest.approx(2)}
    assert order == ["quick", "slow"] * 4


async def test_a_rate_counts_concurrent_actions(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 0.25)  # a quarter of a second passes between two looks
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    going, most = 0, 0

    async def action() -> None:
        nonlocal going, most
        going += 1
        most = max(most, going)
        await asyncio.sleep(0)
        going -= 1

    assert (await rate([action, action], 0.0)).times == 0
    assert most == 0
    assert await rate([action, action], 1.0) == Rate(2.0, 3)
    assert most == 2


def is_there(pid: int) -> bool:
    return Path("/proc", str(pid)).exists()


@pytest.fixture
def peer() -> Iterator[Peer]:
    """Return a kit whose sandboxes are processes on this machine."""
    made = Peer("processes", sys.executable, PROGRAM, "-")
    yield made
    made.close()


async def test_another_kits_program_does_what_it_is_told_and_reports_its_duration(peer: Peer) -> None:
    assert peer.hello == {"version": "1", "ways": ["pipe"], "note": "a note", "why_not": None}
    found = await peer.ask("latency", way="pipe", times=20)
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    assert found["cpu_ms_per_call_1"] > 1  # each call keeps its sandbox busy for some 2 ms
    await peer.side("calls", "pipe", 2)(0.0)  # It warms two sandboxes.
    made = [await peer.ask("counts")]
    calls = await peer.side("calls", "pipe", 2)(0.1)
    made.append(await peer.ask("counts"))
    episodes = await peer.side("episodes", "pipe", 2)(0.1)
    made.append(await peer.ask("counts"))
    (before, _), (between, warm), (after, new) = made
    assert between - before == calls.times >= 1
    assert (after - between, new - warm) == (CALLS_PER_EPISODE * episodes.times, episodes.times)
    assert episodes.times >= 1
    assert CALLS_PER_EPISODE == 8
    started = await peer.ask("new_sandboxes", times=3)
    assert started == sorted(started)
    assert len(started) == 3


async def test_closing_another_kits_program_leaves_no_sandbox(peer: Peer) -> None:
    await peer.ask("calls", way="pipe", count=3, seconds=0.0)
    sandboxes = await peer.ask("pids")
    assert len(sandboxes) == 3
    assert all(map(is_there, sandboxes))
    peer.close()
    assert not any(map(is_there, sandboxes))


async def test_a_program_that_exits_raises_and_is_not_counted(peer: Peer) -> None:
    with pytest.raises(RuntimeError, match="processes: its program ended with exit code 1"):
        await peer.ask("calls", way="no such way", count=1, seconds=1.0)


def test_a_kit_that_cannot_run_here_is_skipped_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    made = Peer("processes", sys.executable, PROGRAM, "missing")
    made.close()
    assert made.hello["why_not"] == "the image missing is not here"
    assert "RuntimeError" in capfd.readouterr().err


def test_a_kit_without_an_environment_is_skipped_and_reported() -> None:
    with other_kits({"swerex": None, "inspect": None}, "image") as (peers, notes):
        assert peers == {}
        assert notes == {
            "SWE-ReX": "left out: no environment was given",
            "inspect_ai": "left out: no environment was given",
        }


def test_cpu_time_of_an_ended_process_is_none() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert cpu_s([gone.pid]) == 0


@pytest.mark.slow
def test_a_quick_run_reports_every_value_that_has_a_goal() -> None:
    why_not = why_no_bubblewrap()
    if why_not is not None:
        pytest.skip(why_not)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.sandbox",
            "--quick",
            "--json",
            "--kinds",
            "bubblewrap",
            "--sandboxes",
            "10",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["bench"] == "sandbox"
    for name, limit in LIMITS["bubblewrap"].items():
        assert said["goals"][f"bubblewrap_{name}"]["goal"] == limit
        assert said["goals"][f"bubblewrap_{name}"]["value"] == said["figures"][f"bubblewrap_{name}"]
    assert said["figures"]["bubblewrap_fork_0mb_p50_ms"] > 0
    assert said["goals"]["bubblewrap_sandboxes_at_once"] == {"value": 10, "goal": 500, "met": None}
    assert said["goals"]["docker_call_p50_ms"]["met"] is None
