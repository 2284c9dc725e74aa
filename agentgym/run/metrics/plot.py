"""A picture of a run's reward."""

from collections.abc import Mapping, Sequence
from typing import IO

PLOT = "reward.png"
"""The picture in the run's folder."""


def draw_plot(file: IO[bytes], rows: Sequence[Mapping[str, float]], held_out: Mapping[int, float]) -> bool:
    """Draw the reward of each step and of each evaluation, by the steps before it; False without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="reward")
    trained = [(step, row["reward"]) for step, row in enumerate(rows) if row.get("reward") is not None]
    axes.plot([step for step, _ in trained], [reward for _, reward in trained], label="training")
    if held_out:
        axes.plot(list(held_out), list(held_out.values()), "o--", label="held out")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(file, format="png")
    return True
