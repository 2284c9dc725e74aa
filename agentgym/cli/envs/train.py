"""The command `agentgym train`: trains on an environment, with a flag for every setting of a run."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from agentgym.cli.envs.names import find, own_name, place
from agentgym.cli.output import RefusedWords
from agentgym.errors.extras import needs_extra

if TYPE_CHECKING:
    from agentgym.run.config import RunConfig

TINY = "tiny"
HELP = {"-h", "--help"}


def train(env: tyro.conf.Positional[str]) -> int:
    """Train a model on an environment in this process, by default the tiny model that comes with agentgym.

    Every setting of a run is a flag (`agentgym train ENV --help` lists them, and those of the environment), with the
    defaults of ag.RunConfig; the tiny model changes a few defaults. Ctrl-C saves the last finished step, and prints
    how to resume. The last line on stdout is the summary as JSON.

    For example:
    $ agentgym train hello
    $ agentgym train hello --max-steps 40 --train.lr 1e-3 --output-dir runs/longer
    $ agentgym train hello --model Qwen/Qwen3-0.6B
    $ torchrun --nproc-per-node 2 -m agentgym train hello

    Args:
        env: A registered name, the folder of an env.py, module:Class, or path/env.py:Class.
    """
    return train_by_flags([env])


def train_by_flags(words: Sequence[str]) -> int:
    """Run the command from its words: an environment, followed by the flags of a run."""
    with needs_extra():
        from agentgym.cli.flags import NO_ENV, print_help, read_words, settings_of
        from agentgym.cli.recipe import finished, program, say_what_is_next
    name = words[0] if words and not words[0].startswith("-") else None
    about = inspect.cleandoc(train.__doc__ or "").partition("\n\nArgs:")[0]
    if name is None and HELP.intersection(words):
        print_help(recipe_of(NO_ENV, NO_ENV, TINY), "agentgym train ENV", about)
    if name is None:
        raise RefusedWords("train: give an environment first, as in `agentgym train hello`; `agentgym ls` lists them")
    env = find(name)
    tiny = recipe_of(own_name(env), place(env), TINY)
    with program(f"agentgym train {name}") as stop:
        given = read_words(tiny, words[1:])
        (model, *_) = given.settings.get("model") or (TINY,)
        recipe = tiny if model == TINY else recipe_of(own_name(env), place(env), model)
        if "env" in given.settings:
            recipe = replace(recipe, recipe=None)  # the run is named after the env that it is given
        run = settings_of(recipe, given, prog=f"agentgym train {name}", about=about)
        summary = finished(run, stop)
    say_what_is_next(Path(summary["output_dir"]), run, typed=name if run.env == place(env) else None)
    return 0


def recipe_of(name: str, env: str, model: str) -> "RunConfig":
    """Return the recipe of an env given as "module:Class"; the tiny model gets a few different settings."""
    from agentgym.run.config import RunConfig
    from agentgym.train.config import TrainConfig

    if model != TINY:
        return RunConfig(recipe=name, env=env, model=model)
    learning = TrainConfig(temperature=0.7, loss_agg=2000.0, grad_clip=0.05)
    return RunConfig(
        recipe=name, env=env, model=model, max_steps=20, max_turn_tokens=40, train=learning
    )  # Its turns are short.
