"""Samples per CPU second and peak memory of a whole GRPO step, generation included, beside TRL's GRPOTrainer.

`python -m benchmarks.train [--json] [--workloads FILE.py] [--seed N] [--peers VENV] [--shapes 64x2 128x4 512x6]`

16 completions of 128 tokens a step, in groups of 8; a Qwen3 with random weights; an adapter of rank 16 on every linear
layer; one thread. Ours is the loop of a run: rollouts through the embedded engine, samples, the trainer, the adapter
back into the engine and proved there. TRL trains the same adapter, and in a second run, for comparison, all parameters,
which spares it the adapter's modules in generation. Each run is a process of its own: peak memory is the process's,
interpreter included.
TRL is in an environment of its own, which `make bench-peers` makes; without it the goals are not measured: they are
against TRL's run with the same model, the same adapter and as many tokens, and against nothing else.
"""

import asyncio
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

import agentgym as ag
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.environments.env import Split
from benchmarks.harness import Goal, argument_parser, at_least, at_most, fresh, load_workloads, process_peak_mib, report

TOKENIZER = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase"
BATCH, GROUP, NEW_TOKENS, LR = 16, 8, 128, 1e-3
STEPS, WARM, ROUNDS = 10, 2, 2
"""Steps of a run, how many of the first are not counted, and runs of each, in turns; the best one counts."""
SHRINK, ROOM = 4, 96
"""The workload's prompts are divided by this, and cut to so many ids."""
SHAPES = {"64x2": (64, 2), "128x4": (128, 4), "512x6": (512, 6)}
"""Hidden size and layers: 0.14, 0.9 and 21 million weights."""
LONG = {"512x6": (1, 5)}
"""Rounds of a shape that takes minutes, and steps of a run."""


class Ran(NamedTuple):
    """One run: samples per CPU second of its steps, and the peak memory of its process."""

    samples_per_cpu_s: float
    peak_mib: float


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """A random Qwen3 that ends no turn by itself, and the bundled tokenizer."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts(workloads: Path | None, seed: int) -> list[str]:
    """One text for each group, a quarter as long as the workload's prompts are, or as there is room for."""
    lengths, _, _ = load_workloads(workloads).rl_lengths(seed=seed, n=STEPS * BATCH, group=GROUP)
    dice = random.Random(seed)
    return [  # two digits and a space are three ids of the tokenizer
        " ".join(str(dice.randrange(10, 100)) for _ in range(min(int(ids) // SHRINK, ROOM) // 3))
        for ids in lengths[::GROUP]
    ]


# Ours


class Chatter(ag.Env[ag.Task]):
    """One turn, worth a random number: what is measured is the work."""

    limits = ag.Limits(turns=1, turn_tokens=NEW_TOKENS, context_tokens=512)
    texts: Sequence[str] = ()
    dice = random.Random(0)

    @classmethod
    def tasks(cls, split: Split) -> list[ag.Task]:
        return [ag.Task(id=f"{i}", prompt=(ag.Message(role="user", content=text),)) for i, text in enumerate(cls.texts)]

    async def score(self) -> dict[str, float]:
        return {"random": self.dice.random()}


async def steps(folder: Path) -> list[float]:
    """CPU seconds of each step of the real loop."""
    spent = []
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(folder, eos_token=None))  # no turn ends early
    train = ag.TrainConfig(lr=LR, normalise=float(BATCH * NEW_TOKENS), layout="tree", device="cpu")
    async with (
        ag.LocalEngine(model, ag.LocalConfig(slots=BATCH, context_tokens=256), tokenizer=tokenizer) as engine,
        ag.Trainer(folder, train) as trainer,
    ):
        play = ag.Collector(Chatter, engine, trainer, None, ag.Sampling(), concurrency=BATCH)
        sync: ag.WeightSync | None = None
        async with play.schedule(BATCH // GROUP, n=GROUP) as rollouts:
            for step in range(len(Chatter.texts) * GROUP // BATCH):
                began = time.process_time()
                groups = await rollouts.collect()
                batch = ag.build_samples(groups)
                await trainer.step(batch)
                probe = groups.rollouts[0].segments[0].token_ids.tolist()
                sync = sync or ag.WeightSync(trainer, engine, probe, ag.Sampling())
                await sync(step + 1)
                spent.append(time.process_time() - began)
                if batch.trained_tokens != BATCH * NEW_TOKENS:
                    raise RuntimeError(f"trained on {batch.trained_tokens} tokens of {BATCH * NEW_TOKENS}")
    return spent


def ours(folder: Path, texts: Sequence[str]) -> Ran:
    """In a process of its own."""
    torch.set_num_threads(1)
    Chatter.texts = texts
    return ran(asyncio.run(steps(folder)), process_peak_mib())


# TRL's


def trl(folder: Path, texts: Sequence[str], venv: Path, *, lora: bool) -> Ran:
    """The same work by TRL, in its own environment."""
    work = {
        "batch": BATCH,
        "group": GROUP,
        "new_tokens": NEW_TOKENS,
        "steps": len(texts) * GROUP // BATCH,
        "lr": LR,
        "lora": lora,
    }
    (folder / "work.json").write_text(json.dumps(work | {"prompts": list(texts)}))
    script = Path(__file__).with_name("theirs.py")
    done = subprocess.run(
        # -P: the modules beside the script, such as http, would hide those of the standard library.
        [venv / "bin" / "python", "-P", script, folder, folder / "work.json"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} failed: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if said["new_tokens"] != NEW_TOKENS:
        raise RuntimeError(f"TRL sampled {said['new_tokens']} tokens of {NEW_TOKENS}")
    return ran(said["cpu_s"], said["peak_mib"])


def ran(cpu_s: Sequence[float], peak_mib: float) -> Ran:
    return Ran(BATCH / statistics.median(cpu_s[WARM:]), peak_mib)


def measure(shape: str, texts: Sequence[str], venv: Path | None) -> dict[str, float]:
    """Everybody on one model, in turns."""
    rounds, taken = LONG.get(shape, (ROUNDS, STEPS))
    texts = texts[: taken * BATCH // GROUP]
    found: dict[str, list[Ran]] = {"ours": [], "trl_lora": [], "trl_full": []}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_model(folder, *SHAPES[shape])
        for _ in range(rounds):
            found["ours"].append(fresh(ours, folder, texts))
            if venv is not None:
                found["trl_lora"].append(trl(folder, texts, venv, lora=True))
                found["trl_full"].append(trl(folder, texts, venv, lora=False))
    figures = {}
    for name, runs in found.items():
        if runs:
            figures[f"{shape}_{name}_samples_per_cpu_s"] = max(run.samples_per_cpu_s for run in runs)
            figures[f"{shape}_{name}_peak_mib"] = min(run.peak_mib for run in runs)
    return figures


def goals(figures: dict[str, float], shapes: Sequence[str] = tuple(SHAPES)) -> dict[str, Goal]:
    """Against TRL's run of the same work; not measured where there is none, whatever else was."""
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
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="the last takes minutes")
    args = parser.parse_args()
    venv = args.peers if (args.peers / "bin" / "python").exists() else None
    texts = prompts(args.workloads, args.seed)
    figures: dict[str, float] = {}
    for shape in args.shapes:
        figures |= measure(shape, texts, venv)
    report(
        "train",
        figures=figures,
        reference={"trl": "measured" if venv else f"not measured: {args.peers} is no environment"},
        goals=goals(figures, args.shapes),
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
