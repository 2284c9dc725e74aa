"""Chat endpoints as model roles: judges, opponents and group judges, in evaluations and in training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.errors import EngineError
from agentgym.evals.report import score_lines
from agentgym.samples import build_samples
from agentgym.scheduling import run_groups
from agentgym.types.completion import Completion
from tests.engines.endpoint.chat_server import SOON, Request, Sent, chat_server, said

pytest.importorskip("openai", reason="agentgym-kit[endpoint] is not installed")


class Verdict(BaseModel):
    score: float


class Judged(ag.ToolEnv[ag.Task]):
    """An env whose reward is a judge's score."""

    judge = ag.Judge(rubric="1 is good.", response=Verdict)

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=f"t{number}", prompt=f"Say {number}.") for number in range(3)]

    @ag.reward
    async def good(self) -> float:
        return (await self.judge.ask(self.model("judge"), f"The text: {self.answer}")).score


def approves(request: Request, number: int) -> Sent:
    return said('{"score": 1}')


async def test_requests_to_a_judge_that_were_sent_again_are_reported_under_its_name() -> None:
    def answers(request: Request, number: int) -> Sent:
        return Sent("no", 503, SOON) if number == 0 else approves(request, number)

    async with chat_server(answers) as server, ag.Endpoint(server.url, model="j", first_wait_s=0.001) as judge:
        evaluation = await ag.evaluate(Judged, Scripted(lambda text: say("Yes.")), models={"judge": judge})
    assert evaluation.account()["model_sent_again/judge"] == 1
    assert f"{'':<10}1 request to the model 'judge' was sent again after a failure" in score_lines(evaluation)


async def test_requests_to_a_judge_that_were_sent_again_in_vain_are_counted() -> None:
    class Once(Judged):
        judge = ag.Judge(rubric="1 is good.", response=Verdict, retries=0)

    def answers(request: Request, number: int) -> Sent:
        return Sent("no", 503, SOON)

    async with chat_server(answers) as server, ag.Endpoint(server.url, model="j", retries=2) as judge:
        rollout = await ag.rollout(Once, Once.tasks("test")[0], Scripted([say("Yes.")]), models={"judge": judge})
        assert rollout.reward is None
        assert rollout.metrics["model_sent_again/judge"] == judge.sent_again == 2


async def test_an_evaluations_judge_may_be_an_endpoint() -> None:
    async with (
        chat_server(approves) as server,
        ag.Endpoint(server.url, model="j", completion_price=1.0) as judge,
    ):
        evaluation = await ag.evaluate(Judged, Scripted(lambda text: say("Yes.")), k=2, models={"judge": judge})
    assert (evaluation.reward, evaluation.failed, len(server.requests)) == (1.0, 0, 6)
    system, user = server.requests[0]["messages"]
    assert system == {"role": "system", "content": "1 is good."}
    assert user["content"].startswith("The text: Yes.\n\nAnswer with one JSON object")
    assert server.requests[0]["max_tokens"] == 1024
    metrics = evaluation.rollouts[0].metrics
    assert [metrics[f"model_{what}/judge"] for what in ("calls", "tokens", "prompt_tokens")] == [1, 10, 100]
    assert metrics["model_cost/judge"] == pytest.approx(1e-5)
    assert "usage/requests" not in metrics  # they belong to the policy
    assert evaluation.account()["model_cost/judge"] == pytest.approx(6e-5)


async def test_policy_and_judge_may_be_two_endpoints() -> None:
    async with (
        chat_server(lambda request, number: said("Yes.")) as policy,
        chat_server(approves) as server,
        ag.Endpoint(policy.url, model="p") as engine,
        ag.Endpoint(server.url, model="j") as judge,
    ):
        evaluation = await ag.evaluate(Judged, engine, models={"judge": judge})
    assert (evaluation.reward, len(policy.requests), len(server.requests)) == (1.0, 3, 3)
    assert evaluation.account()["requests"] == 3


async def test_a_nonmatching_answer_of_an_endpoint_is_requested_again() -> None:
    def answers(request: Request, number: int) -> Sent:
        return said("Fine.", reason="length") if number == 0 else said('{"score": 0.5}')

    async with chat_server(answers) as server, ag.Endpoint(server.url, model="j") as judge:
        rollout = await ag.rollout(Judged, Judged.tasks("test")[0], Scripted([say("Yes.")]), models={"judge": judge})
    assert rollout.reward == 0.5
    assert "does not fit the schema" in server.requests[1]["messages"][-1]["content"]
    assert [rollout.metrics[f"model_{what}/judge"] for what in ("retries", "cut_answers")] == [1, 1]


async def test_an_endpoint_that_refuses_the_judges_request_fails_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym.judges.model_roles.FIRST_WAIT_S", 0.0)
    refused = Sent("no such model", status=404, headers=SOON)
    async with (
        chat_server(lambda request, number: refused) as server,
        ag.Endpoint(server.url, model="j") as judge,
    ):
        rollout = await ag.rollout(Judged, Judged.tasks("test")[0], Scripted([say("Yes.")]), models={"judge": judge})
    assert rollout.reward is None
    assert "no such model" in (rollout.error or "")


async def test_cached_answers_belong_to_one_model_at_one_endpoint(tmp_path: Path) -> None:
    class Kept(Judged):
        judge = ag.Judge(rubric="1 is good.", response=Verdict, cache=tmp_path / "answers.sqlite")

    async def asked_by(name: str) -> int:
        async with chat_server(approves) as other, ag.Endpoint(server.url, model=name) as judge:
            assert other.url != server.url
            before = len(server.requests)
            await ag.rollout(Kept, Kept.tasks("test")[0], Scripted([say("Yes.")]), models={"judge": judge})
            return len(server.requests) - before

    async with chat_server(approves) as server:
        assert [await asked_by(name) for name in ("one", "one", "other")] == [1, 0, 1]


