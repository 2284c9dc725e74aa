"""The charts of a report: which figures are drawn, and the files that they go into."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentgym.report.folders import measured
from agentgym.report.lines import Line
from agentgym.report.plots import Bar, Curve, draw_bars, draw_curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture: its file, its heading, and what it shows in words."""

    file: str
    title: str
    said: str


CHARTS = (
    ("reward", "Reward of training", "reward", "mean reward of a step's rollouts"),
    ("eval/reward", "Held-out tasks", "reward", "mean reward of the held-out tasks"),
    ("length/rollout_p50", "Length of a rollout", "tokens", "median of the sampled tokens of a rollout"),
    ("rollout/branch_tokens", "Branches", "tokens", "mean of the tokens that the branches of a rollout sampled"),
    ("train/explained_variance", "Critic", "explained variance", "part of the returns that it knew beforehand"),
    ("train/value_loss", "Loss of the critic", "squared reward", "mean squared error of the critic's values"),
    ("train/entropy", "Entropy", "nats", "entropy of the policy at the trained tokens"),
    ("mismatch/mean", "Mismatch", "nats", "difference of the engine's and the trainer's log-probabilities"),
    ("staleness/max", "Staleness", "policy versions", "age of the oldest token that was trained on"),
    ("samples/groups_without_signal", "Groups without a signal", "groups", "groups whose advantages are all 0"),
    ("rollouts/failed", "Failed rollouts", "rollouts", "rollouts without a reward"),
    ("rollouts/dropped", "Dropped rollouts", "rollouts", "rollouts that were cancelled or left out"),
    ("time/step", "Time of a step", "seconds", "seconds from one step to the next"),
    ("throughput/sampled_tokens_per_s", "Sampled tokens", "tokens/s", "sampled tokens by second of a step"),
)
"""Figure, title, unit and words of each curve."""
SPREAD = "The line is the mean over the seeds, the band reaches from the lowest to the highest; thin lines are seeds."
"""The words below a picture with several seeds."""


def draw_charts(lines: Sequence[Line], folder: Path) -> list[Chart]:
    """Draw every chart for which there are figures into the folder; return those that were drawn, in order."""
    drawn = [
        chart
        for figure, title, unit, said in CHARTS
        if (chart := _curves(lines, folder, figure, title=title, unit=unit, said=said))
    ]
    return [*drawn, *_scores(lines, folder)]


def _curves(lines: Sequence[Line], folder: Path, figure: str, *, title: str, unit: str, said: str) -> Chart | None:
    found = [Curve(line.label, [run.curve(figure) for run in line.runs if run.is_training]) for line in lines]
    curves = [Curve(of.label, [seed for seed in of.seeds if seed]) for of in found if any(of.seeds)]
    if not curves or not any(any(seed.values()) for of in curves for seed in of.seeds):
        return None
    file = figure.replace("/", "-") + ".png"
    draw_curves(folder / file, curves, title=title, unit=unit, from_zero=_all_above_zero(curves))
    several = any(len(of.seeds) > 1 for of in curves)
    return Chart(file=file, title=title, said=f"{figure}: {said}. {SPREAD if several else ''}".rstrip())


def _all_above_zero(curves: Sequence[Curve]) -> bool:
    return all(value >= 0 for of in curves for seed in of.seeds for value in seed.values())


def _scores(lines: Sequence[Line], folder: Path) -> list[Chart]:
    bars = [
        Bar(f"{line.mark}, seed {run.settings.get('seed')}", run.summary["reward"], low, high)
        for line in lines
        for run in line.runs
        if not run.is_training and (ends := interval_of(run.summary)) is not None
        for low, high in [ends]
    ]
    if not bars:
        return []
    draw_bars(folder / "evaluations.png", bars, title="Evaluations", unit="reward")
    said = "Mean reward of each evaluation, with its interval at 95 %, over tasks."
    return [Chart(file="evaluations.png", title="Evaluations", said=said)]


def interval_of(summary: dict[str, object]) -> tuple[float, float] | None:
    """Return the ends of the interval of an evaluation's reward; None where it has no reward or no interval."""
    found = summary.get("reward_interval")
    ends = [found.get("low"), found.get("high")] if isinstance(found, dict) else []
    numbers = [number for end in ends if (number := measured(end)) is not None]
    return (numbers[0], numbers[1]) if len(numbers) == 2 and measured(summary.get("reward")) is not None else None
