"""A forward and backward of a small model over step samples, in one of the layouts."""

import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from agentgym.samples import merge
from agentgym.train.attention import attend_in_rows
from agentgym.train.batch import collate
from agentgym.train.layout import Layout
from agentgym.train.model import PolicyModel, load_policy
from agentgym.train.tree import prefix_order
from agentgym.types import Sample
from recipes.bench.harness import cost, load_workloads
from recipes.bench.rows import make_samples

WORKLOAD = {"n_traj": 16, "turns": 8, "max_len": 1024, "prompt_median": 128}
"""Two groups of 8 rollouts of 8 turns: the lengths of the large workload, an eighth of them."""
VOCAB = 512
"""The output layer is a tenth of the model's work, as in one of 4 B parameters."""
MICRO_TOKENS = 16_384


def forward_backward(workloads: Path | None, seed: int, layout: Layout, what: str) -> dict[str, float]:
    """Tokens, CPU and wall seconds and MiB of collating, forward and backward of all samples.

    `what` is "turns" (a sample per turn), "merged" (the same, merged in the time that is measured) or "whole" (samples
    that are whole trajectories from the start).
    """
    torch.set_num_threads(1)
    policy, rows = _policy(layout), _rows(workloads, seed)
    if what == "whole":
        rows = merge(rows)
    walls, tokens = [], []

    def step() -> None:
        began = time.perf_counter()
        tokens.append(_step(policy, merge(rows) if what == "merged" else rows, layout))
        walls.append(time.perf_counter() - began)

    spent = cost(step, runs=2)
    return {"tokens": tokens[0], "cpu_s": spent.cpu_s, "wall_s": min(walls), "peak_mib": spent.peak_mib}


def _step(policy: PolicyModel, rows: Sequence[Sample], layout: Layout) -> float:
    """Gradients of a sum over the trained tokens; the tokens that were computed."""
    computed = 0
    for part in _micro_batches(rows, layout):
        batch = collate([rows[i] for i in part], pad_id=0, layout=layout)
        logprobs_BR, _ = policy(batch.inputs, batch.loss_mask_BR)
        (logprobs_BR * batch.loss_mask_BR).sum().backward()
        computed += batch.inputs.input_ids_BT.numel()
    policy.zero_grad()
    return float(computed)


def _micro_batches(rows: Sequence[Sample], layout: Layout) -> list[Sequence[int]]:
    """Indices of samples whose tokens, as this layout counts them, are at most MICRO_TOKENS."""
    if layout == "tree":
        return [part.tolist() for part in prefix_order(rows).cuts(MICRO_TOKENS)]
    parts: list[list[int]] = []
    used = MICRO_TOKENS
    for i in sorted(range(len(rows)), key=lambda i: -len(rows[i])):
        size = len(rows[parts[-1][0]]) if parts and layout == "padded" else len(rows[i])
        if used + size > MICRO_TOKENS:
            parts.append([])
            used = 0
        parts[-1].append(i)
        used += size
    return list(parts)


def _rows(workloads: Path | None, seed: int) -> list[Sample]:
    rows = make_samples(load_workloads(workloads).stepwise(seed=seed, **WORKLOAD))
    return [replace(row, prompt_ids=row.prompt_ids % VOCAB, response_ids=row.response_ids % VOCAB) for row in rows]


def _policy(layout: Layout) -> PolicyModel:
    """A random Qwen3 with a LoRA adapter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Qwen3ForCausalLM(config).save_pretrained(folder)
        policy = load_policy(folder, dtype=torch.float32, rank=16, alpha=32, seed=0)
    if layout != "padded":
        attend_in_rows(policy.causal)
    return policy
