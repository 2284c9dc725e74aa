"""Content that the policy left in its sandbox is scored: no content of a sandbox turns a reward into None."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.errors import SandboxContentError, SandboxError
from agentgym.sandboxes.protocol.content import MissingContent, NotAFile
from agentgym.scheduling.group_rewards import GroupRewards
from agentgym.testing import FakeSandbox, FakeSandboxPool, Scripted, say

TASK = ag.Task(id="t", prompt="Write result.txt.")
FILES: dict[str, str | bytes] = {"folder/inner": "x", "large": "x" * 200, "latin": b"\xff\xfe", "good": "1"}


class Reads(ag.ToolEnv[ag.Task]):
    """An env whose only file is named by the model's answer."""

    sandbox_spec = ag.AnySandbox()

    @ag.reward
    async def kept(self) -> float:
        """Another reward, which still counts."""
        return 0.25


async def played(env: type[ag.Env[Any]], answer: str = "missing") -> ag.Rollout:
    """Run one rollout with that answer, in a sandbox with FILES."""
    return await ag.rollout(
        env, TASK, Scripted([say(answer)]), sandboxes=FakeSandboxPool(lambda: FakeSandbox(files=FILES))
    )


class ReadsBytes(Reads):
    @ag.reward
    async def right(self) -> float:
        return float((await self.sandbox.read(self.answer or "", limit=100)) == b"1")


class ReadsText(Reads):
    @ag.reward
    async def right(self) -> float:
        return float((await self.sandbox.read_text(self.answer or "", limit=100)) == "1")


class ReadsFromAThread(Reads):
    @ag.reward
    def right(self) -> float:
        reading = asyncio.run_coroutine_threadsafe(self.sandbox.read_text(self.answer or "", limit=100), self.loop)
        return float(reading.result() == "1")

    async def setup(self) -> None:
        self.loop = asyncio.get_running_loop()


class ReadsInAGroup(Reads):
    @ag.reward
    async def right(self) -> float:
        async with asyncio.TaskGroup() as reads:
            both = [reads.create_task(self.sandbox.read_text(self.answer or "", limit=100)) for _ in range(2)]
        return float(both[0].result() == both[1].result() == "1")


class SaysItOtherwise(Reads):
    @ag.reward
    async def right(self) -> float:
        try:
            return float((await self.sandbox.read_text(self.answer or "", limit=100)) == "1")
        except SandboxContentError as error:
            raise RuntimeError("there is no result") from error


class Lists(Reads):
    @ag.reward
    async def right(self) -> float:
        if self.answer == "good":
            return 1.0
        return float(len(await self.sandbox.list(self.answer or "")) < 0)


class Gets(Reads):
    @ag.reward
    async def right(self) -> float:
        if self.answer == "good":
            return 1.0
        await self.sandbox.get(self.answer or "", Path("never"), limit=0)
        return 0.0


class Archives(Reads):
    @ag.reward
    async def right(self) -> float:
        if self.answer == "good":
            return 1.0
        return float(len(await self.sandbox.archive(self.answer or "", limit=0)) < 0)


class Runs(Reads):
    """An env that passes the model's text to programs."""

    @ag.reward
    async def right(self) -> float:
        if self.answer == "good":
            return 1.0
        verdict = await self.sandbox.verify(command=f"./solve '{self.answer}\0")
        return verdict.fraction


ENVS = [ReadsBytes, ReadsText, ReadsFromAThread, ReadsInAGroup, SaysItOtherwise, Lists, Gets, Archives, Runs]
SANDBOX_CONTENT = SandboxContentError.counted
BAD = ["missing", "large", "../out", "a\0b", "folder/../.."]
LINE = Path(__file__).read_text().splitlines().index("class ReadsText(Reads):") + 4
"""The line at which ReadsText reads."""


@pytest.mark.parametrize("env", ENVS, ids=[env.__name__ for env in ENVS])
async def test_a_reward_that_meets_unusable_content_is_zero_and_counted(env: type[ag.Env[Any]]) -> None:
    for answer in BAD:
        rollout = await played(env, answer)
        assert (rollout.failure, rollout.reward, rollout.rewards) == (None, 0.25, {"kept": 0.25, "right": 0.0}), answer
        assert rollout.metrics[SANDBOX_CONTENT] == 1.0
    good = await played(env, "good")
    assert good.reward == 1.25
    assert SANDBOX_CONTENT not in good.metrics


@pytest.mark.parametrize("answer", ["folder", "latin"])
async def test_a_folder_and_invalid_text_are_unusable_content_too(answer: str) -> None:
    assert (await played(ReadsText, answer)).reward == 0.25


