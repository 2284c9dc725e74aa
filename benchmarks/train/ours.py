"""Steps of a run's real loop on a small model: our side of `benchmarks.train`, and code that both sides share."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

import agentgym as ag
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.environments.env import Split
from agentgym.run import Collector
from agentgym.samples import build_samples
from agentgym.scheduling import Schedule
from agentgym.train import Trainer
from agentgym.weight_sync import WeightSync
from benchmarks.harness import ROOT, load_workloads, process_peak_mib

TOKENIZER = ROOT / "recipes" / "checkpoints" / "chase"
BATCH, GROUP, NEW_TOKENS, LR = 16, 8, 128, 1e-3
STEPS, WARM, ROUNDS = 10, 2, 2
"""Steps of a run, how many of the first are not counted, and runs of each side, in turns; the best one counts."""
SHRINK, ROOM = 4, 96
"""Divisor of the workload's prompt lengths, and the number of ids they are then cut to."""


class Done(NamedTuple):
    """The work of a run: two runs are compared only if all of it is equal."""

    trained_weights: int
    dtypes: list[str]
    """Dtypes of all weights, trained or not."""
    sampled_tokens: list[int]
    """Sampled tokens of each step."""
    tokens: int
    """Tokens of all steps; a prompt counts once for each of its completions. The order of the prompts may differ."""
    optimizer_steps: int
    threads: int


class Ran(NamedTuple):
    """One run: samples per CPU second of its steps, the peak memory of its process, and the work that it did."""

    samples_per_cpu_s: float
    peak_mib: float
    done: Done


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a random Qwen3 that never ends a turn by itself, and the bundled tokenizer."""
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
    """Return one text per group, with a quarter of the workload's prompt length, or as long as fits."""
    lengths, _, _ = load_workloads(workloads).rl_lengths(seed=seed, n=STEPS * BATCH, group=GROUP)
    dice = random.Random(seed)
    return [  # two digits and a space are three ids of the tokenizer
        " ".join(str(dice.randrange(10, 100)) for _ in range(min(int(ids) // SHRINK, ROOM) // 3))
        for ids in lengths[::GROUP]
    ]


class Chatter(ag.Env[ag.Task]):
    """An env of one turn with a random reward, because only the work is measured."""

    limits = ag.Limits(turns=1, turn_tokens=NEW_TOKENS, context_tokens=512)
    texts: Sequence[str] = ()
    dice = random.Random(0)

    @classmethod
    def tasks(cls, split: Split) -> list[ag.Task]:
        return [ag.Task(id=f"{i}", prompt=(ag.Message(role="user", content=text),)) for i, text in enumerate(cls.texts)]

    async def step(self, action: ag.Message) -> ag.StepResult:
        return ag.StepResult([], 0.0, terminated=True, truncated=False, info={})

    async def score(self) -> dict[str, float]:
        return {"random": self.dice.random()}


async def steps(folder: Path) -> tuple[list[float], Done]:
    """Return the CPU seconds of each step of the real loop, and the work that it did."""
    spent, sampled, tokens = [], [], 0
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(folder))
    tokenizer.stop_ids = frozenset()  # no turn ends early
    train = ag.TrainConfig(lr=LR, loss_agg=float(BATCH * NEW_TOKENS), layout="tree", device="cpu")
    async with (
        ag.TransformersEngine(
            model, ag.TransformersConfig(slots=BATCH, context_tokens=256), tokenizer=tokenizer
        ) as engine,
        Trainer(folder, train) as trainer,
    ):
        play = Collector(Chatter, engine, trainer, None, ag.Sampling(), concurrency=BATCH)
        sync: WeightSync | None = None
        async with play.schedule(Schedule(prompts_per_step=BATCH // GROUP, group_size=GROUP)) as rollouts:
            for step in range(len(Chatter.texts) * GROUP // BATCH):
                began = time.process_time()
                groups = await rollouts.collect()
                batch = build_samples(groups)
                await trainer.step(batch)
                probe = groups.rollouts[0].segments[0].token_ids.tolist()
                sync = sync or WeightSync(trainer, engine, probe, ag.Sampling())
                await sync(step + 1)
                spent.append(time.process_time() - began)
                sampled.append(batch.trained_tokens)
                tokens += sum(len(sample) for sample in batch)
            weights = trainer.adapter().tensors.values()
            done = Done(
                trained_weights=sum(weight.numel() for weight in weights),
                dtypes=sorted({str(weight.dtype) for weight in [*weights, *model.parameters()]}),
                sampled_tokens=sampled,
                tokens=tokens,
                optimizer_steps=trainer.optimizer_steps,
                threads=torch.get_num_threads(),
            )
    return spent, done


def ours(folder: Path, texts: Sequence[str]) -> Ran:
    """Run the steps; called in a separate process."""
    torch.set_num_threads(1)
    Chatter.texts = texts
    spent, done = asyncio.run(steps(folder))
    return ran(spent, process_peak_mib(), done)


def ran(cpu_s: Sequence[float], peak_mib: float, done: Done) -> Ran:
    return Ran(BATCH / statistics.median(cpu_s[WARM:]), peak_mib, done)
