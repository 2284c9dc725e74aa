"""Model roles: an env queries them in addition to its policy; their use is counted and never trained."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, Field

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, raw, say
from agentgym.errors import EngineError, EnvError
from agentgym.judges import model_roles as named
from agentgym.judges.structured import asking_for
from agentgym.machine import time_limits
from agentgym.scheduling import run_groups
from agentgym.testing import check_env
from agentgym.types.completion import Completion
from tests.support.response_formats import END, tokenizer_of
from tests.support.virtual_time import run_in_virtual_time

TASK = ag.Task(id="t", prompt="Write a line.")


class Verdict(BaseModel):
    """A judge's verdict."""

    score: int = Field(ge=0, le=10)
    reason: str = ""


class Essay(ag.ToolEnv[ag.Task]):
    """An env that is judged by another model."""

    @ag.reward
    async def good(self) -> float:
        verdict = await self.model("judge").ask(f"Judge: {self.answer}", Verdict)
        return verdict.score / 10


class Chatty(ag.ToolEnv[ag.Task]):
    """An env that requests plain text."""

    @ag.reward
    async def nice(self) -> float:
        return float(await self.model("judge").ask([ag.Message(role="user", content="Nice?")]) == "yes")


class Failing(Scripted):
    """An engine that fails that often before it answers."""

    def __init__(self, replies: Any, failures: int) -> None:
        super().__init__(replies)
        self.failures = failures

    async def generate(self, *args: Any, **named: Any) -> Completion:
        if self.failures:
            self.failures -= 1
            raise EngineError("busy")
        return await super().generate(*args, **named)


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "FIRST_WAIT_S", 0.0)


async def play(env: type[Any], judge: Any, **given: Any) -> ag.Rollout:
    return await ag.rollout(env, TASK, Scripted([say("A line.")]), models={"judge": judge}, **given)


async def test_an_env_queries_a_model_by_name_and_reads_its_text(no_leaks: None) -> None:
    assert (await play(Chatty, Scripted([say("yes")]))).reward == 1.0


async def test_an_answer_is_parsed_into_the_requested_pydantic_model(no_leaks: None) -> None:
    judge = Scripted([raw('I think: ```json\n{"score": 7, "reason": "a {brace}"}\n```')])
    assert (await play(Essay, judge)).reward == 0.7


@pytest.mark.parametrize(
    ("form", "thought", "quoted", "answer"),
    [
        ("hermes", "<think>Hm.</think>", "<tool_call>{}</tool_call>", "It wrote {} twice."),
        ("hermes", "", "<tool_call>{</tool_call>", "It wrote {} twice."),
        ("mistral", "[THINK]Hm.[/THINK]", "[TOOL_CALLS]look[ARGS]{}", "It wrote\n{}"),
        ("gemma", "<|channel>thought\nHm.<channel|>", "<|tool_call>call:look{}<tool_call|>", "It wrote {} twice."),
    ],
)
async def test_a_call_that_a_model_quotes_stays_in_its_answer(
    form: str, thought: str, quoted: str, answer: str
) -> None:
    quoted = quoted.replace("{}", '{"name": "look", "arguments": {}}') if form == "hermes" else quoted
    text = answer.replace("{}", quoted)
    judge = Scripted([thought + text], tokenizer=tokenizer_of(form), end=END)
    asked: list[str] = []

    class Reads(ag.ToolEnv[ag.Task]):
        @ag.reward
        async def read(self) -> float:
            asked.append(await self.model("judge").ask("What did it write?"))
            return 1.0

    await ag.rollout(Reads, TASK, Scripted([say("done")]), models={"judge": judge})
    assert asked == [text]


async def test_a_nonmatching_answer_is_requested_again_with_the_reason() -> None:
    texts: list[str] = []

    def judge(text: str) -> ag.Message:
        texts.append(text)
        return say('{"score": 3}' if "Input should be less than or equal to 10" in text else '{"score": 30}')

    rollout = await play(Essay, Scripted(judge))
    assert (rollout.reward, len(texts)) == (0.3, 2)
    assert '"maximum": 10' in texts[0]
    assert rollout.metrics["model_calls/judge"] == 2
    assert rollout.metrics["model_retries/judge"] == 1


async def test_a_model_that_never_answers_as_requested_gives_a_rollout_without_a_reward() -> None:
    rollout = await play(Essay, Scripted(lambda text: say("no idea")))
    assert rollout.reward is None
    assert rollout.failure is not None
    assert rollout.failure.type == "EngineError"
    assert "model 'judge': no valid Verdict in 3 responses; the last one: there is no JSON object" in str(rollout.error)


async def test_a_request_to_a_failing_engine_is_retried(no_wait: None) -> None:
    rollout = await play(Essay, Failing([say('{"score": 10}')], failures=2))
    assert (rollout.reward, rollout.metrics["model_retries/judge"]) == (1.0, 2)
    rollout = await play(Essay, Failing([say('{"score": 10}')], failures=3))
    assert "busy" in str(rollout.error)


