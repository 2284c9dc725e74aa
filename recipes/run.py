"""What every recipe's command line does: settings in, a progress bar on stderr, one line of JSON on stdout."""

import asyncio
import json
import os
import sys

import tyro

import agentgym as ag


def main(recipe: type[ag.Run]) -> None:
    """Run a recipe from the command line; Ctrl-C leaves nothing running, keeps the adapter, and says how to go on."""
    run = tyro.cli(recipe)
    try:
        summary = asyncio.run(ag.learn(run))
    except KeyboardInterrupt:
        again = " ".join([sys.executable, "-m", f"recipes.{run.recipe}", *sys.argv[1:]])
        print(
            f"\nInterrupted; metrics and the adapter so far are in the run's folder. Run again: {again}",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(summary))
