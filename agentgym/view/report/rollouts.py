"""The rollouts that a report quotes: the best, the worst, and one for each kind of failure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentgym.store.reader import RolloutStore, StoredRollout
from agentgym.view.report.folders import KeptRun
from agentgym.view.report.lines import Line

PHASES = ("eval_after", "eval", "train")
"""Phases to quote rollouts from. The first one that a run has is used."""
MOST = 10
"""Largest number of failures of a line that are listed separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quoted:
    """One rollout as text. Its title says where it is stored or, for a failed one, how often its error occurred."""

    title: str
    text: str


def quoted(line: Line, order: Literal["best", "worst"], count: int) -> list[Quoted]:
    """Return the line's rollouts with the highest or lowest rewards over all its runs."""
    found = [(run, stored) for run in line.runs if run.has_rollouts for stored in _ends(run, order, count)]
    sign = -1.0 if order == "best" else 1.0
    found.sort(key=lambda pair: sign * (pair[1].rollout.reward or 0.0))
    return [_quoted(line, run.folder, stored) for run, stored in found[:count]]


def _ends(run: KeptRun, order: Literal["best", "worst"], count: int) -> list[StoredRollout]:
    with RolloutStore(run.folder) as store:
        phases = store.phases()
        phase = next((name for name in PHASES if name in phases), None)
        return list(store.find(order=order, phase=phase, limit=count))


def _quoted(line: Line, folder: Path, stored: StoredRollout) -> Quoted:
    reward = stored.rollout.reward
    place = f"{stored.phase}, step {stored.step}, number {stored.number} of {folder}"
    return Quoted(title=f"{line.mark}, reward {reward:g}: {place}", text=str(stored.rollout))


def failures(line: Line) -> list[Quoted]:
    """Return one failed rollout per distinct first line of the error messages, the most frequent first."""
    counts: Counter[str] = Counter()
    firsts: dict[str, tuple[KeptRun, int]] = {}
    for run in line.runs:
        if not run.has_rollouts:
            continue
        with RolloutStore(run.folder) as store:
            for one in store.summaries(order="written", failed=True):
                message = (one.failure or "").partition("\n")[0]
                counts[message] += 1
                firsts.setdefault(message, (run, one.number))
    return [
        Quoted(title=f"{line.mark}, {times} times: {message}", text=_text(*firsts[message]))
        for message, times in counts.most_common(MOST)
    ]


def failed_in(lines: Sequence[Line]) -> int:
    """Return how many rollouts of all runs failed."""
    total = 0
    for run in (run for line in lines for run in line.runs if run.has_rollouts):
        with RolloutStore(run.folder) as store:
            total += store.count(failed=True)
    return total


def _text(run: KeptRun, number: int) -> str:
    with RolloutStore(run.folder) as store:
        found = list(store.find(ids=[str(number)], limit=1))
    return str(found[0].rollout) if found else "the run has removed this rollout since"
