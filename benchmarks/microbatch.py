"""Memory and CPU time of a training step by the size of its micro-batches, for a model of SmolLM2-135M's shape.

`python -m benchmarks.microbatch [--json]` trains random weights in float32 with an adapter of rank 16 on 64 samples of
about 107 tokens, in 8 groups: once with the default size, once with micro-batches of 4,096 tokens, each in a new
process. The second takes 9 GiB of memory.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentgym.train.config import TrainConfig
from agentgym.train.trainer import Trainer
from agentgym.types.sample import Sample
from benchmarks.harness import Goal, at_most, fresh, over, process_peak_mib, report, report_parser

LARGE = 4096
GROUPS, GROUP_SIZE, PROMPT = 8, 8, 47
SHAPE = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


def samples(step: int) -> list[Sample]:
    """Return a step's samples: groups with a common prompt, and responses of 54 to 66 tokens."""
    rng = np.random.default_rng(step)
    found = []
    for group in range(GROUPS):
        prompt = rng.integers(3, SHAPE.vocab_size, PROMPT)
        for number in range(GROUP_SIZE):
            size = int(rng.integers(54, 67))
            found.append(
                Sample(
                    group_id=f"s{step}g{group}",
                    rollout_id=f"s{step}g{group}r{number}",
                    segment=0,
                    step=0,
                    prompt_ids=prompt,
                    response_ids=rng.integers(3, SHAPE.vocab_size, size),
                    loss_mask=np.ones(size, np.bool_),
                    logprobs=np.full(size, -10.8, np.float32),
                    advantages=np.full(size, (-1.0) ** number, np.float32),
                    weight=1.0,
                )
            )
    return found


def measured(model: str, tokens: int | None) -> dict[str, float]:
    """Train one step in this process, and return its cost; `tokens` None is the default size of a micro-batch."""
    with Trainer(model, TrainConfig(max_tokens_per_microbatch=tokens, threads=1, device="cpu")) as trainer:
        began = time.process_time()
        stats = trainer.train(samples(0))
        seconds = time.process_time() - began
        memory = trainer.describe().memory
        return {
            "tokens": float(trainer.config.max_tokens_per_microbatch or 0),
            "cpu_s": seconds,
            "peak_gib": process_peak_mib() / 1024,
            "estimate_gib": memory.needed / 2**30,
            "grad_norm": stats["train/grad_norm"],
        }


def goals(figures: dict[str, float]) -> dict[str, Goal]:
    """Return the goals: the default size needs little memory, and no more time than the large one."""
    gap = abs(figures["default_grad_norm"] / figures["large_grad_norm"] - 1)
    return {
        "peak memory with the default, GiB": at_most(figures["default_peak_gib"], 5),
        "CPU s with the default / with 4,096 tokens": at_most(over(figures, "default_cpu_s", "large_cpu_s"), 1.05),
        "relative difference of the gradient norm": at_most(gap, 1e-4),
    }


def main() -> None:
    args = report_parser(__doc__ or "").parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(SHAPE).save_pretrained(Path(folder))
        for name, tokens in (("default", None), ("large", LARGE)):
            found = fresh(measured, folder, tokens)
            figures |= {f"{name}_{what}": value for what, value in found.items()}
    report("microbatch", figures=figures, reference={}, goals=goals(figures), as_json=args.json)


if __name__ == "__main__":
    main()