def test_waits_between_retries_grow() -> None:
    async def timed() -> tuple[float, float | None]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        rollout = await play(Chatty, Failing([say("yes")], failures=2))
        return loop.time() - begun, rollout.reward

    seconds, reward = run_in_virtual_time(timed())
    assert reward == 1.0
    assert seconds == pytest.approx(0.5 + 1.0)


class Noted(Scripted):
    """An engine that records the settings of its requests, and whose answers never match."""

    def __init__(self) -> None:
        super().__init__(lambda text: say("no"))
        self.asked: list[tuple[int, float]] = []

    async def generate(self, *args: Any, max_tokens: int, sampling: ag.Sampling, **given: Any) -> Completion:
        self.asked.append((max_tokens, sampling.temperature))
        return await super().generate(*args, max_tokens=max_tokens, sampling=sampling, **given)


async def test_all_ways_of_querying_a_model_have_the_same_default_settings() -> None:
    class Asks(ag.ToolEnv[ag.Task]):
        @ag.reward
        async def one(self) -> float:
            model = self.model("judge")
            await model.ask("One?")
            for asking in (model.ask("Two?", Verdict), model.ask_json("Three?", Verdict)):
                with pytest.raises(EngineError, match="no valid Verdict in 3 responses"):
                    await asking
            return 1.0

    judge = Noted()
    assert (await play(Asks, judge)).reward == 1.0
    assert judge.asked == [(1024, 0.0)] * 7


def test_the_schema_ends_the_last_user_message_or_is_a_separate_message() -> None:
    hello, hi = ag.Message(role="user", content="Hello."), ag.Message(role="assistant", content="Hi.")
    (alone,) = asking_for(Verdict, [])
    assert alone["role"] == "user"
    assert alone["content"].startswith("Answer with one JSON object and nothing else.")
    assert asking_for(Verdict, [hello, hi]) == [hello, hi, alone]
    assert asking_for(Verdict, [hi, hello]) == [hi, {"role": "user", "content": f"Hello.\n\n{alone['content']}"}]


async def test_a_models_use_is_in_the_rollouts_metrics_but_not_among_the_policys_tokens() -> None:
    rollout = await play(Essay, Scripted([say('{"score": 10}')]))
    metrics = rollout.metrics
    assert metrics["model_calls/judge"] == 1
    assert metrics["model_tokens/judge"] == len('{"score": 10}<|im_end|>') - len("<|im_end|>") + 1
    assert metrics["model_prompt_tokens/judge"] > 20
    assert metrics["model_seconds/judge"] > 0
    assert rollout.sampled_tokens == len("A line.") + 1
    assert len(rollout.segments) == 1


async def test_a_missing_model_error_lists_the_given_names_and_how_to_add_one() -> None:
    rollout = await ag.rollout(Essay, TASK, Scripted([say("x")]), models={"user": Scripted([say("x")])})
    assert rollout.reward is None
    for part in (
        "Essay: there is no model 'judge'",
        "there are: user",
        'models={"judge": engine}',
        "ag.ModelRoleConfig(",
    ):
        assert part in str(rollout.error)
    with pytest.raises(EnvError, match="only available inside a rollout"):
        Essay(TASK).model("judge")


class Judged(Essay):
    """An env with its own judge."""

    fallback_models = {"judge": Scripted([say('{"score": 4}')])}  # noqa: RUF012


async def test_a_fallback_model_answers_if_no_model_was_given_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    named._warn_of_fallback.cache_clear()
    for _ in range(2):
        assert (await ag.rollout(Judged, TASK, Scripted([say("x")]))).reward == 0.4
    assert (await play(Judged, Scripted([say('{"score": 9}')]))).reward == 0.9
    (warned,) = [record.getMessage() for record in caplog.records]
    for part in (
        "Judged: no model 'judge' was given",
        "fallback model",
        'models={"judge": engine}',
        "ag.ModelRoleConfig(",
    ):
        assert part in warned


async def test_a_fallback_model_must_be_a_named_engine() -> None:
    with pytest.raises(ValueError, match=r"Wrong\.fallback_models: must be engines by name"):
        type("Wrong", (Essay,), {"fallback_models": Scripted([])})
    wrong = type("Wrong", (Essay,), {"fallback_models": {"judge": "gpt"}})
    assert "models['judge']: must be an engine" in str((await ag.rollout(wrong, TASK, Scripted([say("x")]))).error)


async def test_an_invalid_engine_is_refused_by_its_name() -> None:
    for models, said in (
        ({"judge": "gpt"}, r"^models\['judge'\]: must be an engine, got 'gpt'"),
        ([("judge", Scripted([]))], "models: must be engines by name"),
    ):
        with pytest.raises(TypeError, match=said):
            await ag.rollout(Essay, TASK, Scripted([say("x")]), models=models)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="models: 'a/b' is not a valid name"):
        await ag.rollout(Essay, TASK, Scripted([say("x")]), models={"a/b": Scripted([])})


