"""Plans of other kits for `benchmarks.planning`: the samples that each rank computes in each micro-batch.

verl: `get_seqlen_balanced_partitions` on its workloads, for each mini-batch of fixed size, or for all samples and
then `rearrange_micro_batches` on each rank. skyrl: a contiguous share for each rank, then its balanced token packer.
trl: `TokenBudgetBatcher`, which counts a shared prefix once; samples that it hasn't emitted when the input ends are
lost.
"""

import importlib.util
import os
from typing import Any

import numpy as np
import torch

from benchmarks.harness import load_workloads
from benchmarks.peers.serve import Ways, serve, work

Plan = list[list[list[int]]]
"""Samples by rank and micro-batch; a micro-batch without samples is padding."""


def verl_fixed(lengths: list[int], ranks: int, rows: int) -> Plan:
    """Plan `rows` samples per rank: neighbors are distributed over the ranks."""
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    plan: Plan = [[] for _ in range(ranks)]
    for start in range(0, len(lengths), ranks * rows):
        work_of = calculate_workload(torch.tensor(lengths[start : start + ranks * rows])).tolist()
        for rank, part in enumerate(get_seqlen_balanced_partitions(work_of, ranks, equal_size=True)):
            plan[rank].append([start + i for i in part])
    return plan


def verl_budget(lengths: list[int], ranks: int, budget: int) -> Plan:
    """Distribute all samples over the ranks; each makes as many micro-batches as the one that needs most."""
    from tensordict import TensorDict
    from verl.utils.seqlen_balancing import (
        calculate_workload,
        get_seqlen_balanced_partitions,
        rearrange_micro_batches,
    )

    length = torch.tensor(lengths)
    shares = get_seqlen_balanced_partitions(calculate_workload(length).tolist(), ranks, equal_size=True)
    count = max(-(-int(length[share].sum()) // budget) for share in shares)
    while True:
        plan = []
        for share in shares:
            mask = torch.arange(int(length.max())) < length[share][:, None]
            batch = TensorDict({"input_ids": torch.zeros(len(share), 1), "attention_mask": mask}, len(share))
            _, micro = rearrange_micro_batches(batch, budget, min_num_micro_batch=count)
            plan.append([[share[i] for i in part] for part in micro])
        if len({len(micro) for micro in plan}) == 1:
            return plan
        count = max(map(len, plan))


def skyrl_budget(lengths: list[int], ranks: int, budget: int) -> Plan:
    """Let each rank pack its contiguous share; ranks with fewer micro-batches get empty ones."""
    from skyrl.train.dataset.bin_packing import make_seq_packer

    packer = make_seq_packer("balanced", bin_capacity=budget)
    size = -(-len(lengths) // ranks)
    plan = []
    for start in range(0, len(lengths), size):
        bins = packer.pack(lengths[start : start + size])
        plan.append([[start + i for i in part] for part in bins])
    most = max(map(len, plan))
    return [micro + [[]] * (most - len(micro)) for micro in plan]


def trl_budget(samples: list[dict[str, Any]], ranks: int, budget: int) -> Plan:
    """Return the rows that trl's planner emits, as the samples' numbers."""
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    plan: Plan = [[] for _ in range(ranks)]
    metrics: dict[str, list[float]] = {"batch/dropped_oversize_total": []}
    for rows in TokenBudgetBatcher(samples, ranks, budget, metrics):
        for rank, row in enumerate(rows):
            plan[rank].append([sample["number"] for sample in row.samples])
    return plan


def trl_samples(module: Any, seed: int, count: int) -> list[dict[str, Any]]:
    """Return the first samples in the order of their groups, as trl's queue emits them."""
    prompt, completion, group = module.rl_lengths(seed=seed)
    rng = np.random.default_rng([seed, 6])
    prompts = {g: rng.integers(0, 151_000, n) for g, n in zip(group.tolist(), prompt.tolist(), strict=True)}
    samples = []
    for number, (g, p, c) in enumerate(zip(*(x[:count].tolist() for x in (group, prompt, completion)), strict=True)):
        ids = np.concatenate([prompts[g], rng.integers(0, 151_000, c)])
        mask = np.arange(p + c) >= p
        samples.append(
            {
                "input_ids": torch.from_numpy(ids),
                "completion_mask": torch.from_numpy(mask.astype(np.int64)),
                "group_id": g,
                "number": number,
            }
        )
    return samples


def main() -> None:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    asked = work()
    module = load_workloads(asked["workloads"])
    prompt, completion, _ = module.rl_lengths(seed=asked["seed"])
    lengths = (prompt + completion).tolist()
    ranks, rows, budget = asked["ranks"], asked["rows"], asked["budget"]
    ways: dict[str, Any] = {}
    if importlib.util.find_spec("verl"):
        ways["verl_fixed"] = (lambda: verl_fixed(lengths, ranks, rows), list)
        ways["verl_budget"] = (lambda: verl_budget(lengths, ranks, budget), list)
    if importlib.util.find_spec("skyrl"):
        ways["skyrl_budget"] = (lambda: skyrl_budget(lengths, ranks, budget), list)
    if importlib.util.find_spec("trl"):
        samples = trl_samples(module, asked["seed"], asked["trl_samples"])
        ways["trl_budget"] = (lambda: trl_budget(samples, ranks, budget), list)
    ready: Ways = ways
    serve(ready)


if __name__ == "__main__":
    main()
