"""A turn that a token limit cuts off is scored on the text that it has, unless the env leaves it out."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Reply, Scripted, raw, say
from agentgym.evals.report import score_lines
from agentgym.evals.rescore import rescore
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout

TASK = ag.Task(id="t", prompt="8 + 4 = ?")
LONG = "8 + 4 = 12, because eight and four are twelve."
OPENED = len(ByteTokenizer().encode("<|im_start|>user\n8 + 4 = ?<|im_end|>\n<|im_start|>assistant\n"))


class Sums(ag.ToolEnv[ag.Task]):
    """Rewards a text that contains the sum."""

    made: ClassVar[list[str]] = []

    @ag.tool
    def count(self, text: str) -> str:
        """Count."""
        self.made.append(text)
        return "many"

    @ag.reward
    def right(self) -> float:
        return float("12" in (self.answer or "")) + 2.0 * (self.answer is None)


class Stepped(ag.Env[ag.Task]):
    """Rewards the text of each turn, in `step`."""

    async def step(self, action: Message) -> ag.StepResult:
        told = Message(role="user", content="go on")
        return ag.StepResult([told], float("12" in action["content"]), False, False, {})


class Named(Stepped):
    async def step(self, action: Message) -> ag.StepResult:
        return ag.StepResult([], 0.0, True, False, {"rewards": {"right": float("12" in action["content"])}})

    async def score(self) -> dict[str, float]:
        raise AssertionError("the step has returned the outcome")


async def play(env: type[Any], *replies: Reply | str, **limits: Any) -> Rollout:
    cut = type(env.__name__, (env,), {"limits": replace(ag.Limits(turn_tokens=12), **limits)})
    return await ag.rollout(cut, TASK, Scripted([say(r) if isinstance(r, str) else r for r in replies]))


CONTEXT = {"turn_tokens": 900, "context_tokens": OPENED + 12}


@pytest.mark.parametrize(
    ("env", "limits", "reason"),
    [
        (Sums, {}, "length"),
        (Sums, {"turn_tokens": 900, "tokens": 12}, "tokens"),
        (Stepped, {}, "length"),
        (Stepped, CONTEXT, "context"),
        (Named, {}, "length"),
        (Named, CONTEXT, "context"),
    ],
)
async def test_a_cut_turn_is_scored_on_its_text(env: type[Any], limits: Any, reason: str) -> None:
    rollout = await play(env, LONG, **limits)
    assert (rollout.reward, rollout.stop_reason, rollout.metrics["cut_turns"]) == (1.0, reason, 1)
    assert rollout.messages[-1]["content"].strip() == "8 + 4 = 12,"
    wrong = await play(env, "It is " + LONG, **limits)
    assert (wrong.reward, wrong.stop_reason) == (0.0, reason)


async def test_the_reward_of_a_cut_turn_is_that_of_its_turn_and_its_answer_is_not_kept() -> None:
    rollout = await play(Stepped, "12", LONG)
    assert [turn.reward for turn in rollout.segments[0].turns] == [1.0, 1.0]
    assert [len(turn.env_messages) for turn in rollout.segments[0].turns] == [1, 0]


async def test_a_call_in_a_cut_turn_is_not_made() -> None:
    call = '<tool_call>{"name": "count", "arguments": {"text": "12"}}</tool_call>'
    rollout = await play(Sums, raw(f"12{call} and then"), turn_tokens=len(f"12{call}") + 1)
    assert "tool_calls" in rollout.messages[-1]
    assert (Sums.made, rollout.reward, rollout.metrics["tool_calls"]) == ([], 1.0, 0)


async def test_an_env_can_leave_cut_turns_out() -> None:
    class Strict(Sums):
        async def step_cut(self, action: Message) -> None:
            return None

    rollout = await play(Strict, LONG)
    assert (rollout.reward, rollout.stop_reason, rollout.metrics["cut_turns"]) == (2.0, "length", 1)


async def test_a_limit_between_two_turns_leaves_no_answer() -> None:
    call = '<tool_call>{"name": "count", "arguments": {"text": "12"}}</tool_call>'
    rollout = await play(Sums, raw(call), turns=1, turn_tokens=900)
    assert (rollout.reward, rollout.stop_reason, rollout.metrics.get("cut_turns")) == (2.0, "turns", None)


async def test_a_cut_summary_is_no_answer() -> None:
    class Compacting(Stepped):
        context = ag.Compact(turns=1)

    rollout = await play(Compacting, "hello", LONG)
    assert (rollout.reward, rollout.stop_reason) == (0.0, "length")


async def test_an_evaluation_says_how_many_turns_were_cut_and_scores_them_again_alike(tmp_path: Path) -> None:
    class Cut(Sums):
        limits = ag.Limits(turn_tokens=12)

        @classmethod
        def tasks(cls, split: ag.Split) -> list[ag.Task]:
            return [TASK, ag.Task(id="u", prompt="8 + 4 = ?")]

    def reply(text: str) -> Message:
        return say(LONG)

    played = await ag.evaluate(Cut, Scripted(reply), output_dir=tmp_path / "played")
    assert "turns     2, 2 cut off by a token limit" in list(score_lines(played))
    again = await rescore(tmp_path / "played", Cut, tmp_path / "again")
    assert (again.reward.before, again.reward.after, again.failures) == ([1.0, 1.0], [1.0, 1.0], [])
