"""Credit by branches compared with outcome credit at equal sampled turns, in envs of 20 turns with a tabular policy.

`python -m benchmarks.branches [--json] [--seed N]`

Each turn of a rollout has its own softmax over four actions, one of which is right. `sum`: the reward is the share of
right turns. `chain`: the first wrong turn ends the rollout, and the reward is the number of turns before it divided
by 20. `key`: one turn in the middle decides.

`*_snr` is the squared length of the mean gradient divided by the trace of its variance, for a batch of 1,680 turns,
as a multiple of the value for outcome credit: above 1, fewer turns give the same gradient. `*_reward` is the mean
reward over the last fifth of 40 steps of 1,680 turns each, over ten seeds, minus that of outcome credit; `*_error` is
its standard error.

`outcome` is the leave-one-out baseline of whole rollouts. `every5` runs two branches after every fifth turn, `middle`
runs two after the tenth, and `dense` runs one after every turn. With `_root`, the branches only estimate values and are
not trained on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentgym.advantages.estimates import State, estimate, share
from benchmarks.harness import report, report_parser

TURNS, ACTIONS, KEY = 20, 4, 10
BATCH = 1680
"""Sampled turns per batch."""
SEEDS, STEPS, BATCHES = 10, 40, 200
LEARNING_RATE = 2.0
START = {"sum": 0.4, "chain": 0.85, "key": 0.4}
"""Initial probability of the right action."""
Table: TypeAlias = NDArray[np.float64]
Way: TypeAlias = NDArray[np.int64]
"""The actions of a rollout; 0 is the right one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Settings of the branches: after which turns they run, how many per turn, and whether they are trained on."""

    every: int = TURNS
    branches: int = 0
    train: bool = True


CREDITS = {
    "outcome": Credit(),
    "every5": Credit(every=5, branches=2),
    "middle": Credit(every=10, branches=2),
    "dense": Credit(every=1, branches=1),
    "every5_root": Credit(every=5, branches=2, train=False),
    "middle_root": Credit(every=10, branches=2, train=False),
}


def length_of_chain(way: Way) -> int:
    """Return the number of turns of a `chain` rollout."""
    wrong = np.flatnonzero(way)
    return int(wrong[0]) + 1 if len(wrong) else len(way)


ENVS: dict[str, tuple[Callable[[Way], int], Callable[[Way], float]]] = {
    "sum": (len, lambda way: float((way == 0).mean())),
    "chain": (length_of_chain, lambda way: float((way[: length_of_chain(way)] == 0).sum()) / TURNS),
    "key": (len, lambda way: float(way[KEY] == 0)),
}


class Batch:
    """Rollouts of one policy, sampled until the batch has enough turns, and their gradient."""

    def __init__(self, env: str, logits: Table, rng: np.random.Generator) -> None:
        self.length, self.worth = ENVS[env]
        chances = np.exp(logits - logits.max(1, keepdims=True))
        self.chances = chances / chances.sum(1, keepdims=True)
        self.bounds, self.rng, self.turns = self.chances.cumsum(1), rng, 0
        self.gradient, self.rewards = np.zeros_like(logits), list[float]()

    def play(self, credit: Credit) -> None:
        """Sample rollouts of one task until the batch is full, and add up their gradient."""
        group = list[tuple[Way, dict[int, list[Way]]]]()
        while self.turns < BATCH or len(group) < 2:
            group.append(self._rollout(credit))
        rewards = self.rewards = [self.worth(way) for way, _ in group]
        for place, (way, branches) in enumerate(group):
            self._add(way, rewards[place], rewards[:place] + rewards[place + 1 :], branches, credit)

    def _sample(self, prefix: Way) -> Way:
        """Return a prefix continued to the end of the rollout, and count the sampled turns."""
        rest = (self.rng.random(TURNS - len(prefix))[:, None] > self.bounds[len(prefix) :]).sum(1)
        way = np.concatenate([prefix, rest])
        way = way[: self.length(way)]
        self.turns += len(way) - len(prefix)
        return way

    def _rollout(self, credit: Credit) -> tuple[Way, dict[int, list[Way]]]:
        way = self._sample(np.zeros(0, np.int64))
        states = range(credit.every, len(way), credit.every)
        return way, {turn: [self._sample(way[:turn]) for _ in range(credit.branches)] for turn in states}

    def _add(
        self, way: Way, reward: float, others: list[float], branches: dict[int, list[Way]], credit: Credit
    ) -> None:
        states = [State(turn, [self.worth(branch) for branch in played]) for turn, played in branches.items()]
        given = estimate(reward, others, [state for state in states if state.returns])
        stretch = np.searchsorted(given.starts, np.arange(len(way)), side="right") - 1
        begin = [turn for turn, played in branches.items() for _ in played] if credit.train else []
        shares = np.array([share(turn, begin) for turn in range(TURNS)])
        self._push(way, 0, np.asarray(given.stretches)[stretch] * shares[: len(way)])
        if credit.train:
            for (turn, played), values in zip(branches.items(), given.branches, strict=False):
                for branch, value in zip(played, values, strict=True):
                    self._push(branch, turn, value * shares[turn : len(branch)])

    def _push(self, way: Way, start: int, advantages: Table) -> None:
        """Add the gradient of log p of the turns from `start` on, each times its advantage."""
        turns = np.arange(start, len(way))
        self.gradient[turns] -= self.chances[turns] * advantages[:, None]
        self.gradient[turns, way[start:]] += advantages


def logits_at(right: float) -> Table:
    """Return the logits of a policy that takes the right action with this probability in every turn."""
    logits = np.zeros((TURNS, ACTIONS))
    logits[:, 0] = np.log(right * (ACTIONS - 1) / (1 - right))
    return logits


def signal(env: str, credit: Credit, seed: int) -> float:
    """Return the squared length of a batch's mean gradient divided by the trace of its variance.

    The estimate is unbiased.
    """
    found, turns = list[Table](), 0
    for number in range(BATCHES):
        batch = Batch(env, logits_at(START[env]), np.random.default_rng([seed, number]))
        batch.play(credit)
        turns += batch.turns
        found.append(batch.gradient.ravel() / len(batch.rewards))
    gradients = np.array(found)
    variance = float(gradients.var(0, ddof=1).sum())
    mean = float((gradients.mean(0) ** 2).sum()) - variance / BATCHES
    return mean / variance * (BATCH * BATCHES / turns)


def learned(env: str, credit: Credit, seed: int) -> float:
    """Return the mean reward over the last fifth of a run's steps."""
    logits, rewards = logits_at(START[env]), list[float]()
    for step in range(STEPS):
        batch = Batch(env, logits, np.random.default_rng([seed, 1, step]))
        batch.play(credit)
        # All steps have the same length, so that the kinds of credit differ only in the step's direction.
        size = float(np.sqrt((batch.gradient**2).sum()))
        logits = logits + LEARNING_RATE * batch.gradient / max(size, 1e-9) / 4
        rewards.append(float(np.mean(batch.rewards)))
    return float(np.mean(rewards[-STEPS // 5 :]))


def main() -> None:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for env in ENVS:
        usual = signal(env, CREDITS["outcome"], args.seed)
        base = np.array([learned(env, CREDITS["outcome"], args.seed + i) for i in range(SEEDS)])
        figures[f"{env}_outcome_reward"] = float(base.mean())
        for name, credit in CREDITS.items():
            if name == "outcome":
                continue
            figures[f"{env}_{name}_snr"] = signal(env, credit, args.seed) / usual
            gained = np.array([learned(env, credit, args.seed + i) for i in range(SEEDS)]) - base
            figures[f"{env}_{name}_reward"] = float(gained.mean())
            figures[f"{env}_{name}_error"] = float(gained.std(ddof=1) / SEEDS**0.5)
    report("branches", figures=figures, reference={}, goals={}, as_json=args.json)


if __name__ == "__main__":
    main()
