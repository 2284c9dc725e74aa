"""SFT on chase: an adapter imitates a careful demonstrator, with the samples and trainer of the other recipes.

`python -m recipes.chase_sft` takes about half a minute on one core. RL can start from the resulting adapter:
`agentgym merge runs/chase_sft/adapter runs/chase_sft/merged` turns it into the base model of a recipe.
"""

import asyncio
import json
import random
from dataclasses import dataclass
from pathlib import Path

import tyro

import agentgym as ag
from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.engines.scripted import Scripted
from agentgym.run import Collector
from agentgym.samples import demonstrations
from agentgym.sandboxes.choose import Kind
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.seeds import seed_for
from agentgym.train import Trainer
from agentgym.weight_sync.sync import load_policy
from envs.chase.demo import Sloppiness, demonstrate
from envs.chase.env import Chase

CAREFUL = Sloppiness(guess=0.0, malformed=0.0, wrong_key=0.0)
DEMO_TASKS = 600_000
"""Index of the first held-out task used for demonstrations, far after those that evaluations use."""


@dataclass(frozen=True, kw_only=True)
class ChaseSFT:
    """Settings of `python -m recipes.chase_sft`."""

    model: Path | str = "tiny"
    """Folder or Hugging Face name of the model to train; "tiny" comes with the library."""
    output_dir: Path = Path("runs/chase_sft")
    """Folder for the adapter or the model."""
    seed: int = 0
    """Seed of the demonstrations and of the adapter's initial weights."""
    max_steps: int = 20
    """Number of optimizer steps."""
    batch: int = 32
    """Number of demonstrations per step."""
    sandbox: Kind = "auto"
    """Sandbox that runs the model's code in evaluations; auto uses the best one that this machine has."""
    eval_tasks: int = 128
    """Number of held-out tasks to evaluate before and after training, with one rollout each."""
    train: ag.TrainConfig = ag.TrainConfig(loss="sft", decay_steps=20)
    """Settings of the trainer."""


async def demonstrated(tokenizer: ChatTokenizer, numbers: range, seed: int) -> list[ag.Rollout]:
    """Return the demonstrator's rollouts of the env, in the model's tokens."""
    tasks = Chase.tasks("test")
    return [
        await ag.rollout(
            Chase,
            tasks[DEMO_TASKS + i],
            Scripted(
                demonstrate(tasks[DEMO_TASKS + i], random.Random(seed_for("demonstration", seed, i)), CAREFUL),
                tokenizer=tokenizer,
            ),
            sandboxes=FakeSandboxPool(),
        )
        for i in numbers
    ]


async def main(config: ChaseSFT) -> None:
    async with (
        ag.TransformersEngine(config.model) as engine,
        Trainer(config.model, config.train, seed=config.seed) as trainer,
        ag.AnySandbox(kind=config.sandbox).open(ag.TransformersConfig().slots) as sandboxes,
    ):
        play = Collector(Chase, engine, trainer, sandboxes, ag.Sampling(temperature=0.7, max_tokens=40))
        before = (await play.evaluate(config.eval_tasks, seed=config.seed)).reward
        losses = []
        for step in range(config.max_steps):
            shown = range(step * config.batch, (step + 1) * config.batch)
            stats = await trainer.step(demonstrations(await demonstrated(engine.tokenizer, shown, config.seed)))
            losses.append(stats["train/loss"])
        await load_policy(trainer, engine, version=1)
        after = (await play.evaluate(config.eval_tasks, seed=config.seed)).reward
        trainer.save(config.output_dir / ("adapter" if trainer.adapts else "model"))
    summary = {"recipe": "chase_sft", "loss_first": losses[0], "loss_last": losses[-1]}
    print(json.dumps(summary | {"eval_before": before, "eval_after": after, "output_dir": str(config.output_dir)}))


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(ChaseSFT)))
