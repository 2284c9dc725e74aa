"""The plots of a report, drawn by matplotlib without a display."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from agentgym.view.report.folders import measured
from agentgym.view.report.lines import Line, band

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Colors that color-blind readers can tell apart: those of Okabe and Ito, and one more."""
PARTS = 1000
"""Largest number of parts that a curve is reduced to, since a picture is 840 pixels wide."""
CHARTS = (
    ("reward", "Training reward", "reward", "mean reward of a step's rollouts"),
    ("eval/reward", "Held-out tasks", "reward", "mean reward of the held-out tasks"),
    ("length/rollout_p50", "Rollout length", "tokens", "median number of sampled tokens per rollout"),
    ("rollout/branch_tokens", "Branches", "tokens", "mean number of tokens sampled in the branches of a rollout"),
    (
        "train/explained_variance",
        "Critic",
        "explained variance",
        "share of the returns' variance that the critic predicted",
    ),
    ("train/value_loss", "Critic loss", "squared reward", "mean squared error of the critic's values"),
    ("train/entropy", "Entropy", "nats", "entropy of the policy at the trained tokens"),
    ("mismatch/mean", "Mismatch", "nats", "difference between the engine's and the trainer's log-probabilities"),
    ("staleness/max", "Staleness", "policy versions", "age of the oldest token that was trained on"),
    ("samples/groups_without_signal", "Groups without a signal", "groups", "groups whose advantages are all 0"),
    ("rollouts/failed", "Failed rollouts", "rollouts", "rollouts without a reward"),
    ("rollouts/dropped", "Dropped rollouts", "rollouts", "rollouts that were cancelled or left out"),
    ("time/step", "Step time", "seconds", "seconds from one step to the next"),
    ("throughput/sampled_tokens_per_s", "Sampled tokens", "tokens/s", "sampled tokens per second of a step"),
)
"""Metric, title, unit and description of each curve."""
SPREAD = (
    "The line is the mean over the seeds, the band spans the lowest to the highest value, and thin lines are seeds."
)
"""Caption of a picture with several seeds."""
STYLE = {"text.parse_math": False, "savefig.format": "png"}
"""Settings of matplotlib under which pictures are drawn, whatever the user's own settings are."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one line: its label, and each seed's values by step."""

    label: str
    seeds: Sequence[Mapping[int, float]]


@dataclass(frozen=True, slots=True)
class Bar:
    """A score with its confidence interval."""

    label: str
    value: float
    low: float
    high: float


def draw_curves(
    file: Path | BytesIO,
    curves: Sequence[Curve],
    *,
    title: str,
    unit: str,
    from_zero: bool = False,
    across: str = "step",
) -> None:
    """Draw the curves of all lines into one picture.

    Args:
        file: The picture's file.
        curves: The curves to draw.
        title: The picture's title.
        unit: The label of the y axis.
        from_zero: Whether the y axis starts at 0.
        across: The label of the x axis.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel=across, ylabel=plain(unit), title=plain(title))
        for place, curve in enumerate(curves):
            add_curve(axes, curve, COLORS[place % len(COLORS)])
        mark_whole_steps(axes)
        if from_zero:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        figure.savefig(file, dpi=120, metadata={"Software": None})


def add_curve(axes: Axes, curve: Curve, color: str) -> None:
    """Draw a line's mean; with several seeds, also draw their range as a band and each seed as a thin line."""
    mean = band(curve.seeds)
    if len(curve.seeds) > 1:
        for seed in curve.seeds:
            axes.plot(*thinned(list(seed), list(seed.values())), color=color, alpha=0.35, linewidth=0.8)
        steps, low, high = thinned(mean.steps, mean.low, mean.high)
        axes.fill_between(steps, low, high, color=color, alpha=0.18, linewidth=0)
    marker = "o" if len(mean.steps) < 12 else None
    label = plain(curve.label)
    axes.plot(*thinned(mean.steps, mean.mean), marker=marker, markersize=3, color=color, linewidth=2, label=label)


