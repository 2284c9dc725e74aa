"""A clock for event loops that pauses while the process is stopped, and a watchdog for code that blocks a loop.

A process stands still if it is stopped (SIGSTOP, `scontrol suspend`), or if its container or machine is paused. A
thread that wakes up four times a second detects this: it knows how long it slept, waited for a processor and waited
for the interpreter's lock (the GIL), and counts the rest of the elapsed time as a standstill. So neither a loaded
machine nor code that holds the lock is mistaken for a standstill.
"""

import asyncio
import logging
import os
import resource
import sys
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakSet, ref

from agentgym.errors.tracebacks import holder_of, place_of_frame

log = logging.getLogger(__name__)

NAP_S = 0.25
"""Seconds that the clock's thread sleeps before each beat. At a beat, it records the time and the standstills so
far.
"""
LEAST_S = 1.0
"""Minimum seconds of a standstill. A shorter gap counts toward the time limits."""
HELD_S = 2.0
"""Seconds that code must block an event loop before a warning names it. The warning is repeated each time the seconds
have doubled.
"""
PATIENCE_S = 2.0
"""Maximum seconds that a loop waits for a late beat, which tells whether the process stood still."""
THREAD = "agentgym-clock"
"""Name of the clock's thread, and of the thread that logs its warnings."""
WAKE_S = 0.0005
"""Maximum seconds, beyond the switch interval, that a thread takes to wake up and check the lock. Timer slack or a
sleeping core can delay it.
"""
_OWN_USAGE: int | None = getattr(resource, "RUSAGE_THREAD", None)
"""The `getrusage` argument for a single thread; None outside of Linux, where standstills count like any other time."""


class Standstills(NamedTuple):
    """The standstills of this process so far."""

    times: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Reading:
    """The machine's clocks, in seconds, and the scheduler's counters for the current thread."""

    monotonic: float
    with_suspension: float
    """The time of `monotonic` plus the time for which the machine was suspended."""
    waited: float
    """Time that the thread was ready to run but had no processor."""
    switches: int
    """Number of times the thread has waited for anything (voluntary context switches)."""
    interval: float = 0.005
    """Seconds between two attempts of a waiting thread to get the interpreter's lock (`sys.setswitchinterval`)."""

    @classmethod
    def now(cls) -> "Reading":
        """Read the clocks, and retry if the reads took too long, because they must describe a single moment."""
        assert _OWN_USAGE is not None
        while True:
            read = cls(
                time.monotonic(),
                time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)),
                _waited_for_a_processor(),
                resource.getrusage(_OWN_USAGE).ru_nvcsw,
                sys.getswitchinterval(),
            )
            if time.monotonic() - read.monotonic < NAP_S:
                return read

    def still_since(self, before: "Reading", slept: float) -> tuple[float, float]:
        """Return the seconds of standstill since `before` on the monotonic clock, and the seconds of suspension.

        A thread that waits for the interpreter's lock wakes up once per switch interval. Each wake-up takes a moment.
        At short intervals, these moments add up to most of the wait. Each wake-up is counted at its maximum, so that
        a held lock is never mistaken for a standstill.

        Args:
            before: The earlier reading.
            slept: Seconds that the thread slept on purpose in between.
        """
        passed = self.monotonic - before.monotonic
        each = max(self.interval, before.interval) + WAKE_S
        waited = (self.waited - before.waited) + (self.switches - before.switches) * each
        return passed - slept - waited, (self.with_suspension - before.with_suspension) - passed


def _waited_for_a_processor() -> float:
    """Return the seconds that this thread has waited for a processor, or 0.0 if the kernel doesn't report them."""
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0.0
    try:
        return int(os.read(file, 100).split()[1]) / 1e9
    finally:
        os.close(file)


class _Beat(NamedTuple):
    at: float
    """Time of the beat, on the monotonic clock."""
    still: float
    """Total seconds of all standstills up to this beat."""


@dataclass(slots=True)
class Held:
    """The function that blocks a loop (`holder`), and since when. `holder` is "" if no function blocks the loop."""

    holder: str = ""
    since: float = 0.0
    said: float = 0.0
    """Seconds that the function had blocked the loop at the last warning."""


class LoopClock:
    """Replaces the `time` method of one event loop, and excludes standstills."""

    def __init__(self, loop: asyncio.AbstractEventLoop, heart: "Heart") -> None:
        self._loop, self.thread = ref(loop), threading.get_ident()
        self._heart, self._base = heart, heart.beat.still
        self.turned = time.monotonic()
        """When the loop last read the time, which it does in each iteration."""
        self.held = Held()

    def __call__(self) -> float:
        """Return the time. If a beat is late, first wait for it, because it tells whether the process stood still."""
        heart = self._heart
        while True:
            beat = heart.beat  # Read before the time: a standstill between the two makes the beat late.
            now = time.monotonic()
            if now - beat.at < NAP_S + LEAST_S or not heart.comes_after(beat):
                self.turned = now
                return now - beat.still + self._base

    @property
    def is_open(self) -> bool:
        """Whether the loop may still run."""
        loop = self._loop()
        return loop is not None and not loop.is_closed()

    @property
    def is_running(self) -> bool:
        """Whether the loop is running."""
        loop = self._loop()
        return loop is not None and loop.is_running()


