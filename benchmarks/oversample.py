"""The time and waste of cutting batches: the real scheduler in virtual time next to a simulation of its policy.

`python -m benchmarks.oversample [--json] [--workloads FILE.py] [--seed N]`

`tail_*` is a long-tailed workload: 256 rollouts per batch, each a separate group or in groups of 8. `h7_*` is 16 groups
of 8 with 5 % of the rollouts stuck for a second. `*_s` are virtual seconds per batch. `*_speedup` is the time of
waiting for all rollouts divided by these seconds, and `*_of_simulated` is the simulation's time divided by them.
Without a suffix every rollout runs at once; with `_128`, at most 128 do. Wasted tokens are those of finished turns. The
logged length bias knows cut rollouts only up to their cut.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

import agentgym as ag
from agentgym.engines.scripted import Scripted
from agentgym.scheduling.accounting import BatchStats
from agentgym.scheduling.oversampling import DEADLINE_FACTOR, DEADLINE_SHARE, OversampleConfig, share_of
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.types import Group
from agentgym.types.completion import Completion, Version
from agentgym.types.messages import Message
from agentgym.types.task import StepResult, Task
from benchmarks.harness import Goal, arguments, at_least, at_most, load_workloads, report
from tests.support.virtual_time import run_in_virtual_time

NEEDED, BATCHES, GROUP = 256, 12, 8
ENDLESS = 1 << 30
"""A bound on age that never makes anything wait, to measure the pure policy."""
PLACES = {"": ENDLESS, "_128": 128}
TOKENS_PER_S = 10
Rows: TypeAlias = Sequence[Sequence[float]]
"""Seconds of each turn of each rollout, in the order in which rollouts are started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The settings with which batches are run and cut."""

    groups: int
    """Groups wanted in a batch."""
    size: int = 1
    settings: OversampleConfig = field(default_factory=OversampleConfig)


ALONE = Policy(groups=NEEDED)
TOGETHER = Policy(groups=NEEDED // GROUP, size=GROUP)
TAIL: dict[str, Policy] = {
    "wait_for_all": ALONE,
    "cut_at_80": replace(ALONE, settings=OversampleConfig(stop="target", extra_groups=64)),
    "deadline": replace(ALONE, groups=NEEDED + 64, settings=OversampleConfig(stop="deadline")),
    "resume": replace(ALONE, settings=OversampleConfig(stop="target", extra_groups=64, carry=ENDLESS)),
    "groups_wait_for_all": TOGETHER,
    "groups_8_of_10": replace(TOGETHER, settings=OversampleConfig(stop="target", extra_rollouts=2)),
    "groups_32_of_40": replace(TOGETHER, settings=OversampleConfig(stop="target", extra_groups=8)),
    "groups_32_of_64": replace(TOGETHER, settings=OversampleConfig(stop="target", extra_groups=32)),
    "groups_resume_40": replace(TOGETHER, settings=OversampleConfig(stop="target", extra_groups=8, carry=ENDLESS)),
    "groups_resume_64": replace(TOGETHER, settings=OversampleConfig(stop="target", extra_groups=32, carry=ENDLESS)),
    "groups_resume_96": replace(TOGETHER, settings=OversampleConfig(stop="target", extra_groups=64, carry=ENDLESS)),
}
STUCK = Policy(groups=16, size=GROUP)
H7: dict[str, Policy] = {
    "wait_for_all": STUCK,
    "cut_at_80": Policy(groups=102, settings=OversampleConfig(stop="target", extra_groups=26)),
    "extra_groups": replace(STUCK, settings=OversampleConfig(stop="target", extra_groups=16)),
    "extra_rollouts": replace(STUCK, settings=OversampleConfig(stop="target", extra_rollouts=8)),
}


# ---------------------------------------------------------------------------------------------- the real scheduler


class PackedInputs(Task):
    """A group: the seconds of each turn of each of its rollouts."""

    seconds: tuple[tuple[float, ...], ...]


class Waits(ag.Env[PackedInputs]):
    """An env that ends when the model says so; the engine does the waiting."""

    limits = ag.Limits(seconds=1e9, turns=1000, context_tokens=1 << 20, turn_tokens=1 << 20)

    async def step(self, action: Message) -> StepResult:
        return StepResult([Message(role="user", content="on")], 0.0, action["content"].endswith("."), False, {})

    async def score(self) -> dict[str, float]:
        return {"done": 1.0}


class Paced(Scripted):
    """An engine that responds to each turn after its seconds, with a text of proportional length."""

    def __init__(self) -> None:
        super().__init__([])
        self.rows: dict[str, tuple[tuple[float, ...], ...]] = {}

    async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
        task, index, _ = session.split("/")
        seconds = self.rows[task][int(index)]
        rollout_id = f"{task}/{index}"
        turn = self._played[rollout_id] = self._played.get(rollout_id, -1) + 1
        versions = (Version(0, self.version),)
        await asyncio.sleep(seconds[turn])
        length = max(1, round(seconds[turn] * TOKENS_PER_S))
        ids = np.full(length + 1, ord("a"))
        ids[-2:] = [ord("." if turn == len(seconds) - 1 else "a"), self.tokenizer.encode(self.end)[0]]
        zeros = np.zeros(length + 1, np.float32)
        return Completion(token_ids=ids, logprobs=zeros, finish_reason="stop", versions=versions)


def tasks(engine: Paced, rows: Rows, policy: Policy) -> Iterator[PackedInputs]:
    """Yield groups of as many rollouts as the policy starts per group."""
    size = policy.size + policy.settings.extra_rollouts
    for at in range(0, len(rows) - size + 1, size):
        task = PackedInputs(
            id=str(at),
            prompt=(Message(role="user", content="go"),),
            seconds=tuple(tuple(map(float, row)) for row in rows[at : at + size]),
        )
        engine.rows[task.id] = task.seconds
        yield task


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The results of some batches."""

    seconds: list[float]
    whole_groups: list[int]
    kept_s: list[float]
    """Seconds of the rollouts that were returned."""
    batch_stats: BatchStats