def thinned(steps: Sequence[int], *values: Sequence[float]) -> list[list[float]]:
    """Return a curve's steps and values reduced to few enough points to draw, with every visible peak and valley.

    A long curve is split into parts, each of which keeps the points where one of `values` is lowest or highest.
    """
    size = -(-len(steps) // PARTS)
    kept = range(len(steps)) if size <= 2 * len(values) else sorted(_ends(values, len(steps), size))
    return [[of[place] for place in kept] for of in (steps, *values)]


def _ends(values: Sequence[Sequence[float]], count: int, size: int) -> set[int]:
    parts = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return {end(part, key=of.__getitem__) for of in values for part in parts for end in (min, max)}


def draw_bars(file: Path | BytesIO, bars: Sequence[Bar], *, title: str, unit: str) -> None:
    """Draw each score as a point with its interval, one below the other."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 1.2 + 0.4 * len(bars)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel=plain(unit), title=plain(title))
        for place, bar in enumerate(bars):
            color = COLORS[place % len(COLORS)]
            axes.plot([bar.low, bar.high], [place, place], color=color, linewidth=2)
            axes.plot([bar.value], [place], "o", color=color)
        axes.set_yticks(range(len(bars)), [plain(bar.label) for bar in bars])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.grid(alpha=0.3)
        figure.savefig(file, dpi=120, metadata={"Software": None})


def mark_whole_steps(axes: Axes) -> None:
    """Label the x axis at integer steps only."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def plain(text: str) -> str:
    """Return at most 80 characters of the text, with `?` in place of those that the plots' font may lack."""
    text = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A picture: the name of its file, its title, a description of its content, and the content of the file."""

    file: str
    title: str
    said: str
    png: bytes


def draw_charts(lines: Sequence[Line]) -> list[Chart]:
    """Draw every chart that has metrics, and return the drawn charts in order."""
    drawn = [
        chart
        for metric, title, unit, said in CHARTS
        if (chart := _curves(lines, metric, title=title, unit=unit, said=said))
    ]
    return [*drawn, *_scores(lines)]


def _curves(lines: Sequence[Line], metric: str, *, title: str, unit: str, said: str) -> Chart | None:
    found = [Curve(line.label, [run.curve(metric) for run in line.runs if run.is_training]) for line in lines]
    curves = [Curve(of.label, [seed for seed in of.seeds if seed]) for of in found if any(of.seeds)]
    values = [value for of in curves for seed in of.seeds for value in seed.values()]
    if not any(values):
        return None
    file = metric.replace("/", "-") + ".png"
    drawn = BytesIO()
    draw_curves(drawn, curves, title=title, unit=unit, from_zero=min(values) >= 0)
    several = any(len(of.seeds) > 1 for of in curves)
    about = f"{metric}: {said}. {SPREAD if several else ''}".rstrip()
    return Chart(file=file, title=title, said=about, png=drawn.getvalue())


def _scores(lines: Sequence[Line]) -> list[Chart]:
    bars = [
        Bar(f"{line.mark}, seed {run.settings.get('seed')}", run.summary["reward"], low, high)
        for line in lines
        for run in line.runs
        if not run.is_training and (ends := interval_of(run.summary)) is not None
        for low, high in [ends]
    ]
    if not bars:
        return []
    drawn = BytesIO()
    draw_bars(drawn, bars, title="Evaluations", unit="reward")
    said = "Mean reward of each evaluation, with its 95% confidence interval over tasks."
    return [Chart(file="evaluations.png", title="Evaluations", said=said, png=drawn.getvalue())]


def interval_of(summary: dict[str, object]) -> tuple[float, float] | None:
    """Return the ends of the interval of an evaluation's reward; None if it has no reward or no interval."""
    found = summary.get("reward_interval")
    ends = [found.get("low"), found.get("high")] if isinstance(found, dict) else []
    numbers = [number for end in ends if (number := measured(end)) is not None]
    return (numbers[0], numbers[1]) if len(numbers) == 2 and measured(summary.get("reward")) is not None else None
