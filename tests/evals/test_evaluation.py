"""Evaluations: which tasks are run, how many of them are solved, and what failed."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import Failure
from agentgym.evals.evaluation import Evaluation
from agentgym.evals.report import score_lines
from agentgym.scheduling import Schedule, Scheduler, run_groups
from agentgym.scheduling.run_groups import Groups
from agentgym.types.rollout import Group, Rollout
from tests.support.virtual_time import run_in_virtual_time


class Guess(ag.ToolEnv[ag.Task]):
    """The right answer is the task's id."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        first = 0 if split == "train" else 100
        return [ag.Task(id=str(first + i), prompt=({"role": "user", "content": "?"},)) for i in range(5)]

    @ag.reward
    def right(self) -> float:
        if self.answer == "break":
            raise ValueError("judge is down")
        return float(self.answer == self.task.id)


class NoTest(Guess):
    """Has only training tasks."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return Guess.tasks("train") if split == "train" else []


def group(name: str, *rewards: float | None) -> Group:
    made = [
        Rollout(
            rollout_id=f"{name}/{i}",
            group_id=name,
            segments=(),
            reward=reward,
            stop_reason="answer",
            failure=Failure(type="EngineError", message="down") if reward is None else None,
        )
        for i, reward in enumerate(rewards)
    ]
    return Group(group_id=name, rollouts=tuple(made))


@pytest.mark.parametrize("engine", [None, [say("101")], Scripted])
async def test_a_value_that_is_not_an_engine_is_refused_with_what_to_pass(engine: Any) -> None:
    told = pytest.raises(TypeError, match=r"^engine: must be an engine, got .*TransformersEngine\(MODEL\).*Scripted\(")
    with told:
        await ag.evaluate(Guess, engine)
    with told:
        await ag.rollout(Guess, Guess.tasks("test")[0], engine)
    with told:
        await run_groups(Guess, Guess.tasks("test"), engine, n=1)
    with told:
        Scheduler(Guess, Guess.tasks("test"), engine, Schedule(group_size=1))


async def test_each_held_out_task_is_run_k_times() -> None:
    evaluation = await ag.evaluate(Guess, Scripted(lambda text: say("101")), n=3, k=2)
    assert evaluation.rewards == {"100": (0.0, 0.0), "101": (1.0, 1.0), "102": (0.0, 0.0)}
    assert evaluation.reward == pytest.approx(1 / 3)
    assert evaluation.pass_at(1) == evaluation.pass_at(2) == pytest.approx(1 / 3)
    assert len(evaluation.rollouts) == 6
    assert (evaluation.failed, evaluation.failures) == (0, [])


async def test_given_tasks_replace_the_held_out_ones() -> None:
    evaluation = await ag.evaluate(Guess, Scripted(lambda text: say("1")), tasks=Guess.tasks("train")[:2])
    assert evaluation.rewards == {"0": (0.0,), "1": (1.0,)}


def test_pass_at_k_is_the_share_of_samples_of_size_k_with_a_solved_rollout() -> None:
    rewards = {"a": (1.0, 0.0, 0.0, 0.0), "b": (1.0, 1.0, 0.0, None), "c": (0.0, None, None, None)}
    evaluation = Evaluation(groups=Groups([group(name, *of) for name, of in rewards.items()]), k=4)
    assert evaluation.pass_at(1) == pytest.approx((1 / 4 + 2 / 3 + 0) / 3)
    assert evaluation.pass_at(2) == pytest.approx((1 / 2 + 1) / 2)  # c has one scored rollout
    assert evaluation.pass_at(4) == pytest.approx(1.0)
    assert evaluation.failures == [("EngineError: down", 4)]
    assert math.isnan(Evaluation(groups=Groups([group("c", None)]), k=1).reward)


async def test_evaluations_that_cannot_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^n, k: must be at least 1"):
        await ag.evaluate(Guess, Scripted([]), n=0)
    with pytest.raises(ValueError, match=r"^tasks: the sequence is empty"):
        await ag.evaluate(Guess, Scripted([]), tasks=[])
    with pytest.raises(ValueError, match=r'^tasks: NoTest\.tasks\("test"\) has no task'):
        await ag.evaluate(NoTest, Scripted([]))
    with pytest.raises(ValueError, match=r"^k: must be from 1 to 2"):
        Evaluation(groups=Groups([group("a", 1.0)]), k=2).pass_at(3)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"k": "2"}, ValueError, r"^k: must be a whole number, got '2'"),
        ({"n": 2.0}, ValueError, r"^n: must be a whole number, got 2\.0"),
        ({"tasks": "train"}, TypeError, r"^tasks: must be a sequence of tasks, .*got 'train'"),
        ({"sampling": {"temperature": 1}}, TypeError, r"^sampling: must be an ag\.Sampling, .*got \{"),
        ({"sandboxes": ag.AnySandbox()}, TypeError, r"^sandboxes: .*AnySandbox\(.*open it: `async with SANDBOX\.open"),
        ({"sandboxes": 3}, TypeError, r"^sandboxes: must be an open pool of sandboxes, got 3"),
    ],
)
async def test_an_argument_of_the_wrong_type_is_named(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        await ag.evaluate(Guess, Scripted([say("101")]), **arguments)


async def test_unopened_sandboxes_are_refused_in_a_single_rollout() -> None:
    with pytest.raises(TypeError, match=r"^sandboxes: must be an open pool of sandboxes, .*open it"):
        await ag.rollout(Guess, Guess.tasks("test")[0], Scripted([say("1")]), sandboxes=ag.AnySandbox())  # type: ignore[arg-type]


@pytest.mark.parametrize(("n", "warned"), [(400, True), (5, False), (None, False)])
async def test_fewer_tasks_than_requested_give_a_warning(
    n: int | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    evaluation = await ag.evaluate(Guess, Scripted([say("101")]), n=n)
    assert len(evaluation.groups) == 5
    assert ("n is 400, but there are only 5 tasks" in caplog.text) == warned


class Tooled(Guess):
    """Has a tool that it doesn't need."""

    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "nothing"


