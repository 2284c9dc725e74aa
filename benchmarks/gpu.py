"""Tokens per second, MFU and peak memory of training on a GPU, by layout, with and without activation checkpointing.

`python -m benchmarks.gpu [--json] [--dry-run] [--quick] [--shard] [--peak-tflops N] [--workloads FILE.py] [--seed N]`

A Qwen3 with the shape of the 1.7B model, random weights, bfloat16, and an adapter of rank 16; completions of log-normal
length (`rl_lengths`) in groups of 8; rows of 16,384 tokens. Steps are those of the real trainer. Only the samples' own
tokens count, prompts included. Padding doesn't count as work. A prompt that a tree computes once counts once per sample
in tokens per second, and once in MFU. `--dry-run` does everything in tiny shapes on the CPU. Each result is also
printed to stderr as soon as it is known. A case that fails is reported there and left out.
"""

import gc
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

import agentgym as ag
from agentgym.train import Trainer
from agentgym.train.batching.layouts import Layout
from agentgym.train.usage import TERA, peak_flops
from agentgym.types import Sample
from benchmarks.harness import Goal, at_least, at_most, load_workloads, process_peak_mib, report, report_parser

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "tree")
CHECKPOINTING = {"both": (False, True), "on": (True,), "off": (False,)}
QUICK_SAMPLES, QUICK_STEPS = 32, 3
REFERENCE: dict[str, float | str] = {"seed_padded_mfu": 0.064, "seed_packed_mfu": 0.088, "where": "batch 8, an H100"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the model, the workload and the rows."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    samples: int
    """A multiple of 8, the size of a group."""
    shrink: int
    """Divisor of the workload's lengths."""
    row_tokens: int
    steps: int
    """Steps of a case; the first two are not counted."""


REAL = Size(
    hidden=2048,
    intermediate=6144,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151_936,
    samples=128,
    shrink=1,
    row_tokens=16_384,
    steps=5,
)
DRY = Size(
    hidden=64,
    intermediate=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=512,
    samples=16,
    shrink=32,
    row_tokens=512,
    steps=3,
)


def make_model(folder: Path, size: Size, device: str = "cpu") -> None:
    """Write a bfloat16 model with random weights, which are drawn on the device."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        pad_token_id=0,
        dtype="bfloat16",
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def make_samples(workloads: Path | None, seed: int, size: Size) -> list[Sample]:
    """Return samples with the workload's lengths and random ids; groups of 8 share their prompt."""
    prompt, completion, group = load_workloads(workloads).rl_lengths(seed=seed, n=size.samples)
    rng = np.random.default_rng(seed)
    shared = {
        int(g): rng.integers(1, size.vocabulary, max(p // size.shrink, 2)) for g, p in zip(group, prompt, strict=True)
    }
    return [
        sample(i, int(g), shared[int(g)], int(n) // size.shrink, rng, size)
        for i, (g, n) in enumerate(zip(group, completion, strict=True))
    ]


def sample(i: int, group: int, prompt: Any, count: int, rng: np.random.Generator, size: Size) -> Sample:
    """Return one rollout of one turn, with an advantage of 1 or -1."""
    count = max(count, 1)
    return Sample(
        group_id=f"{group}",
        rollout_id=f"{i}",
        segment=0,
        step=0,
        prompt_ids=prompt,
        response_ids=rng.integers(1, size.vocabulary, count),
        loss_mask=np.ones(count, np.bool_),
        logprobs=np.full(count, -np.log(size.vocabulary)),
        advantages=np.full(count, float(rng.choice([-1, 1]))),
        weight=1.0,
    )


def flops(rows: Sequence[Sample], size: Size, *, shared: bool) -> float:
    """Return the FLOPs of training an adapter on these rows, without recomputation.

    With `shared`, a group's prompt counts once.

    ::

        matrices     forward 2 per weight and token, backward 2 (to the inputs: frozen weights have no gradient)
        output layer the same, for trained tokens only
        attention    forward 4 x heads x head_dim per layer and pair of a token and one it sees; backward twice that

    The adapter's own FLOPs are under 2 % of that and left out; recomputation by checkpointing doesn't count as work.
    """
    attention = size.head_dim * (2 * size.heads + 2 * size.kv_heads) * size.hidden
    matrices = size.layers * (attention + 3 * size.hidden * size.intermediate)
    lengths = np.array([len(row) for row in rows], np.float64)
    prompts = np.array([len(row.prompt_ids) for row in rows], np.float64)
    tokens, pairs = lengths.sum(), (lengths * (lengths + 1) / 2).sum()
    if shared:
        first = np.unique([row.group_id for row in rows], return_index=True)[1]
        again = np.setdiff1d(np.arange(len(rows)), first)
        tokens -= prompts[again].sum()
        pairs -= (prompts[again] * (prompts[again] + 1) / 2).sum()
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    dense = 4 * (matrices * tokens + size.hidden * size.vocabulary * trained)
    return float(dense + 12 * size.layers * size.heads * size.head_dim * pairs)


def config(
    size: Size, layout: Layout, *, checkpointing: bool, dtype: Any = "bfloat16", device: str, shard: bool = False
) -> ag.TrainConfig:
    return ag.TrainConfig(
        lr=1e-4,
        dtype=dtype,
        layout=layout,
        gradient_checkpointing=checkpointing,
        max_tokens_per_microbatch=size.row_tokens,
        device=device,
        shard=shard,
    )


def step(folder: Path, rows: Sequence[Sample], train: ag.TrainConfig, size: Size) -> dict[str, float]:
    """Return the median seconds of a step and the peak memory, or {} if it doesn't fit the device or fails."""
    on_gpu = train.device == "cuda"
    if on_gpu:
        gc.collect()  # an earlier case's model is part of a reference cycle
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with Trainer(folder, train) as trainer:
            trained = [timed(trainer, rows, on_gpu=on_gpu) for _ in range(size.steps)]
    except torch.OutOfMemoryError as error:
        log(f"out of memory: {error}")
        return {}
    except Exception:
        log(traceback.format_exc())
        return {}
    peaks = [peak for _, peak in trained]
    found = {"seconds": statistics.median(seconds for seconds, _ in trained[min(2, size.steps - 1) :])}
    found["peak_mib"] = max(peaks) if on_gpu else process_peak_mib()
    return found | ({"reserved_mib": torch.cuda.max_memory_reserved() / 2**20} if on_gpu else {})


def timed(trainer: Trainer, rows: Sequence[Sample], *, on_gpu: bool) -> tuple[float, float]:
    """Return the seconds of a step and the peak GPU memory during it in MiB, which is 0 on a CPU."""
    began = time.perf_counter()
    figures = trainer.train(rows)
    if on_gpu:
        torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - began, 1024 * figures.get("train/gpu_memory_gib", 0.0)
    log(f"  a step: {seconds:.2f} s, {peak:,.0f} MiB")
    return seconds, peak


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def speeds(
    folder: Path,
    rows: Sequence[Sample],
    size: Size,
    device: str,
    peak: float | None,
    *,
    layouts: Sequence[Layout] = LAYOUTS,
    checkpointing: Sequence[bool] = (False, True),
    shard: bool = False,
) -> dict[str, float]:
    """Measure each layout with and without checkpointing; cases that don't fit or fail are left out."""
    figures: dict[str, float] = {}
    tokens = sum(map(len, rows))
    for layout, again in product(layouts, checkpointing):
        name = f"{layout}{'_sharded' if shard else ''}{'_checkpointed' if again else ''}"
        log(name)
        found = step(folder, rows, config(size, layout, checkpointing=again, device=device, shard=shard), size)
        if not found:
            continue
        work = flops(rows, size, shared=layout == "tree")
        seconds = found.pop("seconds")
        figures |= {f"{name}_{what}": value for what, value in found.items()}
        figures[f"{name}_tokens_per_s"] = tokens / seconds
        if peak is not None:
            figures[f"{name}_mfu"] = work / seconds / (peak * 1e12)
    return figures


def parity(folder: Path, rows: Sequence[Sample], size: Size, device: str) -> dict[str, float]:
    """Return the difference of the tree layout (FlexAttention on a GPU) from left-padded rows (SDPA), in float32.

    The values are the largest difference of a log-probability in nats, and the relative differences of the loss and the
    gradient norm.
    """
    base = config(size, "padded", checkpointing=True, dtype="float32", device=device)
    with Trainer(folder, base) as trainer:
        scored = [replace(row, logprobs=scores(trainer, row)) for row in rows]
        padded = trainer.train(scored)
    with Trainer(folder, replace(base, layout="tree")) as trainer:
        tree = trainer.train(scored)
    figures = {"tree_parity_logprob_gap": tree["train/logprob_gap"]}
    for name in ("loss", "grad_norm"):
        one, other = padded[f"train/{name}"], tree[f"train/{name}"]
        figures[f"tree_parity_{name}_off"] = abs(one - other) / max(abs(one), 1e-9)
    return figures


def scores(trainer: Trainer, row: Sample) -> Any:
    ids = np.concatenate([row.prompt_ids, row.response_ids]).tolist()
    return trainer.score(ids, sampling=ag.Sampling())[-len(row.response_ids) :]


def goals(figures: dict[str, float], *, on_gpu: bool) -> dict[str, Goal]:
    """Return the goals: parity on any device, speed only on a GPU. A missing value was not measured."""
    met = {
        "tree / padded rows, log-probability gap": at_most(figures.get("tree_parity_logprob_gap"), 1e-4),
        "tree / padded rows, gradient norm": at_most(figures.get("tree_parity_grad_norm_off"), 1e-4),
    }
    if on_gpu:
        packed, padded = (best(figures, layout, "tokens_per_s") for layout in ("packed", "padded"))
        met["packed / padded, tokens/s"] = at_least(packed / padded if packed and padded else None, 1.6)
        met["MFU of packed rows of 16,384 tokens"] = at_least(best(figures, "packed", "mfu"), 0.35)
    return met


def best(figures: dict[str, float], layout: Layout, what: str) -> float | None:
    """Return the layout's largest value of that kind, or None if there is none."""
    found = [value for name, value in figures.items() if name.startswith(layout) and name.endswith(f"_{what}")]
    return max(found, default=None)


def peak_tflops(device: str) -> float | None:
    """Return the stated peak TFLOP/s of a GPU by its name, or None for a CPU or a GPU whose peak is unknown."""
    peak = peak_flops(torch.device(device))
    return None if peak is None else peak / TERA


def main() -> None:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--dry-run", action="store_true", help="run tiny shapes on the CPU; the figures mean nothing")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_SAMPLES} samples, and {QUICK_STEPS} steps, of which one counts"
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=LAYOUTS,
        metavar="LAYOUT",
        help="layouts to measure (default: all)",
    )
    parser.add_argument("--checkpointing", choices=CHECKPOINTING, default="both")
    parser.add_argument(
        "--shard", action="store_true", help="shard the model with FSDP2, which computes everything in bfloat16"
    )
    parser.add_argument("--no-parity", action="store_true", help="leave out the comparison in float32")
    parser.add_argument(
        "--peak-tflops", type=float, default=None, help="peak of the GPU, dense bfloat16 (default: by its name)"
    )
    parser.add_argument("--workloads", type=Path, default=None, metavar="FILE.py", help="use these workloads")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no GPU found; --dry-run does the same in tiny shapes on the CPU")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    size, device = (DRY, "cpu") if args.dry_run else (REAL, "cuda")
    if args.quick:
        size = replace(size, samples=min(size.samples, QUICK_SAMPLES), steps=min(size.steps, QUICK_STEPS))
    rows = make_samples(args.workloads, args.seed, size)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), size, device)
        figures = speeds(
            Path(folder),
            rows,
            size,
            device,
            args.peak_tflops or peak_tflops(device),
            layouts=args.layouts,
            checkpointing=CHECKPOINTING[args.checkpointing],
            shard=args.shard,
        )
        if not args.no_parity:
            figures |= parity(Path(folder), rows[:8], size, device)
    report(
        "gpu",
        figures=figures,
        reference=REFERENCE | {"device": "dry run" if args.dry_run else torch.cuda.get_device_name()},
        goals=goals(figures, on_gpu=device == "cuda"),
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