async def test_a_models_time_does_not_count_for_the_rollout_or_the_tool() -> None:
    class Watching(Scripted):
        async def generate(self, *args: Any, **named: Any) -> Completion:
            timers = [limit._timeout for limit in time_limits._running if limit._timeout is not None]
            self.stand_still = sorted(timer.when() is None for timer in timers)
            return await super().generate(*args, **named)

    class Asks(ag.ToolEnv[ag.Task]):
        @ag.tool
        async def ask(self) -> str:
            """Ask the judge."""
            await asyncio.sleep(0)  # the clocks of the rollout and the tool run from the first await
            return await self.model("judge").ask("?")

        @ag.reward
        def one(self) -> float:
            return 1.0

    judge = Watching([say("so")])
    rollout = await ag.rollout(Asks, TASK, Scripted([call("ask"), say("x")]), models={"judge": judge})
    assert rollout.segments[0].turns[0].env_messages[0]["content"] == "so"
    assert judge.stand_still == [True, True]  # the query's own clock runs from its first await


async def test_a_model_that_hangs_times_out_by_its_own_limit() -> None:
    class Hangs(Scripted):
        async def generate(self, *args: Any, **named: Any) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    class Hasty(Essay):
        @ag.reward
        async def good(self) -> float:
            return len(await self.model("judge").ask("?", timeout_s=0.05))

    rollout = await play(Hasty, Hangs([]))
    assert "model 'judge': no response within 0.05 s (timeout_s)" in str(rollout.error)


async def test_concurrent_queries_have_separate_sessions_which_are_all_released() -> None:
    class Watched(Scripted):
        def __init__(self, replies: Any) -> None:
            super().__init__(replies)
            self.open: list[str] = []
            self.most: set[str] = set()

        async def generate(self, *args: Any, session: str, **named: Any) -> Completion:
            assert session not in self.open
            self.open.append(session)
            self.most.add(session)
            await asyncio.sleep(0)
            done = await super().generate(*args, session=session, **named)
            self.open.remove(session)
            return done

        async def release(self, session: str) -> None:
            self.most.discard(session)
            await super().release(session)

    class Panel(ag.ToolEnv[ag.Task]):
        @ag.reward
        async def votes(self) -> float:
            judge = self.model("judge")
            said = await asyncio.gather(*[judge.ask(f"{n}?") for n in range(5)])
            said.append(await judge.ask("6?"))
            return float(said.count("yes"))

    judge = Watched(lambda text: say("yes"))
    assert (await play(Panel, judge)).reward == 6.0
    assert judge.most == set()


async def test_groups_schedulers_and_evaluations_pass_the_models_to_their_rollouts() -> None:
    judge, policy = Scripted(lambda text: say('{"score": 10}')), Scripted([say("A line.")])
    models = {"judge": judge}
    groups = await run_groups(Essay, [TASK], policy, n=3, models=models)
    assert [rollout.reward for rollout in groups.rollouts] == [1.0] * 3
    assert groups.metrics()["rollout/model_calls/judge"] == 1
    assert (await ag.evaluate(Essay, policy, tasks=[TASK], k=2, models=models)).reward == 1.0


async def test_the_policy_may_be_a_judge_and_waits_at_the_gate_like_its_other_turns() -> None:
    def both(text: str) -> ag.Message:
        return say('{"score": 4}' if "Judge:" in text else "A line.")

    policy = Scripted(both)
    groups = await run_groups(Essay, [TASK], policy, n=2, models={"judge": policy})
    assert [rollout.reward for rollout in groups.rollouts] == [0.4] * 2
    assert groups.batch_stats is not None
    assert groups.batch_stats.requests.started == 4


async def test_check_env_checks_an_env_that_queries_a_model() -> None:
    judge = Scripted(lambda text: say('{"score": 10}' if "A line." in text else '{"score": 0}'))

    class OneTask(Essay):
        @classmethod
        def tasks(cls, split: ag.Split) -> list[ag.Task]:
            return [TASK] if split == "train" else []

    await check_env(OneTask, TASK, oracle=[say("A line.")], models={"judge": judge})


async def test_a_real_model_gives_the_same_answer_for_the_same_seed() -> None:
    class Free(ag.ToolEnv[ag.Task]):
        @ag.reward
        async def said(self) -> float:
            self.text = await self.model("judge").ask("?", max_tokens=8, temperature=1.0)
            self.metrics["hash"] = float(sum(map(ord, self.text)))
            return 1.0

    async with ag.TransformersEngine("tiny") as judge:
        first, again = [await play(Free, judge, seed=3) for _ in range(2)]
    assert first.error is None
    assert 0 < first.metrics["model_tokens/judge"] <= 8
    assert first.metrics["hash"] == again.metrics["hash"]
