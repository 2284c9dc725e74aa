"""Create a tiny checkpoint from a seed: tokenizer, model and a warm start on sloppy demonstrations.

`python -m recipes.warm_start --env chase` takes about a minute on one core and writes the folder from which
`recipes/chase_grpo.py` starts. Demonstrations are real rollouts of the env by its demonstrator, so the model sees
exactly the tokens that it will be trained on later.
"""

import asyncio
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import agentgym as ag
from agentgym.chat.tokenizer import ChatTokenizer, HuggingFaceTokenizer
from agentgym.engines.scripted import ReplyPolicy, Scripted
from agentgym.samples import demonstrations
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.train.batching.batch import collate
from agentgym.train.config import TrainConfig
from agentgym.train.loss.objective import Objective
from agentgym.train.policy.model import PolicyModel
from agentgym.types import Sample
from envs.bisect import demo as bisect_demo
from envs.bisect.env import Bisect
from envs.chase import demo as chase_demo
from envs.chase.env import Chase, ChaseCompaction
from envs.tictactoe import demo as tictactoe_demo
from envs.tictactoe.env import TicTacToe
from recipes.base import CHECKPOINTS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
DEMO_TASKS = 500_000
"""Index of the first held-out task used for demonstrations, far after those that evaluations use."""

IMITATE = TrainConfig(loss="sft", loss_agg=1.0)
"""Sums a batch's losses. The sum is divided by the sum of their weights."""

console = Console(stderr=True)


@dataclass(frozen=True, kw_only=True)
class WarmStart:
    """Settings of `python -m recipes.warm_start`."""

    env: Literal["chase", "chase_compaction", "bisect", "tictactoe"] = "chase"
    """The env that is demonstrated."""
    output_dir: Path | None = None
    """Folder for the checkpoint; None writes to recipes/checkpoints/ENV."""
    seed: int = 0
    """Seed of the weights, the demonstrations and their order."""
    max_steps: int = 180
    """Number of optimizer steps."""
    batch: int = 32
    """Number of samples per step."""
    demos: int = 4000
    """Number of demonstrations."""
    context_weight: float = 0.1
    """Loss weight of tokens that the assistant didn't write; its own tokens have weight 1."""
    muon_lr: float = 0.02
    """Learning rate of the hidden matrices."""
    adamw_lr: float = 4e-3
    """Learning rate of embeddings and norms."""


@dataclass(frozen=True)
class Subject:
    """An env and its demonstrator."""

    env: type[ag.Env[Any]]
    demonstrate: Callable[[Any, random.Random], ReplyPolicy]


SUBJECTS: dict[str, Subject] = {
    "chase": Subject(Chase, chase_demo.demonstrate),
    "chase_compaction": Subject(
        ChaseCompaction, partial(chase_demo.demonstrate, sloppiness=chase_demo.Sloppiness(guess=0.35))
    ),
    "bisect": Subject(Bisect, bisect_demo.demonstrate),
    "tictactoe": Subject(TicTacToe.configured(illegal_moves=0), tictactoe_demo.demonstrate),
}


async def demonstrated(subject: Subject, tokenizer: ChatTokenizer, count: int, seed: int) -> list[ag.Rollout]:
    """Return `count` rollouts of the demonstrator, in the given tokenizer's ids."""
    tasks = subject.env.tasks("test")
    rollouts = []
    for i in track(range(count), f"{count} demonstrations", console=console, transient=True):
        task = tasks[DEMO_TASKS + i]
        policy = subject.demonstrate(task, random.Random(f"demonstration {seed} {i}"))
        rollouts.append(
            await ag.rollout(subject.env, task, Scripted(policy, tokenizer=tokenizer), sandboxes=FakeSandboxPool())
        )
        if rollouts[-1].failure is not None:
            raise SystemExit(f"warm_start: the demonstration of {task.id} failed: {rollouts[-1].error}")
    return rollouts


def make_tokenizer(texts: Sequence[str], vocabulary: int = 512) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with one token per digit, in which the fixed text of a call is only a few tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Copying a number is learnable if each digit is one token.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("\n", "isolated"),
            # No word splitting: merges may cross spaces and punctuation, so that a call's JSON is a few tokens.
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(MARKS),
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # The BPE trainer doesn't split special tokens out of its texts and would merge across them.
    marks = "|".join(map(re.escape, SPECIAL + MARKS))
    bpe.train_from_iterator([part for text in texts for part in re.split(marks, text) if part], trainer)
    bpe.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    return tokenizer


def make_model(vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 with about 0.4 M random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.05,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float()


def optimizers(model: torch.nn.Module, config: WarmStart) -> list[torch.optim.Optimizer]:
    """Return Muon for the hidden matrices and AdamW for embeddings and norms (Muon: Jordan et al., 2024)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name or "lm_head" in name]
    return [
        torch.optim.Muon(hidden, lr=config.muon_lr, momentum=0.9, weight_decay=0.0),
        torch.optim.AdamW(others, lr=config.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(step: int, steps: int) -> float:
    """Return the learning rate's factor: linear warmup over 20 steps times a cosine from 1 to 0.05."""
    return min(1.0, (step + 1) / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model: Qwen3ForCausalLM, data: Sequence[Sample], config: WarmStart) -> float:
    """Train all parameters on demonstrations; return the last batch's loss on the assistant's tokens, in nats."""
    order = random.Random(config.seed)
    policy = PolicyModel(model)
    optimizer = optimizers(model, config)
    rates = [[group["lr"] for group in o.param_groups] for o in optimizer]
    for step in track(range(config.max_steps), f"{config.max_steps} steps", console=console, transient=True):
        rows = order.sample(data, config.batch)
        batch = collate(rows, pad_id=0)
        objective = Objective(config=IMITATE, denominator=float(batch.advantages_BR.sum()))
        logprobs_BR, entropy_BR = policy(batch.inputs, batch.loss_mask_BR, entropy=False)
        loss, _ = objective(rows, batch, logprobs_BR, entropy_BR, None, None)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o, base in zip(optimizer, rates, strict=True):
            for group, rate in zip(o.param_groups, base, strict=True):
                group["lr"] = rate * schedule(step, config.max_steps)
            o.step()
            o.zero_grad(set_to_none=True)
    return -float(logprobs_BR.detach()[batch.advantages_BR == 1].mean())


async def main(config: WarmStart) -> None:
    torch.set_num_threads(1)
    subject = SUBJECTS[config.env]
    out = config.output_dir or CHECKPOINTS / config.env
    untrained = HuggingFaceTokenizer(make_tokenizer([], vocabulary=300))
    spoken = await demonstrated(subject, untrained, 150, seed=config.seed + 1)
    tokenizer = make_tokenizer([untrained.decode(s.token_ids.tolist()) for r in spoken for s in r.segments])
    rollout = await demonstrated(subject, HuggingFaceTokenizer(tokenizer), config.demos, seed=config.seed)
    model = make_model(len(tokenizer), config.seed)
    loss = train(model, demonstrations(rollout, context_weight=config.context_weight), config)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    lengths = [sum(len(s.token_ids) for s in r.segments) for r in rollout]
    summary = {
        "recipe": "warm_start",
        "env": config.env,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "demonstrator_reward": sum(r.reward or 0.0 for r in rollout) / len(rollout),
        "tokens_per_rollout": sum(lengths) / len(lengths),
        "loss": loss,
        "output_dir": str(out),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(WarmStart)))
