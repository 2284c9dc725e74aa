"""Compare four kinds of credit at equal sampled tokens: `python -m recipes.credit_curves FOLDER [--seeds 10]`.

Each run has its own folder, FOLDER/ENV/METHOD/SEED. Finished runs aren't repeated, and stopped ones continue
from their last checkpoint, so the same command resumes. At the end, or with `--no-play` right away, it prints a table
of all finished runs and draws FOLDER/ENV.png.

The envs are `chase_long_turns` and `bisect_long`. A step is 8 tasks with 4 rollouts each, or with 2 rollouts
and their branches, and the learning rate is constant. A run ends when it has sampled its env's token budget,
including the tokens of branches, in as many steps as that takes. Rewards are compared by these tokens.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tyro
from numpy.typing import NDArray

import agentgym as ag
from agentgym.config_fields import nearest
from agentgym.errors import AgentGymError
from agentgym.errors.extras import needs_extra
from agentgym.run.recorder import SUMMARY
from agentgym.run.resume import CHECKPOINTS
from agentgym.samples import CreditLevel
from agentgym.sandboxes.choose import Kind
from agentgym.train.checkpoint import has_checkpoints, last_step
from recipes import bisect_long, chase_long
from recipes.continued import continue_run

BINS = 20
"""Number of equal parts of the tokens; a curve has a point for each."""
LAST = BINS // 5
"""Number of parts at the end over which the last reward is averaged."""


class Comparison(NamedTuple):
    """The settings that all methods share on an env."""

    run: ag.RunConfig
    lr: float
    """The learning rate of all steps: 1e-3 or 2e-3, whichever worked better for outcome credit with seed 0."""
    every: int
    """Number of turns between branching points, so that a step samples about as many tokens as without branches."""
    tokens: int
    """Number of sampled tokens at which a run ends."""


ENVS: Mapping[str, Comparison] = {
    "chase_long_turns": Comparison(replace(chase_long.RECIPE, env="chase_long_turns"), lr=2e-3, every=4, tokens=60_000),
    "bisect_long": Comparison(bisect_long.RECIPE, lr=1e-3, every=3, tokens=50_000),
}
METHODS: tuple[CreditLevel, ...] = ("outcome", "turn", "branches", "value")
Curve: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Credit:
    """Runs of all kinds of credit on two envs, and their results."""

    folder: tyro.conf.Positional[Path]
    """Folder of the runs."""
    seeds: int = 10
    """Number of runs of each method on each env, with seeds from 0."""
    tokens: int | None = None
    """Sampled tokens at which a run ends; None uses 60,000 for chase_long_turns and 50,000 for bisect_long."""
    stride: int = 10
    """Number of steps that a run makes before its tokens are counted again."""
    sandbox: Kind = "auto"
    """Sandbox that runs the model's code; auto uses the one the env declares."""
    envs: tuple[str, ...] = tuple(ENVS)
    """The envs to run on."""
    play: bool = True
    """Whether to do the missing runs. If not, only the finished ones are shown."""


def run_of(credit: Credit, env: str, method: CreditLevel, seed: int) -> ag.RunConfig:
    """Return the settings of one run."""
    run, lr, every, _ = ENVS[env]
    assert isinstance(run.train.loss_agg, float)  # for 64 rollouts
    train = replace(run.train, lr=lr, decay_steps=None, loss_agg=run.train.loss_agg / 2)
    run = replace(
        run, seed=seed, max_steps=credit.stride, sandbox=credit.sandbox, eval_tasks=0, train=train, group_size=4
    )
    run = replace(run, output_dir=folder_of(credit, env, method, seed), credit=method)
    return (
        replace(run, group_size=2, branching=ag.BranchingConfig(per_state=1, every=every))
        if method == "branches"
        else run
    )


def folder_of(credit: Credit, env: str, method: str, seed: int) -> Path:
    return credit.folder / env / method / str(seed)


def budget_of(credit: Credit, env: str) -> int:
    return ENVS[env].tokens if credit.tokens is None else credit.tokens


def is_finished(folder: Path, budget: int) -> bool:
    """Return whether the run in a folder has sampled its budget. A run between two strides has a summary too."""
    return (folder / SUMMARY).exists() and bool(tokens_and_rewards(folder)[0][-1] >= budget)