async def drive(rows: Rows, policy: Policy, *, batches: int, places: int) -> Batches:
    """Run a run's scheduler over these latencies; `places` is the number of rollouts that run at once."""
    engine, loop = Paced(), asyncio.get_running_loop()
    seconds, whole, kept, accounts = [], [], [], []
    async with Scheduler(
        Waits,
        tasks(engine, rows, policy),
        engine,
        Schedule(group_size=policy.size, concurrency=min(places, len(rows)), oversample=policy.settings),
    ) as scheduler:
        for _ in range(batches):
            began = loop.time()
            groups = await scheduler.collect(policy.groups)
            seconds.append(loop.time() - began)
            whole.append(_whole(groups.groups, policy))
            kept += [sum(engine.rows[r.group_id][int(r.rollout_id.split("/")[1])]) for r in groups.rollouts]
            assert groups.batch_stats is not None
            accounts.append(groups.batch_stats)
            await engine.load_adapter(None, version=engine.version + 1)
    return Batches(seconds=seconds, whole_groups=whole, kept_s=kept, batch_stats=total(accounts))


def _whole(groups: Sequence[Group], policy: Policy) -> int:
    """Return the number of complete groups of 8; single rollouts are grouped with their neighbors."""
    if policy.size > 1:
        return sum(len(group.scored) == policy.size for group in groups)
    kept = np.bincount([int(group.group_id) // GROUP for group in groups])
    return int((kept == GROUP).sum())


def total(accounts: Sequence[BatchStats]) -> BatchStats:
    """Return the sum over all batches; rollouts that one batch carried over are resumed by the next."""
    whole = accounts[0]
    for batch_stats in accounts[1:]:
        whole = whole + batch_stats
    return whole


# ---------------------------------------------------------------------------------------------------- the simulation


class Simulation:
    """The policy without overhead: rollouts end after their seconds, and the longest-waiting one gets a free slot."""

    def __init__(self, rows: Rows, policy: Policy, *, places: int) -> None:
        size = policy.size + policy.settings.extra_rollouts
        seconds = [sum(row) for row in rows]
        self.fresh = deque(seconds[at : at + size] for at in range(0, len(rows) - size + 1, size))
        self.policy, self.places, self.now = policy, places, 0.0
        self.waiting: deque[tuple[int, float]] = deque()
        self.running: list[tuple[float, int, int]] = []
        """End, number and group of each rollout; a number that is not in `alive` was cancelled."""
        self.alive: set[int] = set()
        self.left: dict[int, int] = {}
        """Scores that each open group still needs."""
        self.begun = 0

    def batch(self) -> float:
        """Run until the batch is cut, and return its seconds."""
        policy, settings, began = self.policy, self.policy.settings, self.now
        while len(self.left) < policy.groups + settings.extra_groups:
            self._open(self.fresh.popleft())
        in_play, ended, closed, deadline = len(self.alive) + len(self.waiting), 0, 0, np.inf
        while closed < policy.groups:
            end, number, group = heapq.heappop(self.running)
            if number not in self.alive:
                continue
            if end > deadline and closed:
                heapq.heappush(self.running, (end, number, group))
                break
            self.now, ended = end, ended + 1
            self.alive.remove(number)
            if settings.stop == "deadline" and ended == share_of(in_play, DEADLINE_SHARE):
                deadline = began + DEADLINE_FACTOR * (end - began)
            self.left[group] -= 1
            if not self.left[group]:
                closed += 1
                self._close(group)
            self._start()
        if closed < policy.groups:
            self.now = deadline
        if not settings.carry:
            self.running, self.alive, self.left = [], set(), {}
            self.waiting.clear()
        return self.now - began

    def _open(self, seconds: Sequence[float]) -> None:
        self.begun += 1
        self.left[self.begun] = self.policy.size
        self.waiting.extend((self.begun, one) for one in seconds)
        self._start()

    def _close(self, group: int) -> None:
        del self.left[group]
        self.alive -= {number for _, number, other in self.running if other == group}
        self.waiting = deque(item for item in self.waiting if item[0] != group)

    def _start(self) -> None:
        while self.waiting and len(self.alive) < self.places:
            group, seconds = self.waiting.popleft()
            self.begun += 1
            self.alive.add(self.begun)
            heapq.heappush(self.running, (self.now + seconds, self.begun, group))


# ---------------------------------------------------------------------------------------------------- figures


def tail_rows(module: Any, seed: int) -> list[list[float]]:
    """Return the turn durations of more rollouts than any policy starts."""
    _, _, turns = module.rollout_latency(seed=seed, n=2 * NEEDED * (BATCHES + 1))
    return [row.tolist() for row in turns]


def stuck_rows(seed: int) -> list[list[float]]:
    """Return the turn durations of rollouts of about 40 ms, of which 5 % hang for a second."""
    rng = np.random.default_rng([seed, 7])
    seconds = rng.lognormal(np.log(0.04), 0.5, 2 * 16 * GROUP)
    return [[1.0 if stuck else float(one)] for one, stuck in zip(seconds, rng.random(len(seconds)) < 0.05, strict=True)]


def measure(name: str, rows: Rows, policy: Policy, *, batches: int, places: int) -> dict[str, float]:
    """Return the real scheduler's results, and how far the simulation is from them."""
    real = run_in_virtual_time(drive(rows, policy, batches=batches, places=places))
    simulation = Simulation(rows, policy, places=places)
    simulated = [simulation.batch() for _ in range(batches)]
    batch_stats, everything = real.batch_stats, [sum(row) for row in rows]
    tokens = batch_stats.kept_tokens + batch_stats.dropped_tokens
    return {
        f"{name}_s": float(np.mean(real.seconds)),
        f"{name}_of_simulated": float(np.mean(simulated) / np.mean(real.seconds)),
        f"{name}_off_simulation": float(np.abs(np.array(real.seconds) / simulated - 1).max()),
        f"{name}_whole_groups": float(np.mean(real.whole_groups)),
        f"{name}_wasted_tokens": batch_stats.dropped_tokens / tokens,
        f"{name}_wasted_seconds": batch_stats.cut_s / (batch_stats.kept_s + batch_stats.cut_s),
        f"{name}_length_bias": float(np.mean(real.kept_s) / np.mean(everything)),
        f"{name}_length_bias_logged": batch_stats.length_bias,
        f"{name}_rollouts_lost": float(batch_stats.rollouts.dropped),
        f"{name}_versions_behind": batch_stats.staleness / max(batch_stats.groups.finished, 1),
    }


def speedups(figures: dict[str, float], kind: str, names: Sequence[str], suffix: str) -> dict[str, float]:
    waited = figures[f"{kind}_wait_for_all{suffix}_s"]
    return {f"{kind}_{name}{suffix}_speedup": waited / figures[f"{kind}_{name}{suffix}_s"] for name in names}


def main() -> None:
    args = arguments(__doc__ or "")
    rows, figures = tail_rows(load_workloads(args.workloads), args.seed), dict[str, float]()
    for suffix, places in PLACES.items():
        for name, policy in TAIL.items():
            figures |= measure(f"tail_{name}{suffix}", rows, policy, batches=BATCHES, places=places)
        figures |= speedups(figures, "tail", list(TAIL), suffix)
    for name, policy in H7.items():
        figures |= measure(f"h7_{name}", stuck_rows(args.seed), policy, batches=1, places=ENDLESS)
    figures |= speedups(figures, "h7", list(H7), "")
    report("oversample", figures=figures, reference={}, goals=goals(figures), as_json=args.json)


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    lost = sum(value for name, value in figures.items() if "resume" in name and name.endswith("rollouts_lost"))
    off = max(value for name, value in figures.items() if name.endswith("off_simulation"))
    h7 = min(figures[f"h7_{name}_speedup"] for name in ("extra_groups", "extra_rollouts"))
    whole = min(figures[f"h7_{name}_whole_groups"] for name in ("extra_groups", "extra_rollouts"))
    resumed = {
        "drop and resume": "resume",
        "drop and resume, 128 places": "resume_128",
        "drop and resume, groups of 8": "groups_resume_96",
        "drop and resume, groups of 8, 128 places": "groups_resume_96_128",
    }
    return {
        **{
            f"{title}, speed-up over the simulated one": at_least(figures[f"tail_{name}_of_simulated"], 0.98)
            for title, name in resumed.items()
        },
        "rollouts that drop and resume loses": at_most(lost, 0),
        "the driver stops where the policy says, off by": at_most(off, 0.02),
        "group-aware on H7, speed-up": at_least(h7, 5.0),
        "group-aware on H7, whole groups": at_least(whole, 16),
    }


if __name__ == "__main__":
    main()
