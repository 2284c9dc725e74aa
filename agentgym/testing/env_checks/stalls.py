"""Search for an env's code that blocks the event loop, and with it every other rollout."""

import asyncio
import inspect
import linecache
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

from agentgym.environments.env import Env
from agentgym.environments.rewards import rewards_of
from agentgym.testing.env_checks.findings import Finding
from agentgym.tools.tool import class_tools

LOOKS = 4
"""Number of samples, taken while the event loop is blocked, in which a method must run to be reported."""


@dataclass(slots=True)
class Stall:
    """A period in which the event loop was blocked: the method that ran, its line, and the seconds."""

    method: str
    line: str
    seconds: float
    looks: int = 1


class StallWatch:
    """Watches the event loop from a thread; `findings()` names the methods that blocked it for `limit_s` seconds."""

    def __init__(self, cls: type[Env[Any]], limit_s: float) -> None:
        self.limit_s = limit_s
        self.methods = _methods(cls)
        self.stalls: list[Stall] = []
        self._current: Stall | None = None
        self._ended = threading.Event()
        self._turned = time.monotonic()

    def __enter__(self) -> Self:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        self._turn()
        self._thread = threading.Thread(target=self._watch, name="agentgym-stalls", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._ended.set()
        self._thread.join()

    def findings(self) -> list[Finding]:
        """Return one finding for each method that blocked the event loop."""
        longest: dict[str, Stall] = {}
        for stall in sorted(self.stalls, key=lambda stall: stall.seconds):
            if stall.seconds >= self.limit_s and stall.looks >= LOOKS:
                longest[stall.method] = stall
        return [
            Finding(
                "blocks",
                f"{stall.method} blocked the event loop for {stall.seconds:.1f} s at {stall.line}",
                "every other rollout waits meanwhile; await an async version of this call, wrap it in "
                "`await asyncio.to_thread(...)`, or make it a plain `def` tool, which runs in a thread",
            )
            for stall in longest.values()
        ]

    def _turn(self) -> None:
        self._turned = time.monotonic()
        self._current = None
        self._timer = self._loop.call_later(self.limit_s / 10, self._turn)

    def _watch(self) -> None:
        while not self._ended.wait(self.limit_s / 10):
            seconds = time.monotonic() - self._turned
            if seconds > self.limit_s / 5:
                self._look(seconds)

    def _look(self, seconds: float) -> None:
        found = self._running(sys._current_frames().get(self._loop_thread))
        current = self._current
        if found is None:
            return
        method, line = found
        if current is not None and current.method == method:
            current.seconds, current.looks = seconds, current.looks + 1
            return
        self._current = Stall(method, line, seconds)
        self.stalls.append(self._current)

    def _running(self, frame: FrameType | None) -> tuple[str, str] | None:
        """Return the env's method that the event loop runs (a tool or reward rather than a helper), and its line."""
        found: tuple[str, str] | None = None
        while frame is not None:
            name = self.methods.get(frame.f_code)
            if name is not None and (found is None or name.startswith(("tool ", "reward "))):
                found = (name, found[1] if found else _line(frame))
            frame = frame.f_back
        return found


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    return f"{Path(path).name}:{frame.f_lineno} `{linecache.getline(path, frame.f_lineno).strip()}`"


def _methods(cls: type[Env[Any]]) -> dict[CodeType, str]:
    """Return the code of every method that isn't the library's own, with the name that a finding uses for it."""
    owner: type = cls
    names = {made.attribute: f"tool {name!r}" for name, made in class_tools(owner).items()}
    names |= {name: f"reward {name!r}" for name in rewards_of(owner)}
    found: dict[CodeType, str] = {}
    for base in cls.__mro__:
        if base.__module__ not in ("agentgym.environments.env", "builtins", "typing"):
            for name, value in vars(base).items():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if inspect.isfunction(function):
                    found[inspect.unwrap(function).__code__] = names.get(name, f"{cls.__name__}.{name}")
                    found[function.__code__] = found[inspect.unwrap(function).__code__]
    return found
