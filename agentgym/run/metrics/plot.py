"""A plot of a run's rewards."""

from collections.abc import Mapping, Sequence
from typing import IO

PLOT = "reward.png"
"""The plot's file in the run's folder."""


def draw_plot(file: IO[bytes], rows: Sequence[Mapping[str, float]], held_out: Mapping[int, float]) -> bool:
    """Plot the reward of each step and evaluation; return False if matplotlib isn't installed.

    Args:
        file: The file to write the PNG image to.
        rows: The metrics of each step.
        held_out: The held-out scores, by the number of steps finished before them.
    """
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
