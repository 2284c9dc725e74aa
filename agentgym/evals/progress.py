"""Progress of an evaluation on stderr: rollouts that have ended, their mean reward, and the remaining time."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentgym.types.rollout import Rollout

LINES = 10
"""Maximum number of lines per evaluation if stderr isn't a terminal."""


@contextmanager
def progress_bar(total: int, done: int, *, shown: bool) -> Iterator[Callable[[Rollout], None]]:
    """Show a progress bar on stderr until the `with` ends.

    If stderr isn't a terminal, a few plain lines are printed instead.

    Args:
        total: Number of rollouts of the evaluation.
        done: Number of rollouts that already existed; they don't count for the estimate of the remaining time.
        shown: Whether to show anything.

    Yields:
        A callback that takes each finished rollout.
    """
    if not shown:
        yield lambda rollout: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    left = [TextColumn("left"), TimeRemainingColumn()]
    played, console = _Played(), Console(file=sys.stderr)
    if not console.is_terminal:
        yield _lines(played, total, done)
        return
    with Progress(*columns, *left, console=console, transient=True) as bar:
        task = bar.add_task("playing", total=total, completed=done)

        def ended(rollout: Rollout) -> None:
            played.add(rollout)
            bar.update(task, advance=1, description=str(played))

        yield ended


class _Played:
    """Counts rollouts and their rewards. Its string form describes both."""

    def __init__(self) -> None:
        self.ended = self.failed = 0
        self.rewards = 0.0

    def add(self, rollout: Rollout) -> None:
        self.ended += 1
        self.failed += rollout.reward is None
        self.rewards += rollout.reward or 0.0

    def __str__(self) -> str:
        scored = self.ended - self.failed
        mean = f"reward {self.rewards / scored:.3f}" if scored else "no reward yet"
        return f"{mean}, {self.failed} failed" if self.failed else mean


def _lines(played: _Played, total: int, done: int) -> Callable[[Rollout], None]:
    """Return a callback that prints a line for each tenth of the rollouts, with their rate and the remaining time."""
    began, every = time.monotonic(), max(math.ceil((total - done) / LINES), 1)

    def ended(rollout: Rollout) -> None:
        played.add(rollout)
        if played.ended % every and done + played.ended < total:
            return
        took = time.monotonic() - began
        rate = played.ended / took if took else math.inf
        left = (total - done - played.ended) / rate
        said = f"{took:.0f} s, {rate:.1f} rollouts/s, about {left:.0f} s left"
        sys.stderr.write(f"finished {done + played.ended} of {total}  {played}  {said}\n")
        sys.stderr.flush()

    return ended