async def test_such_a_reward_is_displayed_and_logged_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    class Shown(ReadsText):
        pass

    with caplog.at_level(logging.WARNING):
        rollout = await played(Shown, "folder")
        await played(Shown, "folder")
    assert (
        f"failed case \"reward 'right'\": it is 0.0: NotAFile: 'folder' is not a file, at {Path(__file__).name}:{LINE}"
        in str(rollout)
    )
    logged = [record.getMessage() for record in caplog.records if "Shown" in record.getMessage()]
    assert len(logged) == 1
    assert f"{Path(__file__).name}:{LINE} in right" in logged[0]
    assert "reward 'right'" in logged[0]
    assert SANDBOX_CONTENT in logged[0]


async def test_a_mistake_of_the_env_in_a_reward_stays_a_failure() -> None:
    class Mistaken(Reads):
        @ag.reward
        async def right(self) -> float:
            try:
                await self.sandbox.read("missing")
            except SandboxContentError:
                return {"name": 1.0}["no such name"]
            return 1.0

    rollout = await played(Mistaken)
    assert rollout.reward is None
    assert rollout.failure is not None
    assert rollout.failure.type == "EnvError"


async def test_a_sandbox_that_fails_by_itself_stays_a_failure() -> None:
    class Dying(Reads):
        @ag.reward
        async def right(self) -> float:
            raise SandboxError("sandbox_lost: its machine is gone")

    rollout = await played(Dying)
    assert rollout.reward is None
    assert rollout.failure is not None
    assert rollout.failure.type == "SandboxError"


class Scores(ag.Env[ag.Task]):
    """An env without tools that ends at the first answer."""

    sandbox_spec = ag.AnySandbox()

    async def step(self, action: ag.Message) -> ag.StepResult:
        return ag.StepResult([], 0.5, True, False, {})


async def test_a_score_method_that_meets_unusable_content_adds_nothing() -> None:
    class Scored(Scores):
        async def score(self) -> dict[str, float]:
            return {"right": float(await self.sandbox.read_text("missing") == "1")}

    rollout = await played(Scored)
    assert (rollout.failure, rollout.reward, rollout.metrics[SANDBOX_CONTENT]) == (None, 0.5, 1.0)


async def test_a_step_that_meets_unusable_content_ends_the_rollout_which_is_scored() -> None:
    class Steps(Scores):
        async def step(self, action: ag.Message) -> ag.StepResult:
            await self.sandbox.read_text("missing")
            return ag.StepResult([], 0.5, False, False, {})

        async def score(self) -> dict[str, float]:
            return {"kept": 0.25}

    rollout = await played(Steps)
    assert (rollout.failure, rollout.reward, rollout.stop_reason) == (None, 0.25, SANDBOX_CONTENT)


async def test_a_close_that_meets_unusable_content_keeps_the_reward() -> None:
    class Closes(Reads):
        async def close(self) -> None:
            await self.sandbox.read("missing")

    assert (await played(Closes)).reward == 0.25


async def test_unusable_content_before_the_first_turn_is_a_failure() -> None:
    class Begins(Reads):
        async def setup(self) -> None:
            await self.sandbox.read("missing")

    rollout = await played(Begins)
    assert rollout.reward is None
    assert rollout.failure is not None
    assert rollout.failure.type == "EnvError"


async def test_a_group_reward_that_meets_unusable_content_adds_nothing() -> None:
    class Grouped(Reads):
        @classmethod
        async def group_reward(
            cls, task: ag.Task, rollouts: Sequence[ag.Rollout], model: Callable[[str], Any]
        ) -> Sequence[float]:
            async with FakeSandboxPool().lease() as sandbox:
                return [float(await sandbox.read_text("missing") == "1")] * len(rollouts)

    rollouts = [await played(Grouped) for _ in range(2)]
    added = await GroupRewards(Grouped, {}).added(TASK, rollouts, seed=0)
    assert [each.reward for each in added] == [0.25, 0.25]
    assert sum(each.metrics[SANDBOX_CONTENT] for each in added) == 1.0


async def test_unusable_content_in_a_tool_is_an_error_that_the_model_reads() -> None:
    class Shows(Reads):
        @ag.tool
        async def show(self, path: str) -> str:
            """Show a file."""
            return await self.sandbox.read_text(path)

    script = Scripted([ag.testing.call("show", path="missing"), say("done")])
    rollout = await ag.rollout(Shows, TASK, script, sandboxes=FakeSandboxPool())
    assert "No such file or directory: 'missing'" in str(rollout)
    assert rollout.reward == 0.25


def test_content_errors_are_subclasses_of_pythons_own() -> None:
    assert issubclass(MissingContent, FileNotFoundError)
    assert issubclass(NotAFile, ValueError)
    assert issubclass(SandboxContentError, ag.ToolError)


async def test_a_reward_that_is_too_large_for_a_float_is_named() -> None:
    class Huge(Reads):
        @ag.reward
        def right(self) -> int:
            return 10**5000

    rollout = await played(Huge)
    assert rollout.failure is not None
    assert "reward 'right' returned a int that is too long to print (int): return a number" in str(rollout.failure)
