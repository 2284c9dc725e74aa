"""Which evaluations are compared, which are refused, and the warning about too few tasks."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.errors import AgentGymError, Failure
from agentgym.evals.comparison import Comparison
from agentgym.evals.report import comparison_lines
from agentgym.evals.statistics import least_p, sign_flip_p
from agentgym.scheduling import Groups
from agentgym.store.writer import RolloutWriter
from agentgym.types.rollout import Group, Rollout

PLACES = {("eval_before", 0): 0.25, ("train", 0): 0.0, ("eval", 2): 0.5, ("train", 2): 1.0, ("eval_after", 4): 0.75}
"""The phases of a training run with its evaluations, and the reward of each of their rollouts."""


def write(folder: Path, places: dict[tuple[str, int], float], *, tasks: int = 4) -> Path:
    with RolloutWriter(folder, done=9) as writer:
        for (phase, step), reward in places.items():
            names = [f"{phase.partition('_')[0]}{number}" for number in range(tasks)]
            rollouts = [
                Rollout(rollout_id=f"{n}/0", group_id=n, segments=(), reward=reward, stop_reason="answer")
                for n in names
            ]
            made = [
                Group(group_id=one.group_id, rollouts=(one,), task=ag.Task(id=one.group_id, prompt="x"))
                for one in rollouts
            ]
            writer.add(made, phase=phase, step=step)
    return folder


def test_compare_uses_a_runs_evaluation_after_training_unless_a_phase_is_given(tmp_path: Path) -> None:
    one = write(tmp_path / "one", PLACES)
    other = write(tmp_path / "other", {("eval", 2): 1.0, ("train", 2): 0.0, ("eval_after", 4): 0.5})
    found = ag.compare(one, other)
    assert (found.means, found.sides) == ((0.75, 0.5), ("after 4 steps of training",) * 2)
    assert ag.compare(one, other, phase="2").means == (0.5, 1.0)
    assert ag.compare(one, one, phase=("before", "after")).means == (0.25, 0.75)
    lines = list(comparison_lines(ag.compare(one, other, phase=["before", "4"], common=True), 5))
    assert lines[:2] == ["one         before training", "other       after 4 steps of training"]


def test_a_missing_evaluation_of_a_run_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    run = write(tmp_path / "run", {("eval_before", 0): 0.0, ("train", 0): 0.0, ("eval", 2): 1.0})
    with pytest.raises(AgentGymError, match=r"^phase: .*has no evaluation 'after'; it has before, 0, 2; choose one"):
        ag.compare(run, run)
    with pytest.raises(AgentGymError, match=r"^one: .* contains no evaluation; pass the folder of one"):
        ag.compare(write(tmp_path / "bare", {("train", 0): 0.0}), run)
    with pytest.raises(ValueError, match=r"^phase: expected one phase, or one for each evaluation"):
        ag.compare(run, run, phase=("0", "2", "2"))


def test_the_phase_does_not_apply_to_a_separate_evaluation(tmp_path: Path) -> None:
    run = write(tmp_path / "run", PLACES)
    alone = write(tmp_path / "alone", {("eval", 0): 1.0})
    found = ag.compare(run, alone, phase="before")
    assert (found.means, found.sides) == ((0.25, 1.0), ("before training", ""))


def test_a_suffix_of_thousands_of_digits_is_not_an_attempt_number(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", {("eval", 0): 1.0}), write(tmp_path / "other", {("eval", 0): 0.0})
    for folder in (one, other):
        with closing(sqlite3.connect(folder / "rollouts.sqlite")) as store, store:
            store.execute("UPDATE rollouts SET rollout_id = group_id || '/' || ?", ("9" * 5000,))
    assert ag.compare(one, other).means == (1.0, 0.0)


def test_only_tasks_whose_rollouts_all_failed_are_left_out(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one", {("eval", 0): 1.0}), write(tmp_path / "other", {("eval", 0): 0.0}, tasks=3)
    with RolloutWriter(other, done=9) as writer:
        why = Failure(type="EngineError", message="down")
        failed = Rollout(
            rollout_id="eval3/0", group_id="eval3", segments=(), reward=None, stop_reason="error", failure=why
        )
        task = ag.Task(id="eval3", prompt="x")
        writer.add([Group(group_id="eval3", rollouts=(failed,), task=task)], phase="eval", step=0)
    found = ag.compare(one, other)
    assert (len(found.rewards), found.left_out) == (3, 1)


@pytest.mark.parametrize("differences", [[0.5] * 4, [1.0, 0.5, 0.0, 0.0, 0.25], [0.5] * 6, [0.0, 0.0]])
def test_the_least_possible_p_is_that_of_differences_with_the_same_sign(differences: list[float]) -> None:
    assert least_p(differences) == pytest.approx(sign_flip_p(differences))


@pytest.mark.parametrize(
    ("differing", "said"),
    [(5, "5 of 7 tasks differ: too few for a p below 0.05"), (0, "no task differs: too few"), (6, None)],
)
def test_too_few_tasks_for_a_small_p_give_a_warning(differing: int, said: str | None) -> None:
    rewards = {str(number): (0.0, float(number < differing)) for number in range(7)}
    text = "\n".join(comparison_lines(Comparison(rewards=rewards), 5))
    assert said in text if said else "too few" not in text


async def test_identical_rewards_are_not_reported_as_certainly_equal() -> None:
    class Fixed(ag.ToolEnv[ag.Task]):
        @classmethod
        def tasks(cls, split: str) -> list[ag.Task]:
            return [ag.Task(id=str(number), prompt="x") for number in range(8)]

        @ag.reward
        def fixed(self) -> float:
            return 3.0

    played = await ag.evaluate(Fixed, Scripted([say("x")]))
    low, high = ag.compare(played, played).interval
    assert low == pytest.approx(-high)
    assert high == pytest.approx(3 * (1 - 0.025**0.125))  # rewards may lie between 0 and 3
    assert played.interval() == pytest.approx((3 * 0.025**0.125, 3.0))


def evaluation(rewards: dict[str, list[float | None]], k: int) -> ag.Evaluation:
    failure = Failure(type="EngineError", message="gone")

    def rollout(name: str, number: int, reward: float | None) -> Rollout:
        lost = {"failure": failure, "stop_reason": "error"} if reward is None else {"stop_reason": "answer"}
        return Rollout(rollout_id=f"{name}/{number}", group_id=name, segments=(), reward=reward, **lost)

    groups = [
        Group(group_id=name, rollouts=tuple(rollout(name, number, reward) for number, reward in enumerate(of)))
        for name, of in rewards.items()
    ]
    return ag.Evaluation(groups=Groups(groups), k=k)


def test_both_sides_compare_equally_many_attempts_matched_by_number_first() -> None:
    one = evaluation({"a": [1.0, 0.0, None, 0.5], "b": [0.0, 0.0, 0.0, 0.0]}, k=4)
    other = evaluation({"a": [None, 1.0], "b": [1.0, 1.0]}, k=2)
    found = ag.compare(one, other)
    assert found.rewards == {"a": (0.0, 1.0), "b": (0.0, 1.0)}
    assert found.attempts_left_out == 4
    assert "attempts    4 left out, so that both sides have equally many per task" in comparison_lines(found, 5)


def test_two_equal_models_with_unequal_attempts_seldom_differ_significantly() -> None:
    rng = np.random.default_rng(0)
    tried, significant = 200, 0
    for _ in range(tried):
        sides = [{str(t): list((rng.random(k) < 0.05).astype(float)) for t in range(12)} for k in (1, 16)]
        significant += ag.compare(evaluation(sides[0], 1), evaluation(sides[1], 16)).p <= 0.05
    assert significant <= 0.05 * tried
