"""Metrics of one batch: lengths, spread of rewards, tools, failures, and the mismatch of the engine's policy."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from agentgym.scheduling.accounting import Groups
from agentgym.store.tool_counts import ToolCounts
from agentgym.types.arrays import Floats
from agentgym.types.rollout import policy_tokens
from agentgym.types.sample import Sample

QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
"""The quantiles of lengths, by name."""
MOST_TOOLS = 16
"""Maximum number of tool names that are counted separately. A model can invent any number of names."""


def batch_metrics(groups: Groups, *, least_solved: float = 1.0) -> dict[str, float]:
    """Return a batch's length quantiles, reward spread, tool calls, tool errors, and failures by kind.

    Args:
        groups: The groups of the batch.
        least_solved: Minimum reward of a solved task.
    """
    scored = [rollout for rollout in groups.rollouts if rollout.reward is not None]
    metrics = tool_metrics(ToolCounts.of(groups.rollouts))
    for kind, count in Counter(rollout.failure.type for rollout in groups.rollouts if rollout.failure).items():
        metrics[f"failures/{kind}"] = float(count)
    if not scored:
        return metrics
    turns = [
        turn.stop - turn.start
        for rollout in scored
        for segment in rollout.own_segments
        if not segment.model
        for turn in segment.turns
    ]
    for what, lengths in (("rollout", [policy_tokens(rollout.own_segments) for rollout in scored]), ("turn", turns)):
        if lengths:
            values = np.quantile(lengths, list(QUANTILES.values()))
            names = (f"length/{what}_{name}" for name in QUANTILES)
            metrics |= dict(zip(names, map(float, values), strict=True))
    rewards = [[rollout.reward for rollout in group.scored] for group in groups if group.scored]
    solved = [[reward is not None and reward >= least_solved for reward in of_task] for of_task in rewards]
    metrics |= {
        "reward/std": float(np.std(np.array([rollout.reward for rollout in scored], np.float64))),
        "groups/solved_by_none": float(np.mean([not any(of_task) for of_task in solved])),
        "groups/solved_by_all": float(np.mean([all(of_task) for of_task in solved])),
    }
    return metrics


def tool_metrics(counts: ToolCounts) -> dict[str, float]:
    """Return the calls and errors of the most frequent tools, and of all other tools together."""
    metrics: dict[str, float] = {}
    for what, counted in (("calls", counts.calls), ("errors", counts.errors)):
        shown = dict(counted.most_common(MOST_TOOLS))
        if others := counted.total() - sum(shown.values()):
            shown["(others)"] = others
        metrics |= {f"tools/{name or '(no name)'}/{what}": float(count) for name, count in shown.items()}
    return metrics


def tool_counts(metrics: Mapping[str, float | None]) -> ToolCounts:
    """Return the tool calls and errors that are in a step's metrics under the names that `tool_metrics` uses."""
    counts = ToolCounts()
    for name, value in metrics.items():
        tool, _, what = name.removeprefix("tools/").rpartition("/")
        if name.startswith("tools/") and value is not None and what in ("calls", "errors"):
            (counts.calls if what == "calls" else counts.errors)[tool] += int(value)
    return counts


def mismatch_metrics(
    samples: Sequence[Sample], scored: Mapping[tuple[str, int, int], tuple[Floats, bool]]
) -> dict[str, float]:
    """Return how much the trainer's log-probabilities differ from those under which the tokens were sampled.

    Only samples that were scored before the policy changed count: those of the first mini-batch, or all with
    old_logprobs="trainer". `mismatch/ess` is the effective sample size of the weights exp(trainer - engine), as a
    share of the tokens (Kish, 1965): 1 if both policies are the same.

    Args:
        samples: The samples of the step.
        scored: By each sample's rollout id, segment and step: the trainer's log-probabilities, and whether the policy
            had changed before they were computed.

    Returns:
        The metrics; empty if no sample was scored before the policy changed.
    """
    found = [(sample, scored.get((sample.rollout_id, sample.segment, sample.step))) for sample in samples]
    gaps = [of[0] - sample.logprobs[sample.loss_mask] for sample, of in found if of and not of[1] and len(of[0])]
    if not gaps:
        return {}
    gap = np.concatenate(gaps).astype(np.float64)
    size, weights = np.abs(gap), np.exp(gap - gap.max())
    return {
        "mismatch/mean": float(size.mean()),
        "mismatch/p99": float(np.quantile(size, 0.99)),
        "mismatch/max": float(size.max()),
        "mismatch/ess": float(weights.sum() ** 2 / (len(gap) * (weights**2).sum())),
    }
