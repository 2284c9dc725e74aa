"""A run that gets worse says so, with its likely cause and a value to try, and a run that is only noisy doesn't."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentgym.run.metrics import health
from agentgym.run.metrics.health import HOLD, WINDOW, signs
from agentgym.run.metrics.watch import NO_SIGNAL, Watch
from agentgym.run.summary import Report, account
from agentgym.scheduling.accounting import Groups

DOCS = Path(__file__).parents[2] / "docs/troubleshooting.md"
NOISY = (0.0, 0.06, -0.05, 0.04, -0.05)
"""The deviations of five steps from their mean, as of 64 rollouts of 8 tasks."""

# Mean rewards of each five steps, and the rate, of runs of SmolLM2-135M-Instruct on sums of two numbers.
RISES = (1e-4, [0.29, 0.38, 0.44, 0.45, 0.48, 0.56])
WAVERS = (5e-4, [0.37, 0.50, 0.36, 0.43, 0.37, 0.48])
COLLAPSES = (2e-3, [0.34, 0.18, 0.05, 0.07, 0.07, 0.01])
COLLAPSES_EARLY = (2e-3, [0.34, 0.12, 0.03])


def run(rate: float, means: Sequence[float], **metrics: Sequence[float]) -> list[dict[str, Any]]:
    """Return the rows of a run with these means, and further metrics, of each five steps."""
    rows = []
    for step in range(WINDOW * len(means)):
        reward = max(0.0, means[step // WINDOW] + NOISY[step % WINDOW])
        row = {
            "reward": reward,
            "reward/std": (reward * (1 - reward)) ** 0.5,
            "train/lr": rate * min(1, (step + 1) / 3),
        }
        row |= {name: values[step // WINDOW] for name, values in metrics.items()}
        rows.append(row | {"train/optimizer_steps": 1.0, "samples/groups": 8.0, "samples/groups_without_signal": 5.0})
    return rows


def heard(rows: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the warnings during a run, each with the number of steps before it."""
    said: list[tuple[int, str]] = []
    done = 0
    watch = Watch(lambda text: said.append((done, text)))
    for done, row in enumerate(rows, 1):
        watch.on_step(done - 1, Groups([]), row)
    return said


def test_a_falling_reward_names_the_rate_and_a_value_while_the_run_goes_on() -> None:
    [(step, said)] = heard(run(*COLLAPSES))
    assert 2 * WINDOW < step <= 4 * WINDOW
    assert re.match(r"The reward fell: 0\.3\d in the best 5 steps, 0\.\d+ in the last 5\. The likely cause", said)
    assert "use a lower train.lr (--train.lr 4e-4)" in said
    assert "temperature" not in said


@pytest.mark.parametrize("rows", [run(*COLLAPSES), run(*COLLAPSES_EARLY)[:14]])
def test_the_report_of_a_run_whose_reward_fell_says_that_it_got_worse_and_why(rows: list[dict[str, Any]]) -> None:
    assert account(rows, {})[0].startswith("got worse: training reward 0.3")
    assert account(rows, {0: 0.30, 30: 0.0})[0] == "got worse: held-out reward 0.30 at the start, 0.00 at the end"
    [said] = Report().warnings(rows)
    assert said.startswith("The reward fell: ")
    assert Report().summary(rows)["warnings"] == [said]


@pytest.mark.parametrize("rows", [run(*RISES), run(*WAVERS), run(1e-4, [0.3] * 40), run(1e-4, [0.02] * 40)])
def test_a_run_that_learns_or_wavers_is_not_warned(rows: list[dict[str, Any]]) -> None:
    assert heard(rows) == []
    assert Report().warnings(rows) == []


def test_a_sign_that_stands_for_fewer_steps_is_noise() -> None:
    rows = run(1e-4, [0.5, 0.5, 0.5])
    bad = [{**rows[0], "reward": 0.0}] * WINDOW
    until = next(n for n in range(1, WINDOW + 1) if health.fell([*rows, *bad[:n]]))
    assert signs([*rows, *bad[: until + HOLD - 2]]) == {}
    assert "reward" in signs([*rows, *bad[: until + HOLD - 1]])


@pytest.mark.parametrize("name", ["teacher/divergence", "curriculum/resting"])
def test_a_reward_that_may_fall_for_other_reasons_is_no_sign(name: str) -> None:
    assert signs([row | {name: 0.1} for row in run(*COLLAPSES)]) == {}


def test_a_collapsed_entropy_names_the_rate_unless_the_reward_rose() -> None:
    entropy = {"train/entropy": [0.68, 0.3, 0.05, 0.02]}
    [(_, said)] = heard(run(2e-3, [0.06] * 4, **entropy))
    assert said.startswith("The policy's entropy collapsed from 0.68 to 0.0")
    assert "(--train.lr 4e-4)" in said
    assert heard(run(2e-3, [0.1, 0.5, 0.8, 0.9], **entropy)) == []
    assert heard(run(2e-3, [0.9] * 4, **entropy, **{"groups/solved_by_all": [0.6] * 4})) == []
    assert heard(run(2e-3, [0.06] * 4, **{"train/entropy": [0.68, 0.3, 0.2, 0.15]})) == []


