"""Seeded workloads of the benchmarks: every generator is a pure function of its arguments (numpy PCG64).

Another file with the same names can replace it: `--workloads FILE.py`.

    stepwise          step samples of multi-turn rollouts, prompt and response lengths anti-correlated
    rl_lengths        prompt and completion lengths, a tenth of the completions at the limit
    fanout            rollouts with several samples each
    rollout_latency   rollout durations with a long tail
    tool_dialog       the texts and tool calls that a scripted engine returns
    token_counts, trie_tokens, imbalance, straggler, flops   their costs, in theory
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

VOCAB = 151_936
PAD, EOS = 151_643, 151_645
SAMPLED_IDS = 151_000
"""Random ids are below this, away from special tokens."""

Turns: TypeAlias = list[tuple[list[int], list[int]]]
"""Action and observation ids of each turn."""


@dataclass
class StepBatch:
    """One entry per step sample, in the order of rollouts and turns."""

    prompts: list[list[int]] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    loss_masks: list[list[int]] = field(default_factory=list)
    rewards: list[list[float]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    traj: NDArray[Any] = field(default_factory=lambda: np.zeros(0, int))
    """Rollout of each sample."""
    segment: NDArray[Any] = field(default_factory=lambda: np.zeros(0, int))
    """Segment within the rollout; a compaction starts a new one."""
    group: NDArray[Any] = field(default_factory=lambda: np.zeros(0, int))
    is_last: NDArray[Any] = field(default_factory=lambda: np.zeros(0, bool))
    meta: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)


STEP_PRESETS: dict[str, dict[str, Any]] = {
    "skyrl": {"n_traj": 512, "turns": 8, "max_len": 8192},
    "agentic": {"n_traj": 512, "turns": 8, "max_len": 8192, "compaction_p": 0.3, "fork_p": 0.3},
    "tiny": {"n_traj": 64, "turns": 4, "max_len": 1024, "prompt_median": 128},
}


def stepwise(
    seed: int = 0,
    n_traj: int = 512,
    turns: int = 8,
    group: int = 8,
    max_len: int = 8192,
    min_budget: float = 0.45,
    compaction_p: float = 0.0,
    fork_p: float = 0.0,
    vary_turns: bool = False,
    early_heavy: float = 0.5,
    prompt_median: int = 640,
) -> StepBatch:
    """Return step samples whose early turns are long and have short prompts, and whose late turns are the reverse.

    A sample's prompt is everything in its segment before the turn. Its response is the action (trained), then
    the observation (not trained; the last turn has none). So a sample is a prefix of the next one's prompt,
    unless the context was compacted in between (`compaction_p`). With `fork_p` a rollout shares its first
    turns, id for id, with the rollout before it in the group. `early_heavy` is the share of rollouts that
    spend most of their budget in the first turn.
    """
    rng = np.random.default_rng([seed, 1])
    batch = StepBatch()
    names: list[tuple[int, int, int, bool]] = []
    for g in range(n_traj // group):
        n_prompt = int(np.clip(rng.lognormal(np.log(prompt_median), 0.45), 96, max_len // 5))
        prompt = rng.integers(0, SAMPLED_IDS, n_prompt).tolist()
        before: Turns | None = None
        for k in range(group):
            n = int(rng.integers(2, turns + 1)) if vary_turns else turns
            steps = _draw_turns(rng, n, n_prompt, max_len, min_budget, early_heavy)
            if before is not None and rng.random() < fork_p:
                steps = _fork(rng, before, steps, n_prompt, max_len)
            before = steps
            n = len(steps)
            compact_at = n // 2 if (n >= 4 and rng.random() < compaction_p) else -1
            names += _play(rng, batch, steps, prompt, compact_at, (g * group + k, g))
    columns = list(zip(*names, strict=True)) or [(), (), (), ()]
    batch.traj, batch.segment, batch.group, batch.is_last = map(np.array, columns)
    return batch


def _draw_turns(rng: Generator, n: int, n_prompt: int, max_len: int, min_budget: float, early_heavy: float) -> Turns:
    """Draw the actions and observations of one rollout, within `max_len` ids including its prompt."""
    budget = int(rng.uniform(min_budget, 1.0) * max_len) - n_prompt
    seen = rng.integers(16, max(17, max_len // 64), n)
    shared = int(seen[:-1].sum())
    share = rng.gamma(0.8, 1.0, n)
    if rng.random() < early_heavy:
        share[0] = share[1:].sum() * rng.uniform(2.0, 6.0)
    share[-1] = min(share[-1], share.mean() * 0.5)
    acts = np.maximum(8, (share / share.sum() * max(n * 8, budget - shared) * 0.98).astype(int))
    while acts.sum() + shared + n_prompt > max_len:
        acts[acts.argmax()] -= acts.sum() + shared + n_prompt - max_len
    return [
        ([*rng.integers(0, SAMPLED_IDS, a - 1).tolist(), EOS], rng.integers(0, SAMPLED_IDS, o).tolist())
        for a, o in zip(acts.tolist(), seen.tolist(), strict=True)
    ]


def _fork(rng: Generator, before: Turns, steps: Turns, n_prompt: int, max_len: int) -> Turns:
    """Return the first turns of another rollout, and then as many of this one's as still fit."""
    cut = int(rng.integers(1, max(2, min(len(steps), len(before)))))
    kept, rest = before[:cut], steps[cut:]
    used = n_prompt + sum(len(a) + len(o) for a, o in kept)
    while rest and used + sum(len(a) + len(o) for a, o in rest) - len(rest[-1][1]) > max_len:
        rest = rest[:-1]
    return kept + rest


