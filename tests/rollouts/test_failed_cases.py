"""Failed cases of hidden tests: their reasons are in the rollout, in its displays, in the log and in check_env."""

import logging

import pytest

import agentgym as ag
from agentgym.files.foreign.content import Unpacker
from agentgym.rollouts import rollout_warnings
from agentgym.sandboxes.protocol.verdicts import KEPT_CASES, KEPT_NAME, kept_cases
from agentgym.store.rows import rollout_of, rollout_row
from agentgym.testing import FakeSandboxPool, Scripted, check_env, say

TASK = ag.Task(id="one", prompt="Write add.")


class Misspelt(ag.ToolEnv[ag.Task]):
    sandbox_spec = ag.AnySandbox()

    async def setup(self) -> None:
        await self.sandbox.write({"solution.py": "def add(a, b):\n    return a + b\n"})

    @ag.reward
    async def right(self) -> float:
        code = "def test_add():\n    from solutoin import add\n    assert add(2, 3) == 5\n"
        return (await self.sandbox.verify(code=code, timeout_s=60)).fraction


class Wrong(Misspelt):
    @ag.reward
    async def right(self) -> float:
        return (await self.sandbox.verify(code="def test_one():\n    assert 1 == 2\n", timeout_s=60)).fraction


class Mended(Misspelt):
    @ag.reward
    async def right(self) -> float:
        await self.sandbox.verify(code="def test_one():\n    assert 1 == 2\n", timeout_s=60)
        return (await self.sandbox.verify(code="def test_one():\n    assert 1 == 1\n", timeout_s=60)).fraction


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_warnings, "_warned_of_cases", {})


async def play(env: type[Misspelt]) -> ag.Rollout:
    return await ag.rollout(env, TASK, Scripted([say("done")]), sandboxes=FakeSandboxPool())


async def test_the_reason_of_a_failed_case_is_in_the_rollout_and_its_displays() -> None:
    rollout = await play(Misspelt)
    assert rollout.reward == 0.0
    assert "No module named 'solutoin'" in rollout.failed_cases["test_add"]
    assert rollout.metrics["failed_cases"] == 1.0
    assert "failed case 'test_add': ModuleNotFoundError: No module named 'solutoin'" in str(rollout)


async def test_a_case_that_passes_in_the_end_is_not_a_failed_case() -> None:
    rollout = await play(Mended)
    assert rollout.reward == 1.0
    assert rollout.failed_cases == {}
    assert "failed_cases" not in rollout.metrics


async def test_the_reason_of_a_failed_case_is_stored() -> None:
    rollout = await play(Misspelt)
    kept = rollout_of(rollout_row(rollout, phase="train", step=0), rollout.segments, Unpacker())
    assert kept.failed_cases == rollout.failed_cases


def test_only_some_of_many_failed_cases_are_kept_and_the_rest_is_counted() -> None:
    kept = kept_cases({f"{number}" * 400: "wrong" for number in range(10, 310)})
    assert len(kept) == KEPT_CASES + 1
    assert max(map(len, kept)) <= KEPT_NAME
    assert kept["(others)"] == f"{300 - KEPT_CASES} more cases failed"


async def test_a_case_that_failed_with_an_error_is_logged_once_per_env_and_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, rollout_warnings.__name__):
        for _ in range(2):
            await play(Misspelt)
            await play(Wrong)
    [said] = caplog.messages
    assert "Misspelt: the hidden test case 'test_add' failed: ModuleNotFoundError" in said


async def test_check_env_does_not_log_the_cases_that_its_own_rollouts_fail(caplog: pytest.LogCaptureFixture) -> None:
    class Unsolved(Misspelt):
        """Has kinds of its own, since each kind is logged once per env."""

    with caplog.at_level(logging.WARNING, rollout_warnings.__name__), pytest.raises(AssertionError):
        await check_env(Unsolved, TASK, oracle=[say("done")], sandboxes=FakeSandboxPool())
    assert not [said for said in caplog.messages if "hidden test case" in said]


async def test_check_env_reports_why_a_hidden_case_of_the_oracle_failed() -> None:
    with pytest.raises(AssertionError, match=r"1 of its hidden cases failed, such as 'test_add': ModuleNotFoundError"):
        await check_env(Misspelt, TASK, oracle=[say("done")], sandboxes=FakeSandboxPool())
