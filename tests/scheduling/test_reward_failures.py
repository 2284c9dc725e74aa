"""Failures in rewards are logged with their line once they exceed 1 % of a run's or evaluation's rollouts."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.run.metrics_logger import MetricsLogger
from agentgym.run.recorder import open_recorder
from agentgym.scheduling.accounting import Groups
from agentgym.scheduling.reward_failures import RewardFailures
from agentgym.testing import FakeSandbox, FakeSandboxPool, Scripted, say
from agentgym.types.rollout import Group

LINES = Path(__file__).read_text().splitlines()
RAISES = next(number for number, line in enumerate(LINES, 1) if line.strip().startswith("return float(self.answer"))
READS = next(number for number, line in enumerate(LINES, 1) if line.strip().startswith("return float(await"))


class Numbers(ag.ToolEnv[ag.Task]):
    """An env whose reward parses any answer as a number."""

    @ag.reward
    async def right(self) -> float:
        return float(self.answer or "") / 100


class Files(ag.ToolEnv[ag.Task]):
    """An env whose reward reads the file that the answer names."""

    sandbox_spec = ag.AnySandbox()

    @ag.reward
    async def read(self) -> float:
        return float(await self.sandbox.read_text(self.answer or ""))


def task(number: int) -> ag.Task:
    return ag.Task(id=str(number), prompt="Say a number.")


async def rollout(number: int, answer: str) -> ag.Rollout:
    return await ag.rollout(Numbers, task(number), Scripted([say(answer)]))


async def test_reward_failures_are_logged_above_one_percent_and_when_they_double() -> None:
    good, bad = await rollout(0, "1"), await rollout(1, "a word")
    counts = RewardFailures()
    assert counts.add([good] * 199) == []
    assert counts.add([bad]) == []
    assert counts.add([bad]) == []
    (said,) = counts.add([bad])
    assert said.startswith(
        "3 of 202 rollouts (1.5 %) have no reward because a reward raised an error or did not return a number; most"
    )
    assert f"Numbers: reward 'right', at {Path(__file__).name}:{RAISES} in right" in said
    assert counts.add([bad] * 2) == []
    assert counts.add([bad])[0].startswith("6 of 205 rollouts (2.9 %)")


async def test_failures_elsewhere_do_not_count_as_reward_failures() -> None:
    class Begins(Numbers):
        async def setup(self) -> None:
            raise RuntimeError("no world")

    failed = await ag.rollout(Begins, task(0), Scripted([say("1")]))
    assert failed.reward is None
    assert RewardFailures().add([failed] * 10) == []


async def test_score_methods_and_group_rewards_that_raise_are_logged_too() -> None:
    class Scores(ag.Env[ag.Task]):
        async def step(self, action: ag.Message) -> ag.StepResult:
            return ag.StepResult([], 0.0, True, False, {})

        async def score(self) -> dict[str, float]:
            return {"right": float("a word")}

    failed = await ag.rollout(Scores, task(0), Scripted([say("1")]))
    (said,) = RewardFailures().add([failed])
    assert "it was Scores.score, at" in said


async def test_zero_rewards_for_unusable_content_are_logged_with_their_line() -> None:
    sandboxes = FakeSandboxPool(lambda: FakeSandbox(files={"one": "1"}))
    rollouts = [await ag.rollout(Files, task(0), Scripted([say(path)]), sandboxes=sandboxes) for path in ("one", "two")]
    (said,) = RewardFailures().add(rollouts)
    assert said.startswith(
        "1 of 2 rollouts (50.0 %) have a reward of 0.0 because of content that the policy wrote or left in"
    )
    assert f"reward 'read', at {Path(__file__).name}:{READS} in read" in said


async def test_an_evaluation_logs_reward_failures(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentgym.launch.evaluate"):
        model = Scripted(lambda text: say("1"))
        evaluation = await ag.evaluate(Numbers, model, tasks=[task(number) for number in range(4)])
        assert caplog.messages == []
        await ag.evaluate(Numbers, Scripted(lambda text: say("word" if "Say a word" in text else "1")), tasks=TASKS)
    assert evaluation.failed == 0
    assert any(f"{Path(__file__).name}:{RAISES} in right" in message for message in caplog.messages)


TASKS = [task(0), ag.Task(id="1", prompt="Say a word.")]


async def test_a_run_logs_reward_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts = [await rollout(0, "1"), await rollout(0, "a word")]
    rollouts = [replace(each, rollout_id=f"0/{number}") for number, each in enumerate(rollouts)]
    async with open_recorder(tmp_path, MetricsLogger(tmp_path, steps=1), first=True, done=0) as record:
        record.collected(Groups([Group(group_id="0", rollouts=tuple(rollouts), task=task(0))]), step=0)
    said = capsys.readouterr().err
    assert (
        "WARNING: 1 of 2 rollouts (50.0 %) have no reward because a reward raised an error or did not return a number"
        in said
    )
    assert f"{Path(__file__).name}:{RAISES} in right" in said
