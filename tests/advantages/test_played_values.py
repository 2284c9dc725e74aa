"""Branches' estimates of a state's value, run in an env whose values are known."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

import agentgym as ag
from agentgym.samples import build_samples
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout
from agentgym.types.task import StepResult
from tests.rollouts.test_branches import Dice

LIKELY = 0.6
"""The policy's probability of a, in every state."""
TURNS = 3
ROLLOUTS, GROUP = 240, 4


class Path3(ag.Env[ag.Task]):
    """An env with three letters; some paths are worth much more than others, and two b's at the start end it early."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        self.way = ""
        return await super().reset(seed=seed)

    async def step(self, action: Message) -> StepResult:
        self.way += str(action["content"])
        return StepResult([Message(role="user", content="more")], 0.0, ends(self.way), False, {})

    async def score(self) -> dict[str, float]:
        return {"way": worth(self.way)}


def ends(way: str) -> bool:
    return len(way) == TURNS or way == "bb"


def worth(way: str) -> float:
    return {"aab": 1.0, "aba": 0.4, "bab": -0.5, "bb": 0.1}.get(way, 0.0)


def value(way: str) -> float:
    """Return the exact value of a state under the policy."""
    return worth(way) if ends(way) else LIKELY * value(way + "a") + (1 - LIKELY) * value(way + "b")


def slope(letter: str) -> float:
    """Return the derivative of log p(letter) by the policy's one logit."""
    return (1 - LIKELY) if letter == "a" else -LIKELY


def exact_gradient(way: str = "") -> float:
    if ends(way):
        return 0.0
    both = (("a", LIKELY), ("b", 1 - LIKELY))
    return sum(p * (slope(letter) * value(way + letter) + exact_gradient(way + letter)) for letter, p in both)


def letters(rollout: Rollout, branch: int | None) -> str:
    segments = [s for s in rollout.segments if s.branch == branch]
    return "".join(str(turn.message["content"]) for segment in segments for turn in segment.turns)


def within(values: Sequence[float], exact: float) -> bool:
    """Return whether the mean is within three standard errors of the exact value."""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return bool(abs(float(np.mean(values)) - exact) <= 3 * error + 1e-12)


async def test_branches_estimate_the_value_of_their_state_and_the_gradient_without_bias() -> None:
    task = ag.Task(id="t", prompt=(Message(role="user", content="Go."),))
    played = [
        await ag.rollout(
            Path3,
            task,
            Dice(likely=LIKELY),
            seed=i // GROUP,
            rollout_id=f"t/{i}",
            branching=ag.BranchingConfig(per_state=2),
        )
        for i in range(ROLLOUTS)
    ]
    seen: dict[str, list[float]] = defaultdict(list)
    for rollout in played:
        root = letters(rollout, None)
        for branch in rollout.branches:
            assert branch.reward is not None
            seen[root[: branch.turn]].append(branch.reward)
    assert set(seen) == {"a", "b", "aa", "ab", "ba"}
    for state, returns in seen.items():
        assert within(returns, value(state)), (state, np.mean(returns), value(state))
    gradients = []
    for first in range(0, ROLLOUTS, GROUP):
        group = Group(group_id="t", rollouts=tuple(played[first : first + GROUP]))
        rows = {(r.rollout_id, r.segment, r.step): r for r in build_samples([group], credit="branches", merge=False)}
        for rollout in group.rollouts:
            whole = 0.0
            for place, segment in enumerate(rollout.segments):
                for step, turn in enumerate(segment.turns):
                    row = rows.get((rollout.rollout_id, place, step))
                    whole += 0.0 if row is None else slope(str(turn.message["content"])) * float(row.advantages[0])
            gradients.append(whole)
    assert within(gradients, exact_gradient()), (np.mean(gradients), exact_gradient())
