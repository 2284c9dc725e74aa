"""Our plans for `benchmarks.planning`, each as a function that makes it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from agentgym.train.batching.plan import Balance, Plan, cost_of, plan_lengths, plan_step
from agentgym.types.arrays import Ints
from agentgym.types.sample import Sample

KEYS: tuple[Balance, ...] = ("flops", "square", "length")
RANKS, ROWS, BUDGET, HIDDEN = 8, 8, 16_384, 2560


@dataclass(frozen=True, slots=True)
class Lengths:
    """The number of ids in each sample's prompt and completion, and its group."""

    prompt: Ints
    completion: Ints
    group: Ints

    @property
    def whole(self) -> Ints:
        """The number of ids of each sample."""
        return self.prompt + self.completion

    def mixed(self, seed: int) -> "Lengths":
        """Return the same samples in a random order, which separates groups."""
        order = np.random.default_rng([seed, 7]).permutation(len(self.prompt))
        return Lengths(self.prompt[order], self.completion[order], self.group[order])


def plans_of_lengths(lengths: Ints) -> dict[str, Callable[[], Plan]]:
    """Return plans from lengths only: for a number of samples, of tokens, and of padded tokens per micro-batch."""
    listed = lengths.tolist()
    found: dict[str, Callable[[], Plan]] = {}
    for key in KEYS:
        plan = partial(plan_lengths, listed, ranks=RANKS, layout="packed", cost=cost_of(key, HIDDEN))
        found[f"fixed_{key}"] = partial(plan, micro_samples=ROWS)
        found[f"budget_{key}"] = partial(plan, max_tokens_per_microbatch=BUDGET)
    cost = cost_of("flops", HIDDEN)
    padded = partial(plan_lengths, listed, ranks=RANKS, layout="padded", max_tokens_per_microbatch=BUDGET, cost=cost)
    return found | {"padded_budget": padded}


def plans_of_prefixes(of: Lengths, seed: int) -> dict[Balance, Callable[[], Plan]]:
    """Return plans that use shared prefixes, by the cost that they balance."""
    samples = make_samples(of.prompt, of.completion, of.group, seed)
    return {
        key: partial(
            plan_step, samples, ranks=RANKS, layout="tree", max_tokens_per_microbatch=BUDGET, cost=cost_of(key, HIDDEN)
        )
        for key in KEYS[::2]
    }


def strided(count: int) -> Plan:
    """Return a plan that assigns samples to ranks in order."""
    return [
        [list(range(start + rank, start + RANKS * ROWS, RANKS)) for start in range(0, count, RANKS * ROWS)]
        for rank in range(RANKS)
    ]


def make_samples(prompt: Ints, completion: Ints, group: Ints, seed: int) -> list[Sample]:
    """Return samples of random ids whose groups share a prompt, in the order of the arguments."""
    rng = np.random.default_rng([seed, 6])
    prompts = {g: rng.integers(0, 151_000, n) for g, n in zip(group.tolist(), prompt.tolist(), strict=True)}
    rows = []
    for i, (g, n) in enumerate(zip(group.tolist(), completion.tolist(), strict=True)):
        zeros = np.zeros(n, np.float32)
        rows.append(
            Sample(
                group_id=str(g),
                rollout_id=str(i),
                segment=0,
                step=0,
                prompt_ids=prompts[g],
                response_ids=rng.integers(0, 151_000, n),
                loss_mask=np.ones(n, np.bool_),
                logprobs=zeros,
                advantages=zeros,
                weight=1.0,
            )
        )
    return rows