def test_a_policy_without_entropy_from_the_start_has_lost_none() -> None:
    assert heard(run(1e-4, [0.3] * 3, **{"train/entropy": [0.0] * 3})) == []


def test_a_growing_entropy_names_the_rate_and_the_temperature_unless_the_reward_rose() -> None:
    entropy = {"train/entropy": [0.68, 1.0, 1.5, 1.6]}
    [(_, said)] = heard(run(2e-3, [0.3] * 4, **entropy))
    assert said.startswith("The policy's entropy grew from 0.68 to 1.")
    assert "(--train.lr 4e-4), and a train.temperature of 1 if it is higher" in said
    assert heard(run(2e-3, [0.1, 0.5, 0.8, 0.9], **entropy)) == []
    assert heard(run(2e-3, [0.3] * 4, **{"train/entropy": [0.68, 1.0, 1.3, 1.3]})) == []


def test_a_growing_mismatch_names_data_types_and_the_rate() -> None:
    [(_, said)] = heard(run(1e-4, [0.3] * 3, **{"mismatch/mean": [0.002, 0.02, 0.05]}))
    assert "drift apart: 0.032 nats per token in the last 5 steps, 0.002 in the first" in said
    assert "(engine.dtype, train.dtype)" in said
    assert "(--train.lr 2e-5)" in said
    assert heard(run(1e-4, [0.3] * 3, **{"mismatch/mean": [1e-6, 1e-4, 9e-3]})) == []
    assert heard(run(1e-4, [0.3] * 3, **{"mismatch/mean": [0.02, 0.03, 0.05]})) == []


def test_many_cut_turns_name_the_limit_and_twice_the_longest_turn() -> None:
    lengths = {"rollout/turns": [2.0] * 3, "length/turn_max": [128.0] * 3}
    [(_, said)] = heard(run(1e-4, [0.3] * 3, **lengths, **{"rollout/cut_turns": [0.8] * 3}))
    assert said.startswith("40% of the turns in the last 5 steps were cut off by a token limit; raise max_turn_tokens")
    assert "(--max-turn-tokens 256)" in said
    assert heard(run(1e-4, [0.3] * 3, **lengths, **{"rollout/cut_turns": [0.5] * 3})) == []
    [(_, said)] = heard(run(1e-4, [0.3] * 3, **lengths, **{"rollout/cut_turns": [0.1, 0.5, 0.9]}))
    assert said.startswith("41% of the turns in the last 5 steps were cut off by a token limit")
    assert ", and 5% in the first: the policy writes longer turns than it did; use a lower train.lr (--train" in said


@pytest.mark.parametrize(
    ("rows", "names_rate"), [(run(*COLLAPSES), True), (run(2e-3, [0.0] * 6), False), (run(2e-3, [0.3] * 6), False)]
)
def test_groups_without_signal_of_a_collapsed_policy_name_the_rate_and_no_temperature(
    rows: list[dict[str, Any]], names_rate: bool
) -> None:
    silent = [*rows, *[rows[-1] | {"samples/groups_without_signal": 8.0}] * NO_SIGNAL]
    [said] = [said for _, said in heard(silent) if said.startswith("No group had a signal")]
    assert ("the policy has got worse; use a lower train.lr (--train.lr 4e-4)" in said) == names_rate
    assert ("temperature" in said) == (not names_rate)


def test_a_resumed_run_knows_the_steps_before() -> None:
    said: list[str] = []
    *before, last = run(*COLLAPSES)
    Watch(said.append, before).on_step(len(before), Groups([]), last)
    assert [text.partition(":")[0] for text in said] == ["The reward fell"]


def test_a_resumed_run_is_told_a_rate_below_the_one_that_it_was_resumed_with() -> None:
    rate, means = COLLAPSES
    before = run(rate, means)
    after = run(rate / 5, [0.01] * 2)[WINDOW:]
    said: list[str] = []
    Watch(said.append, before).on_step(len(before), Groups([]), after[0])
    ended = Report(before).warnings([*before, *after])
    assert [text.count(f"--train.lr {rate / 25:.0e}".replace("e-0", "e-")) for text in (*said, *ended)] == [1, 1]


def test_the_docs_have_the_thresholds() -> None:
    table = DOCS.read_text().partition("## My run gets worse")[2].partition("\n## ")[0]
    assert f"means over {WINDOW} steps" in table
    assert f"{HOLD} consecutive steps" in table
    assert f"by {health.FALL} standard deviations of the rewards and by {health.NOISE:g} standard errors" in table
    assert (health.COLLAPSED, health.SLOWER, health.GREW, health.RISE) == (1 / 5, 5, 2, 3)
    assert all(words in table for words in ("below a fifth", "to twice that", "to three times that"))
    assert f"above {health.LEAST_MISMATCH} nats" in table
    assert f"{100 * health.CUT:g} % of the turns" in table
    assert f"less than {100 * health.FEW_CUT:g} % were cut off" in table
    assert health.SOLVED == 0.5
    assert json.loads(json.dumps(signs([]))) == {}
