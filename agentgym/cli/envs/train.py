"""The command `agentgym train`: a run on an environment, every setting of which is a flag."""

import argparse
import inspect
import sys
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from agentgym.cli.envs.names import find, own_name, place
from agentgym.cli.output import RefusedWords
from agentgym.errors.extras import needs_extra
from agentgym.files.names import command, shown

if TYPE_CHECKING:
    from agentgym.run.config import RunConfig

TINY = "tiny"
HELP = {"-h", "--help"}


def train(env: tyro.conf.Positional[str]) -> int:
    """Train a model on an environment, by default the tiny one that comes with agentgym, in this process.

    Every setting of a run is a flag (`agentgym train ENV --help` lists them, and those of the environment), with the
    defaults of ag.RunConfig; the tiny model has a few of its own. Ctrl-C keeps the last finished step, and says how to
    go on. The last line on stdout is the summary as JSON.

    For example:
    $ agentgym train hello
    $ agentgym train hello --steps 40 --train.lr 1e-3 --out runs/longer
    $ agentgym train hello --model Qwen/Qwen3-0.6B --engine.dtype bfloat16
    $ torchrun --nproc-per-node 2 -m agentgym train hello

    Args:
        env: A registered name, the folder of an env.py, module:Class, or path/env.py:Class.
    """
    return train_by_flags([env])


def train_by_flags(words: Sequence[str]) -> int:
    """Run the command with its words: an environment, and then the flags of a run."""
    with needs_extra():
        from agentgym.cli.flags.parsing import parsed
        from agentgym.cli.recipe import run_recipe
        from agentgym.run.loop import is_first
    name = words[0] if words and not words[0].startswith("-") else None
    if name is None and HELP.intersection(words):
        recipe = recipe_of("ENV", "ENV", words)
        parsed(recipe, recipe(), ["--help"], prog="agentgym train ENV")  # type: ignore[call-arg]
    if name is None:
        raise RefusedWords("train: name an environment first, as in `agentgym train hello`; `agentgym ls` lists them")
    env = find(name)
    recipe = recipe_of(own_name(env), place(env), words[1:])
    summary = run_recipe(recipe, words[1:], prog=f"agentgym train {name}")
    if is_first():
        for line in next_lines(summary, [name, *parameter_words(words[1:])]):
            sys.stderr.write(f"{line}\n")
    return 0


def recipe_of(name: str, env: str, words: Sequence[str]) -> "type[RunConfig]":
    """Return the recipe of an env, given as "module:Class", and the model that the words name, or the tiny one."""
    from agentgym.run.config import RunConfig
    from agentgym.train.config import TrainConfig

    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--model", default=TINY)
    model = flags.parse_known_args(words)[0].model
    settings: list[tuple[str, Any, Any]] = [("recipe", str, name), ("env", str, env), ("model", Path | str, model)]
    if model == TINY:  # Its turns are short.
        learning = TrainConfig(temperature=0.7, normalise=2000.0, grad_clip=0.05)
        settings += [("steps", int, 20), ("max_tokens", int | None, 40), ("train", TrainConfig, learning)]
    return make_dataclass(
        f"agentgym train {name}",
        [(setting, kind, field(default=value)) for setting, kind, value in settings],
        bases=(RunConfig,),
        namespace={"__doc__": inspect.cleandoc(train.__doc__ or "").partition("\n\nArgs:")[0], "__module__": __name__},
        frozen=True,
        kw_only=True,
    )


def next_lines(summary: dict[str, Any], env: Sequence[str]) -> list[str]:
    """Return what to look at after a run; `env` are the words that name its environment, with its parameters."""
    from agentgym.run.summary import look_lines

    out = Path(summary["out"])
    trained = out / "adapter" if (out / "adapter").is_dir() else out / "model"
    lines = [
        *look_lines(out),
        f"      {command('eval', *env, '--model', trained)} plays what was trained on the held-out tasks",
    ]
    if trained.name == "adapter":
        merge = command("merge", trained, "FOLDER")
        lines.append(f"      {shown(trained)} is what was trained; {merge} makes a whole model of it")
    return lines


def parameter_words(words: Sequence[str]) -> list[str]:
    """Return those words of a command line that set parameters of the environment, as in `--env.skill 1`."""
    found, rest = list[str](), iter(words)
    for word in rest:
        if word.startswith("--env."):
            found += [word] if "=" in word else [word, next(rest, "")]
    return found
