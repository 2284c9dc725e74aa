"""A process that was suspended loses no time from its limits; one that was busy, starved or blocked does."""

import asyncio
import ctypes
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.machine import clock
from agentgym.machine.clock import LEAST_S, NAP_S, THREAD, Heart, LoopClock, Reading, keep_time, standstills
from agentgym.machine.time_limits import TimeLimit
from agentgym.scheduling import run_groups

TASK = ag.Task(id="t", prompt="Go.")
LIMIT_S = 4.0
CHILD = f"""
import asyncio, sys, time
from agentgym.machine.clock import standstills
from agentgym.machine.time_limits import TimeLimit

async def main():
    loop, limit, began = asyncio.get_running_loop(), TimeLimit({LIMIT_S}), time.monotonic()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async def heard():
        print("playing", flush=True)
        return await reader.readline()
    try:
        async with asyncio.timeout(None) as other:
            other.reschedule(loop.time() + {LIMIT_S})
            print((await limit.bound(heard())).decode().strip(), standstills().times, time.monotonic() - began)
    except TimeoutError:
        print("out of time", standstills().times, time.monotonic() - began)

asyncio.run(main())
"""


def reading(
    at: float, *, suspended: float = 0.0, waited: float = 0.0, switches: int = 0, interval: float = 0.005
) -> Reading:
    return Reading(at, at + suspended, waited, switches, interval)


def test_a_stopped_process_resumes_with_its_remaining_time_and_logs_it_once() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "playing\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(LIMIT_S + 1)
    child.send_signal(signal.SIGCONT)
    said, errors = child.communicate("heard\n")
    word, times, seconds = said.split()
    assert (word, times) == ("heard", "1"), errors
    assert float(seconds) > LIMIT_S
    assert errors.count("the process stood still for ") == 1
    assert "time limits of this process don't count that time, but limits inside a sandbox do" in errors


async def test_code_that_holds_the_interpreter_without_using_cpu_spends_its_time_limit() -> None:
    before, hold = standstills(), ctypes.PyDLL(None).usleep

    async def held() -> None:
        await asyncio.sleep(0)
        hold(int((LEAST_S + 2 * NAP_S) * 1e6))
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await TimeLimit(0.5).bound(held())
    assert standstills() == before


def test_sleeping_and_waiting_for_cpu_or_lock_is_not_a_standstill() -> None:
    interval, start = 0.005, reading(100.0)
    assert reading(100.25).still_since(start, NAP_S) == pytest.approx((0, 0))
    assert reading(106.25).still_since(start, NAP_S)[0] == pytest.approx(6)
    assert reading(106.25, waited=5.5).still_since(start, NAP_S)[0] < LEAST_S
    assert reading(106.25, switches=round(5.5 / interval)).still_since(start, NAP_S)[0] < LEAST_S
    assert reading(100.25, suspended=3600.0).still_since(start, NAP_S) == pytest.approx((0, 3600))


def test_waiting_for_the_lock_is_not_a_standstill_at_any_switch_interval() -> None:
    short, look_s = 1e-4, 1.3e-4
    start, in_short = reading(100.0), reading(100.0, interval=short)
    looked = round(10 / look_s)
    assert reading(110.25, switches=looked, interval=short).still_since(in_short, NAP_S)[0] < LEAST_S
    assert reading(110.25, switches=round(10 / start.interval), interval=short).still_since(start, NAP_S)[0] < LEAST_S
    assert reading(110.25, switches=2, interval=short).still_since(in_short, NAP_S)[0] == pytest.approx(10, abs=0.1)
    assert Reading.now().interval == sys.getswitchinterval()


def test_a_suspension_is_counted_but_not_subtracted_since_clocks_stopped_too() -> None:
    heart = Heart()
    heart.note(0.01, 3600.0, at=heart.beat.at + 1)
    assert (heart.beat.still, heart.standstills) == (0.0, (1, 3600.0))
    heart.note(LEAST_S / 2, 0.0, at=heart.beat.at + 1)
    assert heart.standstills.times == 1
    heart.note(3.0, 0.0, at=heart.beat.at + 1)
    assert (heart.beat.still, heart.standstills) == (3.0, (2, 3603.0))


async def test_a_loops_clock_never_goes_back_when_standstills_are_subtracted() -> None:
    heart, loop = Heart(), asyncio.get_running_loop()
    keep_time(loop)
    assert loop.time() <= loop.time()
    heart.beat = heart.beat._replace(at=time.monotonic())
    of_loop = LoopClock(loop, heart)
    first = of_loop()
    heart.note(0.0, 0.0, at=time.monotonic())
    assert first <= of_loop() <= first + 60


