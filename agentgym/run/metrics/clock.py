"""Measures the time of each part of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from agentgym.machine.clock import standstills


class StepClock:
    """Measures the wall time of each part of a step. `metrics` returns the times and starts the next step."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._still = standstills().seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the wall time of the `with` block to the time of the named part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began

    def metrics(self, *, sampled_tokens: float, trained_tokens: float) -> dict[str, float]:
        """Return the seconds of each part and of the whole step since the last call, and tokens per second.

        Time during which the process was suspended is included. Sampled tokens per second are over the whole step, and
        trained tokens per second over its training part.
        """
        now = time.perf_counter()
        seconds, whole = self._seconds, now - self._began
        self._began, self._seconds = now, defaultdict(float)
        metrics = {f"time/{name}": value for name, value in sorted(seconds.items())} | {"time/step": whole}
        metrics["time/stood_still"] = standstills().seconds - self._still
        self._still += metrics["time/stood_still"]
        metrics["throughput/sampled_tokens_per_s"] = sampled_tokens / whole
        if seconds.get("train"):
            metrics["throughput/trained_tokens_per_s"] = trained_tokens / seconds["train"]
        return metrics
