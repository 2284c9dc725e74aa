"""What every recipe's command line does: settings in, a progress bar on stderr, one line of JSON on stdout."""

import argparse
import asyncio
import json
import os
import sys
from dataclasses import replace

import tyro

import agentgym as ag


def main(recipe: type[ag.Run]) -> None:
    """Run a recipe from the command line; Ctrl-C leaves nothing running, keeps the adapter, and says how to go on.

    `--engine sglang` samples through SGLang servers; the flags under `--engine.` are then theirs.
    """
    run = settings(recipe, sys.argv[1:])
    try:
        summary = asyncio.run(ag.learn(run))
    except KeyboardInterrupt:
        again = " ".join([sys.executable, "-m", f"recipes.{run.recipe}", *sys.argv[1:]])
        print(
            "\nInterrupted; metrics, checkpoints and the adapter so far are in the run's folder.\n"
            f"Go on with it by --resume FOLDER. Run again from the start, elsewhere: {again}",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(summary))


def settings(recipe: type[ag.Run], arguments: list[str]) -> ag.Run:
    """The recipe with what the command line says; the engine is read first, for it decides which flags there are."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--engine", choices=("local", "sglang"))
    chosen, rest = first.parse_known_args(arguments)
    default = recipe()  # type: ignore[call-arg]  # a recipe spells all its values out
    if chosen.engine is not None:
        default = replace(default, engine=ag.SGLangConfig() if chosen.engine == "sglang" else ag.LocalConfig())
    return tyro.cli(recipe, args=rest, default=default, config=(tyro.conf.AvoidSubcommands,))