def _play(
    rng: Generator, batch: StepBatch, steps: Turns, prompt: list[int], compact_at: int, ids: tuple[int, int]
) -> list[tuple[int, int, int, bool]]:
    """Append one rollout's samples, and return their rollout, segment, group and whether each is the last."""
    context, segment, names = list(prompt), 0, []
    reward = float(rng.random() < 0.4)
    for t, (action, observation) in enumerate(steps):
        if t == compact_at:
            summary = rng.integers(0, SAMPLED_IDS, max(16, len(context) // 12)).tolist()
            context, segment = prompt + summary, segment + 1
        final = t == len(steps) - 1
        response = action + ([] if final else observation)
        worth = [0.0] * len(response)
        worth[len(action) - 1] = reward if final else 0.0
        batch.prompts.append(context)
        batch.responses.append(response)
        batch.loss_masks.append([1] * len(action) + [0] * (len(response) - len(action)))
        batch.rewards.append(worth)
        batch.logprobs.append((-rng.exponential(0.5, len(response))).tolist())
        names.append((ids[0], segment, ids[1], final))
        context = context + response
    return names


def rl_lengths(seed: int = 0, n: int = 4096, group: int = 8) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the prompt length, completion length and group of each of `n` samples; a group's prompts are equal.

    Completions are log-normal (median 700, sigma 0.9) in 24..4096, a tenth of them 4096; prompts log-normal
    (median 256, sigma 0.43) in 64..1024.
    """
    rng = np.random.default_rng([seed, 2])
    n_groups = -(-n // group)
    prompt = np.clip(rng.lognormal(np.log(256), 0.43, n_groups), 64, 1024).astype(int).repeat(group)[:n]
    completion = np.clip(rng.lognormal(np.log(700), 0.9, n), 24, 4096).astype(int)
    completion[rng.random(n) < 0.10] = 4096
    return prompt, completion, np.arange(n_groups).repeat(group)[:n]


def fanout(
    seed: int = 0, n: int = 65_536, group: int = 8, max_seg: int = 6, fan: bool = True, shuffle: bool = False
) -> dict[str, NDArray[Any]]:
    """Return arrays reward, rollout, prompt and is_last of `n` samples; a rollout's samples repeat its reward.

    Rewards are 0 or 1 plus a little noise, so that every group has variance. Rollouts with more samples score lower,
    so a baseline that counts samples is visibly biased.
    """
    rng = np.random.default_rng([seed, 3])
    count = np.minimum(rng.geometric(0.45, n), max_seg) if fan else np.ones(n, int)
    stop = int(np.searchsorted(np.cumsum(count), n, side="left")) + 1
    count = count[:stop].copy()
    count[-1] -= count.sum() - n
    score = (rng.random(len(count)) < np.clip(0.65 - 0.1 * (count - 1), 0.05, 1)).astype(np.float32)
    score += rng.normal(0, 0.05, len(count)).astype(np.float32)
    last = np.zeros(n, bool)
    last[np.cumsum(count) - 1] = True
    rollout = np.arange(len(count))
    out: dict[str, NDArray[Any]] = {
        "reward": score.repeat(count),
        "rollout": rollout.repeat(count),
        "prompt": (rollout // group).repeat(count),
        "is_last": last,
    }
    if not shuffle:
        return out
    order = rng.permutation(n)
    return {name: values[order] for name, values in out.items()}


def fanout_reference(
    reward: ArrayLike, rollout: ArrayLike, prompt: ArrayLike, std: bool = True, eps: float = 1e-6
) -> NDArray[np.float64]:
    """Return once-per-rollout advantages by definition: float64, unbiased deviation, 0 for a group of one."""
    _, first, where = np.unique(np.asarray(rollout), return_index=True, return_inverse=True)
    score = np.asarray(reward, np.float64)[first]
    _, place = np.unique(np.asarray(prompt)[first], return_inverse=True)
    count = np.bincount(place)
    centered = score - (np.bincount(place, score) / count)[place]
    if std:
        variance = np.bincount(place, centered * centered) / np.maximum(count - 1, 1)
        centered = centered / (np.sqrt(variance)[place] + eps)
    return np.asarray(centered[where])


def rollout_latency(
    seed: int = 0,
    n: int = 1024,
    max_turns: int = 8,
    median_turn: float = 1.0,
    sigma: float = 0.9,
    tail_p: float = 0.04,
    tail_alpha: float = 1.5,
    cap: float = 60.0,
) -> tuple[NDArray[Any], NDArray[Any], list[NDArray[Any]]]:
    """Return turns, total seconds and per-turn seconds of `n` rollouts; a share `tail_p` of turns are stragglers."""
    rng = np.random.default_rng([seed, 5])
    turns = 1 + rng.binomial(max_turns - 1, 0.35, n)
    seconds = []
    for count in turns:
        drawn = rng.lognormal(np.log(median_turn), sigma, count)
        slow = rng.random(count) < tail_p
        drawn[slow] = median_turn * 8 * (1 + rng.pareto(tail_alpha, slow.sum()))
        seconds.append(np.minimum(drawn, cap))
    return turns, np.array([drawn.sum() for drawn in seconds]), seconds


def tool_dialog(seed: int = 0, turns: int = 8, words: int = 24) -> tuple[list[dict[str, Any]], str]:
    """Return the assistant's side of one rollout: `turns` - 1 tool calls with a text each, and a final answer."""
    rng = np.random.default_rng([seed, 4])
    vocabulary = ["alpha", "bravo", "delta", "golf", "hotel", "india", "kilo", "lima", "metro", "oscar"]

    def text() -> str:
        return " ".join(rng.choice(vocabulary, words).tolist())

    def number() -> int:
        return int(rng.integers(0, 99))

    calls = [{"text": text(), "name": "add", "args": {"a": number(), "b": number()}} for _ in range(turns - 1)]
    return calls, text() + " answer 42"


def trie_tokens(sequences: Sequence[list[int]]) -> tuple[int, int]:
    """Return the unique tokens in the prefix tree of the sequences, and the sum of their depths."""
    tokens = pairs = 0
    before: list[int] = []
    for sequence in sorted(sequences):
        k, n = _common(before, sequence), len(sequence)
        tokens += n - k
        pairs += n * (n + 1) // 2 - k * (k + 1) // 2
        before = sequence
    return tokens, pairs


def _common(one: list[int], other: list[int]) -> int:
    """Return the length of the longest common prefix."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:n]) != np.asarray(other[:n]))
    return int(differ[0]) if len(differ) else n


def token_counts(batch: StepBatch) -> dict[str, int]:
    """Count tokens and attention pairs of a batch.

    They are counted as the batch is, merged by segment, as a tree, and padded in each layout.
    """
    prompt = np.array([len(x) for x in batch.prompts])
    response = np.array([len(x) for x in batch.responses])
    length = prompt + response
    n, width = len(batch), int(length.max())
    last = np.ones(n, bool)  # a segment's last sample contains the others
    last[:-1] = (batch.traj[1:] != batch.traj[:-1]) | (batch.segment[1:] != batch.segment[:-1])
    merged = length[last]
    tree = tree_pairs = 0
    for g in np.unique(batch.group):
        rows = np.flatnonzero((batch.group == g) & last)
        tokens, pairs = trie_tokens([batch.prompts[i] + batch.responses[i] for i in rows])
        tree, tree_pairs = tree + tokens, tree_pairs + pairs
    return {
        "samples": n,
        "trained_tokens": sum(map(sum, batch.loss_masks)),
        "real": int(length.sum()),
        "merged": int(merged.sum()),
        "merged_rows": int(last.sum()),
        "tree": tree,
        "padded_two_segment": n * int(prompt.max() + response.max()),
        "padded_left": n * width,
        "padded_left_merged": int(last.sum() * merged.max()),
        "max_prompt": int(prompt.max()),
        "max_response": int(response.max()),
        "max_total": width,
        "pairs_stepwise": int((length * (length + 1) // 2).sum()),
        "pairs_merged": int((merged * (merged + 1) // 2).sum()),
        "pairs_tree": tree_pairs,
        "pairs_padded_left": n * (width * (width + 1) // 2),
    }


QWEN3_4B = {
    "layers": 36,
    "hidden": 2560,
    "heads": 32,
    "head_dim": 128,
    "kv": 8,
    "inter": 9728,
    "vocab": 151_936,
}


def flops(tokens: float, pairs: float, head_tokens: float | None = None, m: Mapping[str, int] = QWEN3_4B) -> float:
    """Return the forward and backward FLOPs of a model `m`.

    Args:
        tokens: Number of tokens.
        pairs: Number of causal (query, key) pairs.
        head_tokens: Number of output rows; None means `tokens`.
        m: Sizes of the model.
    """
    h, d = m["hidden"], m["head_dim"]
    linear = m["layers"] * (2 * h * d * (2 * m["heads"] + 2 * m["kv"]) + 2 * 3 * h * m["inter"])
    attention = m["layers"] * 4 * m["heads"] * d
    head = 2 * h * m["vocab"]
    return 3 * (tokens * linear + pairs * attention + (tokens if head_tokens is None else head_tokens) * head)


def imbalance(rows_cost: ArrayLike) -> float:
    """Return (max - min) / mean over rows; 0 is balanced."""
    cost = np.asarray(rows_cost, float)
    return float((cost.max() - cost.min()) / cost.mean())


def straggler(rows_cost: ArrayLike) -> float:
    """Return max / mean over rows: the factor in wall time that a synchronous step pays."""
    cost = np.asarray(rows_cost, float)
    return float(cost.max() / cost.mean())
