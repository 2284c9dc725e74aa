"""A forward and backward pass of a small model over step samples, in one of the layouts."""

import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from agentgym.train.batching.batch import collate
from agentgym.train.batching.layouts import Layout
from agentgym.train.batching.plan import cost_of, plan_step
from agentgym.train.policy.model import PolicyModel, load_policy
from agentgym.types.sample import Sample
from benchmarks.harness import load_workloads
from benchmarks.layout.merging import merge
from benchmarks.layout.rows import make_samples

WORKLOAD = {"n_traj": 16, "turns": 8, "max_len": 1024, "prompt_median": 128}
"""Two groups of 8 rollouts of 8 turns, with an eighth of the large workload's lengths."""
VOCAB = 512
"""Vocabulary size with which the output layer is a tenth of the model's work, as in a model of 4B parameters."""
HIDDEN = 128
MICRO_TOKENS = 16_384


WAYS: tuple[tuple[Layout, str], ...] = (
    ("padded", "turns"),
    ("padded", "whole"),
    ("packed", "turns"),
    ("packed", "merged"),
    ("packed", "whole"),
    ("tree", "turns"),
)
"""Layouts and their samples: one per turn, those merged within the measured time, or whole trajectories from the
start.
"""


def forward_backward(workloads: Path | None, seed: int, *, rounds: int = 3) -> dict[str, float]:
    """Return the tokens, and the least CPU and wall seconds, of planning, collation, forward and backward pass.

    All samples are trained on. The ways take turns, so that a busy machine slows all of them down.
    """
    torch.set_num_threads(1)
    policies = {layout: _policy(layout) for layout, _ in WAYS}
    turns = _rows(workloads, seed)
    whole = merge(turns)
    figures: dict[str, float] = {}
    for _ in range(rounds):
        for layout, what in WAYS:
            cpu, wall = time.process_time(), time.perf_counter()
            rows = {"turns": turns, "whole": whole}[what] if what != "merged" else merge(turns)
            tokens = _step(policies[layout], rows, layout)
            spent = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
            for name, value in spent.items():
                key = f"step_{layout}_{what}_{name}"
                figures[key] = min(value, figures.get(key, value))
            figures[f"step_{layout}_{what}_tokens"] = tokens
    return figures


def _step(policy: PolicyModel, rows: Sequence[Sample], layout: Layout) -> float:
    """Compute the gradients of a sum over the trained tokens, and return the number of tokens computed."""
    computed = 0
    (plan,) = plan_step(
        rows, ranks=1, layout=layout, max_tokens_per_microbatch=MICRO_TOKENS, cost=cost_of("flops", HIDDEN)
    )
    for micro in plan:
        batch = collate([rows[i] for i in micro], pad_id=0, layout=layout)
        logprobs_BR, _ = policy(batch.inputs, batch.loss_mask_BR)
        (logprobs_BR * batch.loss_mask_BR).sum().backward()
        computed += batch.inputs.input_ids_BT.numel()
    policy.zero_grad()
    return float(computed)


def _rows(workloads: Path | None, seed: int) -> list[Sample]:
    rows = make_samples(load_workloads(workloads).stepwise(seed=seed, **WORKLOAD))
    return [replace(row, prompt_ids=row.prompt_ids % VOCAB, response_ids=row.response_ids % VOCAB) for row in rows]


def _policy(layout: Layout) -> PolicyModel:
    """Return a random Qwen3 with a LoRA adapter."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
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
        return load_policy(folder, dtype=torch.float32, rank=16, alpha=32, seed=0, layout=layout)