class Answered(ag.Env[ag.Task]):
    """An env whose opponent has the second and third turn."""

    limits = ag.Limits(turns=8)

    async def step(self, action: ag.Message) -> ag.StepResult:
        ask = [ag.Message(role="user", content=f"Answer: {action['content']}")]
        async with self.fork("subagent", ask, engine="opponent") as opponent:
            words = [await opponent.turn()]
            opponent.reply([ag.Message(role="user", content="And?")])
            words.append(await opponent.turn())
        told = " ".join(word["content"] for word in words if word)
        return ag.StepResult([], float(told == "no never"), True, False, {})


def contradicts(request: Request, number: int) -> Sent:
    return said("never" if request["messages"][-1]["content"] == "And?" else "no")


async def test_an_opponent_may_be_an_endpoint_and_the_policys_turns_are_trained() -> None:
    task = ag.Task(id="t", prompt="Begin.")
    async with chat_server(contradicts) as server, ag.Endpoint(server.url, model="o") as opponent:
        groups = await run_groups(
            Answered, [task], Scripted(lambda text: say("yes")), n=2, models={"opponent": opponent}
        )
    first = groups.rollouts[0]
    assert first.reward == 1.0
    assert [message["content"] for message in server.requests[0]["messages"]] == ["Answer: yes"]
    assert [(s.model, s.trained, len(s.turns)) for s in first.segments] == [("", True, 1), ("opponent", False, 2)]
    assert first.metrics["model_tokens/opponent"] == 20
    assert "usage/completion_tokens" not in first.metrics
    batch = build_samples(groups)
    assert (batch.rollouts, batch.untrained_tokens) == (2, 40)


async def test_the_first_side_may_be_an_endpoint_too() -> None:
    class Led(Answered):
        async def reset(self, **given: Any) -> tuple[list[ag.Message], dict[str, Any]]:
            self.root_engine = "leader"
            return await super().reset(**given)

    async with chat_server(contradicts) as server, ag.Endpoint(server.url, model="o") as engine:
        models = {"leader": engine, "opponent": engine}
        rollout = await ag.rollout(Led, ag.Task(id="t", prompt="Begin."), Scripted([]), models=models)
    assert rollout.reward == 1.0
    assert [s.model for s in rollout.segments] == ["leader", "opponent"]


class Ranked(Judged):
    """An env in which a judge names the best answer to a task."""

    @ag.reward
    async def good(self) -> float:
        return 0.25

    @classmethod
    async def group_reward(cls, task: Any, rollouts: Sequence[ag.Rollout], model: Any) -> list[float]:
        best = int(await model("judge").ask(f"The best of {len(rollouts)} for {task.id}?"))
        return [float(number == best) for number in range(len(rollouts))]


async def test_an_evaluation_adds_group_rewards_and_reruns_a_broken_group(tmp_path: Path) -> None:
    policy = Scripted(lambda text: say("Yes."))
    async with (
        chat_server(lambda request, number: said("1")) as server,
        ag.Endpoint(server.url, model="j") as judge,
    ):
        models = {"judge": judge}
        first = await ag.evaluate(Ranked, policy, n=2, k=2, models=models, output_dir=tmp_path)
        assert first.rewards == {"t0": (0.25, 1.25), "t1": (0.25, 1.25)}
        more = await ag.evaluate(Ranked, policy, n=3, k=2, models=models, output_dir=tmp_path, resume=True)
        assert more.rewards == {f"t{number}": (0.25, 1.25) for number in range(3)}
        assert len(server.requests) == 3
        with pytest.raises(ValueError, match=r"^group_size: .* was started with 2, but this is 3"):
            await ag.evaluate(Ranked, policy, k=3, models=models, output_dir=tmp_path, resume=True)
    kept = json.loads((tmp_path / "settings.json").read_text())
    assert kept["models"] == {"judge": f"{server.url} j"}
    with pytest.raises(ValueError, match=r"^models: .* was started with"):
        await ag.evaluate(Ranked, policy, k=2, models={"judge": policy}, output_dir=tmp_path, resume=True)


async def test_a_group_with_a_failed_rollout_is_judged_again_as_a_whole(tmp_path: Path) -> None:
    class Failing(Scripted):
        """An engine that fails the second rollout of a task at first."""

        fails = True

        async def generate(self, token_ids: Sequence[int], **named: Any) -> Completion:
            if self.fails and named["session"].split("/")[1] == "1":
                raise EngineError("not this one")
            return await super().generate(token_ids, **named)

    policy = Failing(lambda text: say("Yes."))
    models = {"judge": Scripted(lambda text: say("1" if "of 2" in text else "0"))}

    async def evaluated(**resume: Any) -> dict[str, tuple[float | None, ...]]:
        return (await ag.evaluate(Ranked, policy, n=1, k=2, models=models, output_dir=tmp_path, **resume)).rewards

    assert await evaluated() == {"t0": (1.25, None)}
    policy.fails = False
    assert await evaluated(resume=True) == {"t0": (1.25, None)}
    assert await evaluated(resume=True, retry_failed=True) == {"t0": (0.25, 1.25)}
    assert await evaluated(resume=True) == {"t0": (0.25, 1.25)}
