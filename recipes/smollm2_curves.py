"""Train SmolLM2 on three tasks with several seeds: `python -m recipes.smollm2_curves FOLDER [--seeds 3]`.

Each run has its own folder, FOLDER/RECIPE/SEED. Finished runs aren't repeated, and stopped ones continue from their
last checkpoint, so the same command resumes. At the end, or with `--no-play` right away, it prints a table of all
finished runs and draws FOLDER/RECIPE.png. `make models` fetches the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import tyro

from agentgym.errors import AgentGymError
from agentgym.errors.extras import needs_extra
from agentgym.run.metrics_logger import HELD_OUT
from agentgym.run.recorder import SUMMARY
from agentgym.run.summary import ENDS
from agentgym.view.report.folders import KeptRun
from recipes import smollm2_calculator, smollm2_chain_sum, smollm2_guess_number
from recipes.continued import continue_run

RECIPES = (smollm2_chain_sum.RECIPE, smollm2_calculator.RECIPE, smollm2_guess_number.RECIPE)
HEAD = """\
| recipe | seed | steps | first | last | held out before | held out after | difference |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True, kw_only=True)
class SmolCurves:
    """Runs of SmolLM2's recipes, and their results."""

    folder: tyro.conf.Positional[Path]
    """Folder of the runs."""
    seeds: int = 3
    """Number of runs of each recipe, with seeds from 0."""
    play: bool = True
    """Whether to do the missing runs. If not, only the finished ones are shown."""


def is_finished(folder: Path) -> bool:
    """Return whether a run has ended."""
    return (folder / SUMMARY).exists()


def play(curves: SmolCurves) -> None:
    """Do the missing runs, seed by seed, so that all tasks have results early."""
    for seed in range(curves.seeds):
        for recipe in RECIPES:
            folder = curves.folder / recipe.name / str(seed)
            if not is_finished(folder):
                continue_run(replace(recipe, seed=seed, output_dir=folder))


def rows(name: str, runs: Sequence[KeptRun]) -> Iterator[str]:
    """Yield a row of the table for each run, with its rewards in training and on held-out tasks."""
    for run in runs:
        held_out, rewards = run.curve(HELD_OUT), list(run.curve("reward").values())
        before, after = held_out[min(held_out)], held_out[max(held_out)]
        cells = [fmean(rewards[:ENDS]), fmean(rewards[-ENDS:]), before, after]
        said = " | ".join(f"{cell:.3f}" for cell in cells)
        yield f"| `{name}` | {run.settings['seed']} | {len(rewards)} | {said} | {after - before:+.3f} |"


def draw(file: Path, runs: Sequence[KeptRun]) -> None:
    """Draw the rewards of training and of held-out tasks: their mean over the seeds, and the range."""
    with needs_extra():
        from agentgym.view.report.plots import Curve, draw_curves
    lines = [
        Curve(label, [run.curve(metric) for run in runs])
        for label, metric in (("training", "reward"), ("held out", HELD_OUT))
    ]
    draw_curves(file, lines, title=file.stem, unit="mean reward", from_zero=True)


def main(curves: SmolCurves) -> None:
    if curves.seeds < 1:
        raise SystemExit(f"recipes.smollm2_curves: seeds: expected at least 1, got {curves.seeds}")
    try:
        if curves.play:
            play(curves)
        print(HEAD)
        for recipe in RECIPES:
            folders = [curves.folder / recipe.name / str(seed) for seed in range(curves.seeds)]
            if runs := [KeptRun(folder) for folder in folders if is_finished(folder)]:
                print("\n".join(rows(recipe.name, runs)))
                draw(curves.folder / f"{recipe.name}.png", runs)
    except AgentGymError as error:
        raise SystemExit(f"recipes.smollm2_curves: {error}") from None


if __name__ == "__main__":
    main(tyro.cli(SmolCurves))
