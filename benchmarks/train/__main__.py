"""Samples per CPU second and peak memory of a whole GRPO step, generation included, compared with TRL's GRPOTrainer.

`python -m benchmarks.train [--json] [--workloads FILE.py] [--seed N] [--peers VENV] [--shapes 64x2 128x4 512x6]`

16 completions of 128 tokens per step, in groups of 8; a Qwen3 with random weights; an adapter of rank 16 on every
linear layer; one thread. Our side is the loop of a run: rollouts through the embedded engine, samples, the trainer,
the adapter back into the engine and checked there. TRL trains the same adapter, and in a second run, for comparison,
all parameters. Each run is a separate process, and peak memory is that of the process, interpreter included.

TRL is in a separate environment, which `make bench-peers` creates. Goals compare with TRL's run with the same model,
the same adapter and as many tokens, and with nothing else; without TRL they are not measured. If the trained weights,
dtypes, tokens, optimizer steps or threads of a run differ, the benchmark ends with an error.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Goal, argument_parser, at_least, at_most, fresh, report
from benchmarks.peers.turns import peers_python
from benchmarks.train.ours import (
    BATCH,
    GROUP,
    LR,
    NEW_TOKENS,
    ROUNDS,
    STEPS,
    Done,
    Ran,
    make_model,
    ours,
    prompts,
    ran,
)

SHAPES = {"64x2": (64, 2), "128x4": (128, 4), "512x6": (512, 6)}
"""Hidden size and layers: 0.14, 0.9 and 21 million weights."""
LONG = {"512x6": (1, 5)}
"""Rounds of a shape that takes minutes, and steps of a run."""


def trl(folder: Path, texts: Sequence[str], python: Path, *, lora: bool) -> Ran:
    """Do the same work with TRL, in its own environment."""
    work = {
        "batch": BATCH,
        "group": GROUP,
        "new_tokens": NEW_TOKENS,
        "steps": len(texts) * GROUP // BATCH,
        "lr": LR,
        "lora": lora,
    }
    (folder / "work.json").write_text(json.dumps(work | {"prompts": list(texts)}))
    done = subprocess.run(
        [python, "-m", "benchmarks.train.theirs", folder, folder / "work.json"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"TRL failed: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return ran(said["cpu_s"], said["peak_mib"], Done(**said["done"]))


def require_same(mine: Done, theirs: Done, *, lora: bool) -> None:
    """Check that both sides did the same work; without an adapter, only TRL's trained weights may differ.

    Raises:
        RuntimeError: If anything else differs, or the number of sampled tokens is wrong; the message names it.
    """
    for field in Done._fields:
        one, other = getattr(mine, field), getattr(theirs, field)
        if one != other and (lora or field != "trained_weights"):
            raise RuntimeError(f"{field}: expected equal work, got {one} on our side and {other} on TRL's")
    asked = [BATCH * NEW_TOKENS] * len(mine.sampled_tokens)
    if mine.sampled_tokens != asked:
        raise RuntimeError(f"sampled_tokens: expected {asked}, got {mine.sampled_tokens}")


def measure(shape: str, texts: Sequence[str], python: Path | None) -> dict[str, float]:
    """Measure all sides on one model, in turns."""
    rounds, taken = LONG.get(shape, (ROUNDS, STEPS))
    texts = texts[: taken * BATCH // GROUP]
    found: dict[str, list[Ran]] = {"ours": [], "trl_lora": [], "trl_full": []}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_model(folder, *SHAPES[shape])
        for _ in range(rounds):
            found["ours"].append(fresh(ours, folder, texts))
            if python is not None:
                for name, lora in (("trl_lora", True), ("trl_full", False)):
                    found[name].append(trl(folder, texts, python, lora=lora))
                    require_same(found["ours"][-1].done, found[name][-1].done, lora=lora)
    figures = {}
    for name, runs in found.items():
        if runs:
            figures[f"{shape}_{name}_samples_per_cpu_s"] = max(run.samples_per_cpu_s for run in runs)
            figures[f"{shape}_{name}_peak_mib"] = min(run.peak_mib for run in runs)
    return figures


def goals(figures: dict[str, float], shapes: Sequence[str] = tuple(SHAPES)) -> dict[str, Goal]:
    """Return the goals, which compare with TRL's run of the same work; without that run they are not measured."""
    met = {}
    for shape in shapes:
        for name, figure in (("samples per CPU s", "samples_per_cpu_s"), ("peak memory", "peak_mib")):
            peer = figures.get(f"{shape}_trl_lora_{figure}")
            ratio = None if peer is None else figures[f"{shape}_ours_{figure}"] / peer
            goal = at_least(ratio, 3.0) if figure == "samples_per_cpu_s" else at_most(ratio, 0.7)
            met[f"{shape}: {name} / trl's, the same adapter"] = goal
    return met


def main() -> None:
    parser = argument_parser(__doc__ or "", peers=True)
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=SHAPES,
        default=list(SHAPES),
        help="models by hidden size and layers; the last takes minutes",
    )
    args = parser.parse_args()
    python = peers_python(args.peers)
    texts = prompts(args.workloads, args.seed)
    figures: dict[str, float] = {}
    for shape in args.shapes:
        figures |= measure(shape, texts, python)
    report(
        "train",
        figures=figures,
        reference={"trl": "measured" if python else f"not measured: {args.peers} is not a virtual environment"},
        goals=goals(figures, args.shapes),
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
