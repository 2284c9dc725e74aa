"""Judges: structured, cached on disk, limited, and counted in the rollout."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, computed_field

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.scheduling import Groups, run_groups
from agentgym.types.completion import Completion

TASK = ag.Task(id="t", prompt="Write a line.")


class Verdict(BaseModel):
    score: float = Field(ge=0, le=1, description="how good it is")


class Judged(ag.ToolEnv[ag.Task]):
    judge: ag.Judge[Verdict]

    @ag.reward
    async def good(self) -> float:
        return (await self.judge.ask(self.model("judge"), f"The text: {self.answer}")).score


def judged(**settings: Any) -> type[Judged]:
    given: dict[str, Any] = {"rubric": "1 is good.", "response": Verdict} | settings
    return type("Judged", (Judged,), {"judge": ag.Judge(**given)})


class Counting(Scripted):
    """An engine that counts its requests and how many are in flight at once."""

    asked = flying = most = 0

    def __init__(self, replies: Any, *, name: str = "one") -> None:
        super().__init__(replies)
        self.model_name = name
        self.texts: list[str] = []

    async def generate(self, token_ids: Any, **named: Any) -> Completion:
        self.asked += 1
        self.flying += 1
        self.most = max(self.most, self.flying)
        self.texts.append(self.tokenizer.decode(token_ids))
        for _ in range(5):
            await asyncio.sleep(0)
        self.flying -= 1
        return await super().generate(token_ids, **named)


def always(text: str) -> ag.Message:
    return say('{"score": 0.5}')


async def play(env: type[Judged], judge: Scripted, said: str = "A line.", n: int = 1) -> Groups:
    return await run_groups(env, [TASK], Scripted([say(said)]), n=n, models={"judge": judge})


def test_a_judge_has_these_default_settings() -> None:
    judge = ag.Judge(rubric="1 is good.", response=Verdict)
    assert (judge.cache, judge.version, judge.concurrency, judge.calls) == (None, "", 16, None)
    assert (judge.retries, judge.max_tokens, judge.temperature, judge.timeout_s) == (2, 1024, 0.0, 120.0)


async def test_a_judge_applies_its_rubric_and_fills_in_the_response(no_leaks: None) -> None:
    engine = Counting(always)
    groups = await play(judged(), engine)
    assert groups.rollouts[0].reward == 0.5
    assert "<|im_start|>system\n1 is good.<|im_end|>" in engine.texts[0]
    assert "The text: A line." in engine.texts[0]
    assert "how good it is" in engine.texts[0]


async def test_an_answer_cached_on_disk_is_not_requested_again_and_is_counted(tmp_path: Path) -> None:
    engine, path = Counting(always), tmp_path / "new" / "answers.sqlite"
    first = (await play(judged(cache=path), engine)).rollouts[0]
    again = (await play(judged(cache=path), engine)).rollouts[0]
    assert engine.asked == 1
    assert first.reward == again.reward == 0.5
    assert "model_cached/judge" not in first.metrics
    assert (again.metrics["model_cached/judge"], again.metrics.get("model_calls/judge", 0)) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"rubric": "0 is good."},
        {"temperature": 0.5},
        {"max_tokens": 900},
        {"said": "Another."},
        {"name": "two"},
        {"engine_version": 1},
        {"version": "2"},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_a_different_question_is_not_answered_from_the_cache(other: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    await play(judged(cache=path), Counting(always))
    engine, said = Counting(always, name=other.pop("name", "one")), other.pop("said", "A line.")
    engine.version = other.pop("engine_version", 0)
    await play(judged(cache=path, **other), engine, said)
    assert engine.asked == 1


async def test_a_judge_without_a_name_is_always_queried_and_not_cached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env, path = judged(cache=tmp_path / "answers.sqlite"), tmp_path / "answers.sqlite"
    for score in (0.5, 1.0):
        edited = Scripted([say(f'{{"score": {score}}}')])
        assert (await play(env, edited)).rollouts[0].reward == score
    assert not path.exists()
    assert caplog.text.count(f"responses of the model 'judge' are not cached in {path}") == 1
    for name, score, kept in (("a", 0.5, 0), ("a", 1.0, 1), ("b", 1.0, 0)):
        named = Scripted([say(f'{{"score": {score}}}')], model_name=name)
        rollout = (await play(env, named)).rollouts[0]
        assert (rollout.reward, rollout.metrics.get("model_cached/judge", 0)) == (0.5 if name == "a" else 1.0, kept)


class Renamed(BaseModel):
    score: float = Field(alias="theScore")


class Unshown(BaseModel):
    score: float
    why: str = Field(exclude=True)


class Computed(BaseModel, extra="forbid"):
    score: float

    @computed_field
    def percent(self) -> float:
        return self.score * 100


@pytest.mark.parametrize(
    ("response", "written"),
    [
        (Renamed, '{"theScore": 0.5}'),
        (Unshown, '{"score": 0.5, "why": "it rhymes"}'),
        (Computed, 'It is good. {"score": 0.5}'),
    ],
)
async def test_a_cached_answer_is_read_as_the_model_wrote_it(
    response: type[BaseModel], written: str, tmp_path: Path
) -> None:
    engine = Counting(lambda text: say(written))
    env = judged(cache=tmp_path / "answers.sqlite", response=response)
    rollouts = [(await play(env, engine)).rollouts[0] for _ in range(2)]
    assert [(one.reward, one.error) for one in rollouts] == [(0.5, None)] * 2
    assert engine.asked == 1


async def test_an_unreadable_cached_answer_is_requested_again_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, engine = tmp_path / "answers.sqlite", Counting(always)
    await play(judged(cache=path), engine)
    for unreadable in ('{"score": null}', '{"score": 7}'):
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("UPDATE answers SET answer = ?", [unreadable])
        assert (await play(judged(cache=path), engine)).rollouts[0].reward == 0.5
    assert (await play(judged(cache=path), engine)).rollouts[0].reward == 0.5
    assert engine.asked == 3
    assert caplog.text.count("answers.sqlite contains responses that do not fit Verdict") == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_nonfinite_number_is_not_an_answer(number: str, tmp_path: Path) -> None:
    class Free(BaseModel):
        score: float

    engine = Counting([say(f'{{"score": {number}}}'), say('{"score": 0.5}')])
    env = judged(cache=tmp_path / "answers.sqlite", response=Free)
    assert (await play(env, engine)).rollouts[0].reward == 0.5
    assert "That does not fit the schema: numbers must be finite" in engine.texts[1]


async def test_at_most_concurrency_judge_requests_are_in_flight() -> None:
    engine = Counting(always)
    groups = await play(judged(concurrency=2), engine, n=8)
    assert (engine.asked, engine.most) == (8, 2)
    assert len([rollout for rollout in groups.rollouts if rollout.reward == 0.5]) == 8


async def test_a_rollout_queries_a_judge_at_most_calls_times() -> None:
    class Greedy(Judged):
        judge = ag.Judge(rubric="1 is good.", response=Verdict, calls=2)

        @ag.reward
        async def good(self) -> float:
            model = self.model("judge")
            return sum([(await self.judge.ask(model, f"{n}?")).score for n in range(3)])

    engine = Counting(always)
    rollout = await ag.rollout(Greedy, TASK, Scripted([say("x")]), models={"judge": engine})
    assert (rollout.reward, rollout.metrics["model_limit"]) == (0.0, 1.0)
    assert "judge 'judge': the rollout has queried it 2 times, but Judge.calls allows 2" in str(rollout.failed_cases)
    assert engine.asked == 2


async def test_no_answer_is_so_long_that_a_judge_costs_the_rollout_its_reward() -> None:
    class Long(Judged):
        judge = ag.Judge(rubric="1 is good.", response=Verdict)

        @ag.reward
        async def good(self) -> float:
            return (await self.judge.ask(self.model("judge"), self.answer or "")).score

        @ag.tool
        async def ask(self, text: str) -> str:
            """Ask the judge."""
            return str((await self.judge.ask(self.model("judge"), text)).score)

    script = [call("ask", text="word " * 150), say("word " * 150)]
    models = {"judge": Scripted(always, context_tokens=500)}
    rollout = await ag.rollout(Long, TASK, Scripted(script), models=models)
    assert (rollout.failure, rollout.reward, rollout.metrics["model_limit"]) == (None, 0.0, 1.0)
    assert "leave no room for a reply in its context of 500" in str(rollout.segments[0].turns[0].env_messages)


async def test_repeated_requests_count_toward_the_allowed_calls() -> None:
    engine = Counting(lambda text: say("what?"))
    rollout = await ag.rollout(judged(calls=2, retries=9), TASK, Scripted([say("x")]), models={"judge": engine})
    assert "no valid Verdict in 2 responses" in str(rollout.error)
    assert "; Judge.calls of 2 left 1 of 9 retries, because a retry counts as a call: raise" in str(rollout.error)
    assert engine.asked == 2


async def test_calls_are_not_blamed_for_a_response_that_is_late() -> None:
    class Hangs(Scripted):
        async def generate(self, token_ids: Any, **named: Any) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    hasty = judged(calls=1, retries=9, timeout_s=0.01)
    rollout = await ag.rollout(hasty, TASK, Scripted([say("x")]), models={"judge": Hangs([])})
    assert str(rollout.error).endswith("no response within 0.01 s (timeout_s)")


async def test_calls_are_not_blamed_if_they_left_all_retries() -> None:
    engine = Counting(lambda text: say("what?"))
    rollout = await ag.rollout(judged(calls=3, retries=2), TASK, Scripted([say("x")]), models={"judge": engine})
    assert "no valid Verdict in 3 responses" in str(rollout.error)
    assert "Judge.calls" not in str(rollout.error)


def test_an_invalid_judge_is_refused_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="response: must be a subclass of BaseModel, got"):
        ag.Judge(rubric="x", response=dict)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="concurrency: must be at least 1"):
        ag.Judge(rubric="x", response=Verdict, concurrency=0)
    with pytest.raises(TypeError, match="there is no field 'rubrik'; did you mean 'rubric'"):
        ag.Judge(rubrik="x", response=Verdict)  # type: ignore[call-arg]


async def test_an_unusable_cache_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    path.write_text("this is no database, and long enough to be one" * 50)
    rollout = await ag.rollout(judged(cache=path), TASK, Scripted([say("x")]), models={"judge": Counting(always)})
    assert f"cache: {path} cannot be used" in str(rollout.error)