def play(run: ag.RunConfig, budget: int) -> None:
    """Train until the run has sampled this many tokens, starting from its last checkpoint if there is one."""
    folder = run.output_dir
    assert folder is not None
    while not is_finished(folder, budget):
        done = last_step(folder / CHECKPOINTS) if has_checkpoints(folder / CHECKPOINTS) else 0
        continue_run(replace(run, max_steps=run.max_steps * (done // run.max_steps + 1)))


def tokens_and_rewards(folder: Path) -> tuple[Curve, Curve]:
    """Return the tokens sampled up to the end of each step of a run, and the mean reward of each step's rollouts."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = [row["tokens/sampled"] * row["rollouts/finished"] for row in rows]
    return np.cumsum(tokens), np.array([row["reward"] for row in rows])


def curve(tokens: Curve, rewards: Curve, budget: float) -> Curve:
    """Return the mean reward in each of BINS equal parts of a token budget. A step is weighted by its share of them."""
    edges = np.linspace(0, budget, BINS + 1)
    area = np.concatenate([[0.0], np.cumsum(rewards * np.diff(tokens, prepend=0.0))])
    within: Curve = np.diff(np.interp(edges, np.concatenate([[0.0], tokens]), area))
    return within / np.diff(edges)


def finished(credit: Credit, env: str) -> dict[str, dict[int, tuple[Curve, Curve]]]:
    """Return the tokens and rewards of an env's finished runs, by method and seed."""
    return {
        method: {
            seed: tokens_and_rewards(folder)
            for seed in range(credit.seeds)
            if is_finished(folder := folder_of(credit, env, method, seed), budget_of(credit, env))
        }
        for method in METHODS
    }


def table(curves: Mapping[str, Mapping[int, Curve]]) -> Iterator[str]:
    """Yield the lines of a table: rewards over seeds with their standard errors, and differences seed by seed."""
    yield "| credit | seeds | all | last fifth | last fifth minus that of outcome |"
    yield "|---|---|---|---|---|"
    base = curves["outcome"]
    for method, of_seed in curves.items():
        last = {seed: float(found[-LAST:].mean()) for seed, found in of_seed.items()}
        gained = [value - float(base[seed][-LAST:].mean()) for seed, value in last.items() if seed in base]
        means = [float(found.mean()) for found in of_seed.values()]
        cells = (with_error(means), with_error(list(last.values())), "" if method == "outcome" else with_error(gained))
        yield f"| {method} | {len(of_seed)} | {' | '.join(cells)} |"


def with_error(values: Sequence[float]) -> str:
    """Return a mean with its standard error, or without one for a single value."""
    if not values:
        return "none"
    mean = float(np.mean(values))
    return f"{mean:.3f}" if len(values) < 2 else f"{mean:.3f} ± {np.std(values, ddof=1) / len(values) ** 0.5:.3f}"


def show(credit: Credit, env: str) -> dict[str, Any]:
    """Print an env's table, and draw its plot."""
    found, budget = finished(credit, env), budget_of(credit, env)
    if not any(found.values()):
        print(f"{env}: no finished runs")
        return {}
    curves = {m: {seed: curve(*pair, budget) for seed, pair in of_seed.items()} for m, of_seed in found.items()}
    print(f"\n{env}, {budget:,.0f} tokens\n")
    print("\n".join(table(curves)))
    with needs_extra():
        from agentgym.view.report.plots import Curve as Line, draw_curves
    ends = [round(end) for end in np.linspace(0, budget, BINS + 1)[1:]]
    lines = [
        Line(method, [dict(zip(ends, found.tolist(), strict=True)) for found in of_seed.values()])
        for method, of_seed in curves.items()
        if of_seed
    ]
    draw_curves(credit.folder / f"{env}.png", lines, title=env, unit="mean reward", across="sampled tokens")
    return curves


def main(credit: Credit) -> None:
    for name in ("seeds", "tokens", "stride"):
        if (number := getattr(credit, name)) is not None and number < 1:
            raise SystemExit(f"recipes.credit_curves: {name}: expected at least 1, got {number}")
    if unknown := [env for env in credit.envs if env not in ENVS]:
        raise SystemExit(f"recipes.credit_curves: envs: unknown env {unknown[0]!r}; {nearest(unknown[0], ENVS)}")
    try:
        for seed in range(credit.seeds if credit.play else 0):
            for env in credit.envs:
                for method in METHODS:
                    play(run_of(credit, env, method, seed), budget_of(credit, env))
        for env in credit.envs:
            show(credit, env)
    except AgentGymError as error:
        raise SystemExit(f"recipes.credit_curves: {error}") from None


if __name__ == "__main__":
    main(tyro.cli(Credit))
