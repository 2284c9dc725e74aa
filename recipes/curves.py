"""Draw learning curves: `python -m recipes.curves OUT.png TITLE RUN_FOLDER...` from the runs' metrics.jsonl."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

try:
    import matplotlib as mpl
    from matplotlib import pyplot as plt
except ModuleNotFoundError as missing:
    raise SystemExit(f"recipes.curves: {missing}; python -m pip install 'matplotlib>=3.9'") from None


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One line a run, and their mean."""

    out: tyro.conf.Positional[Path]
    """The picture to write."""
    title: tyro.conf.Positional[str]
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders that hold a metrics.jsonl."""


def rewards(run: Path) -> list[float]:
    """Mean reward of each step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["reward"] for row in rows if "reward" in row]


def main(curves: Curves) -> None:
    mpl.use("Agg")
    rows = [rewards(run) for run in curves.runs]
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for row in rows:
        axes.plot(range(1, len(row) + 1), row, color="tab:blue", alpha=0.35, linewidth=1)
    shortest = min(map(len, rows))
    mean = [sum(row[step] for row in rows) / len(rows) for step in range(shortest)]
    axes.plot(range(1, shortest + 1), mean, color="tab:blue", linewidth=2.5)
    axes.set(xlabel="step of 64 rollouts", ylabel="mean reward", ylim=(0, 1.02), title=curves.title)
    axes.grid(alpha=0.3)
    curves.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(curves.out, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Curves))
