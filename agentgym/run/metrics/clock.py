"""Timing of the parts of a step."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from agentgym.machine.clock import standstills


class StepClock:
    """Measures the wall time of a step by its parts. `metrics` returns the times and starts the next step."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)
        self._still = standstills().seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a part's."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - began

    def metrics(self, *, sampled_tokens: float, trained_tokens: float) -> dict[str, float]:
        """Return the seconds of each part and of the whole step since the last call, and tokens per second.

        The seconds in which the process stood still are included in those of the parts and of the step. The rate of
        sampled tokens is over the whole step, that of trained tokens over its training part.
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
