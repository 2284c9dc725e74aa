"""Objects in a judge's answer: the last whole one counts, thoughts hold none, and long answers take linear time."""

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel

import agentgym as ag
from agentgym.engines.scripted import Scripted, raw, say
from agentgym.judges.structured import _objects, read_answer
from agentgym.types.completion import Completion

TASK = ag.Task(id="t", prompt="x")
LENGTH = 10_000


class Verdict(BaseModel):
    score: int


def objects(text: str) -> list[str]:
    return [written for written, _ in _objects(text)]


def tried(text: str) -> list[str]:
    """Return the outermost objects of a text, found by trying to decode one at each brace."""
    found, at = [], text.find("{")
    while at >= 0:
        try:
            end = json.JSONDecoder().raw_decode(text, at)[1]
            found.append(text[at:end])
        except ValueError:
            end = at + 1
        at = text.find("{", end)
    return found


PIECES = ["{", "}", "[", "]", '"', ":", ",", "\\", "1", " ", "\n", "x", '"a":', '{"a":', "{}", '{"a":1}', '"{"', "true"]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
@settings(max_examples=300)
def test_the_objects_are_those_that_decoding_at_each_brace_finds(text: str) -> None:
    assert objects(text) == tried(text)


@pytest.mark.parametrize(
    "piece",
    [
        '{"a":',
        '{"{"',
        "{",
        '{"a":[',
        '{"a":"{',
        '{"a":1,"b":{',
        '"{',
        '{"a":{"b":1},',
        "{}",
        '{"a":"\\"{',
        '{"',
        '{"a":"\n',
        '[{"a":',
        "{ ",
        '\\"{"',
        '{"score":1}',
        '{"a\\',
        "```json\n{",
        '{"a":12',
        "{'score': 1}",
    ],
)
def test_the_time_for_an_answer_is_linear_in_its_length(piece: str) -> None:
    def seconds(length: int) -> float:
        text, least = piece * (length // len(piece)), 9e9
        for _ in range(2):
            start = time.process_time()
            list(_objects(text))
            least = min(least, time.process_time() - start)
        return least

    assert seconds(8 * LENGTH) < 8 * 4 * seconds(LENGTH) + 0.1, "a quadratic reader takes 64 times as long"


def test_a_verdict_behind_a_flood_of_braces_is_found() -> None:
    for flood in ('{"a":' * LENGTH, "{" * LENGTH, '{"' * LENGTH + '"'):
        assert read_answer(f'{flood}{{"score": 3}}', Verdict)[1].score == 3


@pytest.mark.parametrize(("deep", "digits"), [(LENGTH, 1), (1, 5000), (2000, 5000)])
def test_an_object_that_is_nested_too_deep_or_has_too_long_a_number_is_refused(deep: int, digits: int) -> None:
    text = '{"a":' * deep + "1" * digits + "}" * deep
    with pytest.raises(ValueError, match=r"numbers must be finite, .* nesting at most 100 levels"):
        read_answer(text, Verdict)
    assert read_answer(text + '{"score": 2}', Verdict)[1].score == 2


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"score": 2}', 2),
        (' {"score": 2}\n', 2),
        ('It is {"score": 2}', None),
        ('{"score": 2}, or rather {"sco', None),
        ('{"score": 2} {"score": 3}', None),
        ("It is good", None),
    ],
)
def test_an_answer_that_a_limit_cut_off_counts_only_if_it_is_one_object(text: str, score: int | None) -> None:
    if score is not None:
        assert read_answer(text, Verdict, cut=True)[1].score == score
        return
    with pytest.raises(ValueError, match="it was cut off at the maximum number of tokens"):
        read_answer(text, Verdict, cut=True)


class Judged(ag.ToolEnv[ag.Task]):
    """An env whose reward is a judge's score."""

    @ag.reward
    async def good(self) -> float:
        return float((await self.model("judge").ask("How good?", Verdict, retries=1)).score)


class Cut(Scripted):
    """A judge whose first answer is cut off by the limit."""

    cuts = 1

    async def generate(self, *args: Any, **named: Any) -> Completion:
        done = await super().generate(*args, **named)
        if not self.cuts:
            return done
        self.cuts -= 1
        ids, logprobs = done.token_ids[:-1], done.logprobs[:-1]
        return Completion(token_ids=ids, logprobs=logprobs, finish_reason="length")


DRAFT = '<think>At first sight {"score": 2}. But no, it is better'


@pytest.mark.parametrize(
    ("engine", "answer"),
    [
        (Scripted, DRAFT),
        (Scripted, DRAFT[7:] + ".</think>\nIt is good."),
        (Cut, DRAFT),
        (Cut, 'I think {"score": 2}, but'),
    ],
)
async def test_a_verdict_that_is_only_drafted_is_no_verdict(engine: type[Scripted], answer: str) -> None:
    judge = engine([raw(answer), say('{"score": 9}')])
    rollout = await ag.rollout(Judged, TASK, Scripted([say("a")]), models={"judge": judge})
    assert rollout.reward == 9.0
    assert rollout.metrics["model_calls/judge"] == 2


async def test_a_verdict_behind_the_thought_counts_and_a_cut_one_that_is_whole_too() -> None:
    for judge in (Scripted([raw(DRAFT + '.</think>{"score": 9}')]), Cut([say('{"score": 9}')])):
        rollout = await ag.rollout(Judged, TASK, Scripted([say("a")]), models={"judge": judge})
        assert (rollout.reward, rollout.metrics["model_calls/judge"]) == (9.0, 1.0)


async def test_a_judge_that_only_thought_is_told_so_in_the_question_itself() -> None:
    asked: list[str] = []

    def judge(text: str) -> str:
        asked.append(text)
        return raw(DRAFT) if len(asked) == 1 else say('{"score": 9}')["content"]

    await ag.rollout(Judged, TASK, Scripted([say("a")]), models={"judge": Scripted(judge)})
    assert "there is no JSON object in the answer. Write the JSON object again." in asked[1]
    assert asked[1].count("<|im_start|>user") == 1, "no empty message of the judge stands between two of the user"
    assert "At first sight" not in asked[1]