async def test_a_loop_with_a_custom_clock_keeps_it() -> None:
    class Virtual(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return 7.0

    loop = Virtual()
    keep_time(loop)
    assert loop.time() == 7.0
    loop.close()


class Holding(ag.ToolEnv[ag.Task]):
    """Spins in one of its methods until the log reports it."""

    context = ag.Compact(turns=1, keep=lambda first, since, summary: [*first, *spin("keep")])

    async def setup(self) -> None:
        spin("setup")

    @ag.tool
    async def busy(self) -> str:
        """Never await anything."""
        spin("busy")
        return "done"

    @ag.reward
    async def right(self) -> float:
        spin("right")
        return 1.0


where: list[str] = []
named = threading.Event()


def spin(method: str) -> list[ag.Message]:
    while method in where and not named.is_set():
        time.sleep(0.01)
    return []


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if "in spin" in self.lines[-1]:  # A loaded machine may also block the loop in other code for that long.
            named.set()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the clock's log lines; the clock checks often and reports soon."""
    monkeypatch.setattr(clock, "NAP_S", 0.02)
    monkeypatch.setattr(clock, "HELD_S", 0.1)
    handler = Said()
    clock.log.addHandler(handler)
    named.clear()
    yield handler.lines
    clock.log.removeHandler(handler)
    where.clear()


@pytest.mark.parametrize(
    ("method", "holder"),
    [
        ("setup", "Holding.setup"),
        ("busy", "Holding.busy"),
        ("right", "Holding.right"),
        ("keep", "Holding.<lambda>"),
        ("told", "told"),
    ],
)
async def test_env_code_that_blocks_the_loop_is_named_with_file_and_line(
    method: str, holder: str, said: list[str]
) -> None:
    def told(rollout: ag.Rollout) -> None:
        spin("told")

    where.append(method)
    await run_groups(Holding, [TASK], Scripted([call("busy"), say("sum"), say("done")]), n=1, on_rollout=told)
    line = next(line for line in said if "in spin" in line)
    assert line.startswith(f"{holder} has blocked the event loop for ")
    assert f"at {Path(__file__).name}:" in line


async def test_a_waiting_loop_is_not_reported_as_blocked(said: list[str]) -> None:
    keep_time(asyncio.get_running_loop())
    await asyncio.sleep(0.5)
    assert not [line for line in said if "in select" in line]  # Other code may be blocked by a loaded machine.


class Stuck(logging.Handler):
    """A log handler that hangs in its first line until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.let_go, self.ended = threading.Event(), threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.let_go.wait(20)
        self.ended.set()


async def test_heartbeats_continue_while_a_log_handler_hangs_without_a_standstill(said: list[str]) -> None:
    keep_time(asyncio.get_running_loop())
    before, stuck, heart = standstills(), Stuck(), clock._heart
    clock.log.addHandler(stuck)
    try:
        stuck.entered.wait()  # Blocks the loop, which is reported.
        beats = {heart.beat}
        while len(beats) < 5:
            await asyncio.sleep(0.01)
            beats.add(heart.beat)
        assert not stuck.ended.is_set()
    finally:
        stuck.let_go.set()
        stuck.ended.wait()
        clock.log.removeHandler(stuck)
    assert standstills() == before
    assert "has blocked the event loop for " in said[0]


def test_a_line_is_logged_even_if_a_handler_failed_on_the_one_before(said: list[str]) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "first" in record.getMessage():
                raise OSError("no space left")
            done.set()

    done, failing = threading.Event(), Failing()
    clock.log.addHandler(failing)
    try:
        clock._aside.warn("the first line")
        clock._aside.warn("line %d", 2)
        done.wait()
    finally:
        clock.log.removeHandler(failing)
    assert said == ["the first line", "line 2"]


def test_the_clocks_thread_ends_with_the_last_loop() -> None:
    script = (
        "import asyncio, threading\nfrom agentgym.machine.time_limits import TimeLimit\n"
        "async def main():\n    await TimeLimit(5).bound(asyncio.sleep(0.01))\n"
        f"    return next(t for t in threading.enumerate() if t.name == {THREAD!r})\n"
        "first = asyncio.run(main())\nfirst.join()\nassert asyncio.run(main()) is not first\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