class Answering(Tooled):
    """Answers calls in its own step."""

    async def step(self, action: ag.Message) -> ag.StepResult:
        messages = [ag.Message(role="tool", content="", tool_call_id=made["id"]) for made in action["tool_calls"]]
        return ag.StepResult(messages, 0.0, True, False, {})


@pytest.mark.parametrize(
    ("env", "said", "k", "warned"),
    [
        (Tooled, [say("1")], 2, True),
        (Tooled, [say("1")], 1, False),  # too few rollouts
        (Tooled, [call("look"), say("1")], 2, False),
        (Answering, [call("look")], 2, False),
        (Tooled, [call("none"), say("1")], 2, True),  # a malformed call
        (Guess, [say("1")], 2, False),  # no tools
    ],
)
async def test_an_evaluation_in_which_no_rollout_calls_a_tool_gives_one_warning(
    env: type[ag.Env[Any]], said: list[Any], k: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await ag.evaluate(env, Scripted(said), n=5, k=k)
    assert caplog.text.count(f"None of {5 * k} rollouts with tools has called one") == warned


def test_a_call_that_a_limit_cuts_off_counts_as_a_call(caplog: pytest.LogCaptureFixture) -> None:
    class Waiting(Tooled):
        limits = ag.Limits(seconds=1.0)

        @ag.tool
        async def wait(self) -> str:
            """Wait."""
            await asyncio.Event().wait()
            return ""

    evaluation = run_in_virtual_time(ag.evaluate(Waiting, Scripted([call("wait")]), k=2))
    assert {rollout.stop_reason for rollout in evaluation.rollouts} == {"seconds"}
    assert "called" not in caplog.text


async def test_tools_that_half_of_the_rollouts_do_not_need_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    tasks = [ag.Task(id=str(number), prompt="?") for number in (100, 101)]
    await ag.evaluate(Tooled, Scripted([say("101")]), tasks=tasks, k=5)
    assert "called" not in caplog.text


class Parts(Guess):
    """Has two rewards, one of which is a part, and a tool that fails."""

    @ag.tool
    def look(self) -> str:
        """Look."""
        raise ag.ToolError("dark")

    @ag.reward
    def right(self) -> float:
        return 0.8

    @ag.reward(weight=0.5)
    def kind(self) -> float:
        return float(self.answer == "101") / 2


async def test_an_evaluation_reports_its_named_rewards_and_the_solved_threshold(tmp_path: Path) -> None:
    engine = Scripted([call("look"), call("nothing"), say("101")])
    evaluation = await ag.evaluate(Parts, engine, n=2, k=2, solved=0.9, output_dir=tmp_path)
    assert evaluation.named_rewards() == {"right": pytest.approx(0.8), "kind": pytest.approx(0.5)}
    assert evaluation.reward == pytest.approx(1.05)
    assert (evaluation.pass_at(1), evaluation.pass_at(1, solved=1.1), evaluation.solved_in(evaluation.groups[0])) == (
        1.0,
        0.0,
        2,
    )
    assert evaluation.metrics()["eval/reward/kind"] == pytest.approx(0.5)
    assert evaluation.ids_solved(1.0, 1.0) == ["100", "101"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rewards"] == evaluation.named_rewards()
    assert (summary["solved_from"], summary["tasks"]["100"]["solved"]) == (0.9, 2)
    calls = {"tool_calls": 1.0, "tool_errors": 2.0, "malformed_calls": 1.0, "retries": 0.0}
    assert {name: summary[name] for name in calls} == evaluation.calls() == calls
    said = list(score_lines(evaluation))
    assert said[1:3] == ["          0.800  right", "          0.500  kind"]
    assert "solved    with a reward of at least 0.9" in said
    assert "calls     1.00 per rollout, 2.00 errors, 1.00 malformed" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seed": -1}, "seed: must be from 0 to"),
        ({"seed": 2**63}, "seed: must be from 0 to"),
        ({"ray": None}, "ray: must be 'off', 'auto' or 'HOST:PORT', got None"),
        ({"output_dir": 5}, "output_dir: must be a path, got 5"),
        ({"output_dir": ""}, "output_dir: must be a path, got ''"),
    ],
)
async def test_invalid_arguments_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{said}"):
        await ag.evaluate(Guess, Scripted([say("101")]), **given)


@pytest.mark.parametrize("solved", [float("nan"), "1", True])
async def test_the_solved_threshold_must_be_a_finite_number(solved: Any) -> None:
    with pytest.raises(ValueError, match=r"^solved: must be a finite number"):
        await ag.evaluate(Guess, Scripted([say("101")]), solved=solved)


async def test_a_folder_is_not_resumed_with_fewer_tasks_or_attempts_than_it_has(tmp_path: Path) -> None:
    engine = Scripted([say("101")])
    await ag.evaluate(Guess, engine, n=4, k=2, output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^n, tasks: .*of 2 tasks that are not among these 2, such as '102'.*n=4"):
        await ag.evaluate(Guess, engine, n=2, k=2, output_dir=tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"^k: .*more than 1 rollouts of a task, such as '100/1'"):
        await ag.evaluate(Guess, engine, n=4, k=1, output_dir=tmp_path, resume=True)
    more = await ag.evaluate(Guess, engine, n=5, k=3, output_dir=tmp_path, resume=True)
    assert (len(more.rollouts), more.resumed) == (15, 8)