class Heart:
    """The thread that detects standstills, and the clocks that follow it."""

    def __init__(self) -> None:
        self.clocks: WeakSet[LoopClock] = WeakSet()
        self.beat = _Beat(time.monotonic(), 0.0)
        self.standstills = Standstills(0, 0.0)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._missed: _Beat | None = None
        """The last beat after which the next one didn't come in time. No loop waits for that next beat again."""

    def keep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the loop a clock, and start the thread if needed. Do nothing if no thread can be started."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                begun = threading.Event()
                thread = threading.Thread(target=self._run, args=(begun,), name=THREAD, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return
                self._thread = thread
                begun.wait()
            clock = LoopClock(loop, self)
            loop.time = clock  # type: ignore[method-assign]
            self.clocks.add(clock)

    def comes_after(self, beat: _Beat) -> bool:
        """Wait up to `PATIENCE_S` seconds for the beat after this one, and return whether it came."""
        until = time.monotonic() + PATIENCE_S
        while self.beat is beat and beat is not self._missed and self._is_alive() and time.monotonic() < until:
            time.sleep(0.001)
        if self.beat is beat:
            self._missed = beat
        return self.beat is not beat

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, begun: threading.Event) -> None:
        before = Reading.now()
        self.beat = self.beat._replace(at=before.monotonic)
        begun.set()
        while self._has_work():
            time.sleep(NAP_S)
            now = Reading.now()
            said = self.note(*now.still_since(before, NAP_S), now.monotonic)
            for clock in list(self.clocks):
                if clock.is_running:
                    said |= _look_at(clock, now.monotonic)
            before = Reading.now() if said else now  # Time spent on logging isn't a standstill.

    def _has_work(self) -> bool:
        """Return whether any loop is open. If none is, the thread ends, and the next loop starts another thread."""
        with self._lock:
            if any(clock.is_open for clock in list(self.clocks)):
                return True
            self._thread = None
            return False

    def note(self, still: float, suspended: float, at: float) -> bool:
        """Record the time since the last beat, and return whether it was a standstill.

        A suspension is only counted, because the loops' clocks exclude it anyway.

        Args:
            still: Seconds of standstill since the last beat.
            suspended: Seconds of suspension since the last beat.
            at: Time of this beat, on the monotonic clock.
        """
        off = still if still >= LEAST_S else 0.0
        seconds = off + (suspended if suspended >= LEAST_S else 0.0)
        if seconds:  # Order: log, count, then subtract. Code that sees a later effect also sees the earlier ones.
            _aside.warn(
                "the process stood still for %.1f s: it was stopped, or its container or machine was paused; time "
                "limits of this process don't count that time, but limits inside a sandbox do if the sandbox was "
                "stopped, too",
                seconds,
            )
            self.standstills = Standstills(self.standstills.times + 1, self.standstills.seconds + seconds)
        self.beat = _Beat(at, self.beat.still + off)
        return bool(seconds)


class _Aside:
    """Logs in a separate thread, so that a slow handler doesn't delay the beats. The thread ends when all is logged."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._speaks = False

    def warn(self, text: str, *values: object) -> None:
        """Queue the warning after those already waiting, without waiting for it to be logged."""
        with self._lock:
            self._waiting.append((text, *values))
            if self._speaks:
                return
            self._speaks = True
        thread = threading.Thread(target=self._say_all, name=THREAD)  # Not a daemon: its lines must survive the exit.
        try:
            thread.start()
        except RuntimeError:  # No more threads can be started.
            self._say_all()

    def _say_all(self) -> None:
        while (line := self._next()) is not None:
            try:
                log.warning(*line)
            except Exception:  # A handler may raise anything; the remaining lines are still logged.
                traceback.print_exc()

    def _next(self) -> tuple[Any, ...] | None:
        """Return the next line, or None if there is none, in which case this thread ends."""
        with self._lock:
            self._speaks = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None


_heart = Heart()
_aside = _Aside()


def keep_time(loop: asyncio.AbstractEventLoop) -> None:
    """Make the loop's clock pause while the process stands still. Call this function in the loop's thread.

    All timers and time limits of the loop follow this clock. A loop that has its own clock, such as uvloop's, keeps
    that clock.
    """
    if type(loop.time) is not LoopClock and type(loop).time is asyncio.BaseEventLoop.time and _OWN_USAGE is not None:
        _heart.keep(loop)


def standstills() -> Standstills:
    """Return how often this process has stood still so far, and for how many seconds."""
    return _heart.standstills


def _look_at(clock: LoopClock, now: float) -> bool:
    """Log the name of the code that blocks a loop if several checks in a row find the same function.

    Returns:
        Whether a warning was logged.
    """
    frames = _running_in_loop(sys._current_frames().get(clock.thread)) if now - clock.turned > NAP_S else None
    if not frames:
        clock.held = Held()
        return False
    holder = holder_of(frames)
    if holder != clock.held.holder:
        clock.held = Held(holder, now)
        return False
    seconds = now - clock.held.since
    if seconds < max(HELD_S, 2 * clock.held.said):
        return False
    clock.held.said = seconds
    _aside.warn(
        "%s has blocked the event loop for %.1f s, at %s: meanwhile no other rollout can continue, and no time limit "
        "can stop it; await something in it, or make it a plain `def`, which runs in a separate thread",
        holder,
        seconds,
        place_of_frame(frames[0]),
    )
    return True


def _running_in_loop(frame: FrameType | None) -> list[FrameType]:
    """Return the frames that the loop's current iteration has called, innermost first.

    Returns:
        The frames, or an empty list if no code blocks the loop: it has ended, waits for events, or waits in this file
        for a late beat of the clock.
    """
    found: list[FrameType] = []
    while frame is not None:
        if frame.f_code is _RUN_ONCE:
            waits = found and (found[-1].f_code.co_name == "select" or any(_is_ours(of) for of in found))
            return [] if waits else found
        found.append(frame)
        frame = frame.f_back
    return []


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename == __file__


_RUN_ONCE: Any = asyncio.BaseEventLoop._run_once.__code__  # type: ignore[attr-defined]


def _forget() -> None:
    """Start over in a forked process, which doesn't have these threads."""
    _heart.__init__()  # type: ignore[misc]
    _aside.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)
