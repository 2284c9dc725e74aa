"""Padded tokens, CPU seconds and memory of turning step samples into one left-padded block.

`python -m recipes.bench.layout [--json] [--workloads FILE.py] [--seed N]`
"""

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentgym.samples import merge
from agentgym.train.batch import collate
from agentgym.types import Sample
from recipes.bench.harness import Cost, arguments, at_least, at_most, cost, fresh, load_workloads, report

REFERENCE: dict[str, float | str] = {
    "skyrl_left_pad_cpu_s": 9.5,
    "skyrl_left_pad_peak_mib": 1725.0,
    "skyrl_merge_left_pad_cpu_s": 2.2,
    "skyrl_merge_left_pad_peak_mib": 394.0,
    "numpy_bound_cpu_s": 1.09,
    "numpy_bound_peak_mib": 984.0,
    "published_memory_ratio": 1.37,
    "where": "4,096 samples, one thread",
}


def make_samples(batch: Any) -> list[Sample]:
    """The workload's rows as samples, from Python lists; the reward stands in for the advantage."""
    masks = [np.frombuffer(bytes(mask), np.bool_) for mask in batch.loss_masks]
    trained = np.array([mask.sum() for mask in masks])
    tokens = np.bincount(batch.traj, trained)
    return [
        Sample(
            group_id=str(batch.group[i]),
            rollout_id=str(batch.traj[i]),
            segment=int(batch.segment[i]),
            step=i,
            # array() reads a list of numbers in half the time of numpy
            prompt_ids=np.frombuffer(array("q", batch.prompts[i]), np.int64),
            response_ids=np.frombuffer(array("q", batch.responses[i]), np.int64),
            loss_mask=masks[i],
            logprobs=np.frombuffer(array("f", batch.logprobs[i]), np.float32),
            advantages=np.frombuffer(array("f", batch.rewards[i]), np.float32),
            weight=float(trained[i] / tokens[batch.traj[i]]),
            policy_version=0,
            is_last=bool(batch.is_last[i]),
        )
        for i in range(len(batch))
    ]


def from_lists(workloads: Path | None, seed: int, preset: str) -> Cost:
    """Cost of lists of numbers to one block: what the peers' figures are of."""
    torch.set_num_threads(1)
    module = load_workloads(workloads)
    batch = module.stepwise(seed=seed, **module.STEP_PRESETS[preset])
    return cost(lambda: collate(make_samples(batch), pad_id=module.PAD))


def from_samples(workloads: Path | None, seed: int, preset: str, merged: bool) -> tuple[Cost, dict[str, int]]:
    """Cost and size of samples to one block: what a training step pays."""
    torch.set_num_threads(1)
    module = load_workloads(workloads)
    rows = make_samples(module.stepwise(seed=seed, **module.STEP_PRESETS[preset]))

    def block() -> torch.Tensor:
        return collate(merge(rows) if merged else rows, pad_id=module.PAD).inputs.input_ids_BT

    prompt, response = [len(row.prompt_ids) for row in rows], [len(row.response_ids) for row in rows]
    return cost(block), {
        "real_tokens": sum(prompt) + sum(response),
        "two_segment_tokens": len(rows) * (max(prompt) + max(response)),
        "left_padded_tokens": block().numel(),
    }


def main() -> None:
    args = arguments(__doc__ or "")
    figures: dict[str, float] = {}
    for preset in ("skyrl", "agentic"):
        for way in ("padded", "merged"):
            spent, size = fresh(from_samples, args.workloads, args.seed, preset, way == "merged")
            figures |= {f"{preset}_{way}_{name}": float(value) for name, value in size.items()}
            figures |= {f"{preset}_{way}_cpu_s": spent.cpu_s, f"{preset}_{way}_peak_mib": spent.peak_mib}
    spent = fresh(from_lists, args.workloads, args.seed, "skyrl")
    figures |= {"skyrl_lists_cpu_s": spent.cpu_s, "skyrl_lists_peak_mib": spent.peak_mib}
    ratio = figures["skyrl_padded_two_segment_tokens"] / figures["skyrl_padded_left_padded_tokens"]
    report(
        "layout",
        figures=figures,
        reference=REFERENCE,
        goals={
            "two-segment / left-padded tokens": at_least(ratio, 1.35),
            "lists to block, CPU s (skyrl's / 6)": at_most(figures["skyrl_lists_cpu_s"], 9.5 / 6),
            "lists to block, peak MiB (skyrl's x .6)": at_most(figures["skyrl_lists_peak_mib"], 0.6 * 1725),
            "samples to block, CPU s (skyrl's / 6)": at_most(figures["skyrl_padded_cpu_s"], 9.5 / 6),
            "samples to block, peak MiB (skyrl's x .6)": at_most(figures["skyrl_padded_peak_mib"], 0.6 * 1725),
            "merge and block, CPU s (skyrl's)": at_most(figures["skyrl_merged_cpu_s"], 2.2),
        },
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
