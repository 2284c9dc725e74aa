"""Draw learning curves from the runs' metrics.jsonl: `python -m recipes.curves OUT.png TITLE RUN_FOLDER...`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.errors import AgentGymError
from agentgym.errors.extras import needs_extra
from agentgym.view.report.folders import kept_runs


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The rewards of several runs: their mean, and the range from the lowest to the highest."""

    out: tyro.conf.Positional[Path]
    """The image file to write."""
    title: tyro.conf.Positional[str]
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders that contain a metrics.jsonl."""


def main(curves: Curves) -> None:
    try:
        with needs_extra():
            from agentgym.view.report.plots import Curve, draw_curves
        seeds = [run.curve("reward") for run in kept_runs(curves.runs)]
    except AgentGymError as error:
        raise SystemExit(f"recipes.curves: {error}") from None
    curves.out.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(curves.out, [Curve("training", seeds)], title=curves.title, unit="mean reward", from_zero=True)


if __name__ == "__main__":
    main(tyro.cli(Curves))
