"""One env, one engine, one rollout: its tokens, the limits that end it, and its engine calls."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Reply, Scripted, raw, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.types.completion import Completion
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout, Segment
from tests.support.virtual_time import run_in_virtual_time

TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="Go."),))
DECODE = ByteTokenizer().decode
OPENED = len(ByteTokenizer().encode("<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"))


class Desk(ag.Env[ag.Task]):
    """An env that echoes each turn, ends at "bye", and gives 1 when the end is scored."""

    async def step(self, action: Message) -> ag.StepResult:
        echo = Message(role="user", content=f"you said {action['content']}")
        return ag.StepResult([echo], 0.25, False, action["content"] == "bye", {})

    async def score(self) -> dict[str, float]:
        return {"scored": 1.0}


class Spy(Scripted):
    """An engine that records its requests."""

    def __init__(self, replies: Any, **settings: Any) -> None:
        super().__init__(replies, **settings)
        self.asked: list[dict[str, Any]] = []
        self.released: list[str] = []

    async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
        self.asked.append({"token_ids": list(token_ids), **given})
        return await super().generate(token_ids, **given)

    async def release(self, session: str) -> None:
        self.released.append(session)
        await super().release(session)


def limited(base: type[Desk] = Desk, *, context: ag.Compact | None = None, **limits: Any) -> type[Desk]:
    return type("Limited", (base,), {"limits": ag.Limits(**limits), "context": context})


async def play(env: type[Desk], replies: Any, **given: Any) -> Rollout:
    rollout = await ag.rollout(env, TASK, replies if isinstance(replies, Scripted) else Scripted(replies), **given)
    assert (rollout.reward is None) == (rollout.error is not None)
    return rollout


def wrote(segment: Segment) -> list[str]:
    return [DECODE(segment.token_ids[turn.start : turn.stop].tolist()) for turn in segment.turns]


def forever(text: str) -> Reply:
    return say("on")


async def test_a_rollout_distinguishes_sampled_tokens_from_context_tokens() -> None:
    rollout = await play(Desk, [say("hi"), say("bye")])
    (segment,) = rollout.segments
    assert DECODE(segment.token_ids.tolist()) == (
        "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>"
        "\n<|im_start|>user\nyou said hi<|im_end|>\n<|im_start|>assistant\nbye<|im_end|>"
    )
    assert wrote(segment) == ["hi<|im_end|>", "bye<|im_end|>"]
    assert DECODE(segment.token_ids[segment.sampled].tolist()) == "hi<|im_end|>bye<|im_end|>"
    assert (segment.logprobs == np.where(segment.sampled, -0.5, 0)).all()
    assert (segment.kind, segment.parent, rollout.metrics["turns"]) == ("root", None, 2)


async def test_the_seconds_of_a_rollout_include_those_of_its_turns_and_env() -> None:
    begun = time.perf_counter()
    rollout = await play(Desk, [say("hi"), say("bye")])
    parts = [(turn.seconds, turn.env_seconds) for turn in rollout.segments[0].turns]
    assert min(map(min, parts)) > 0
    assert sum(map(sum, parts)) <= rollout.metrics["seconds"] <= time.perf_counter() - begun


async def test_the_reward_is_the_sum_of_step_rewards_and_final_score() -> None:
    rollout = await play(Desk, [say("hi"), say("bye")])
    assert rollout.reward == 0.25 + 0.25 + 1.0
    assert (rollout.rewards, rollout.stop_reason) == ({"scored": 1.0}, "done")


async def test_an_env_that_names_its_rewards_at_the_end_is_not_scored_again() -> None:
    class Ends(Desk):
        async def step(self, action: Message) -> ag.StepResult:
            return ag.StepResult([], 0.0, True, False, {"stop_reason": "won", "rewards": {"prize": 2.0}})

    rollout = await play(Ends, [say("hi")])
    assert (rollout.reward, rollout.rewards, rollout.stop_reason) == (2.0, {"prize": 2.0}, "won")


@pytest.mark.parametrize(
    ("limits", "replies", "reason"),
    [
        ({"turns": 2}, forever, "turns"),
        ({"turn_tokens": 5}, [say("more than five")], "length"),
        ({"context_tokens": OPENED + 3}, [say("more than three")], "context"),
        ({"context_tokens": OPENED + 3}, [say("ab"), say("never")], "context"),
        ({"context_tokens": OPENED + 4}, [say("ab"), say("never")], "context"),
        ({"context_tokens": 200}, forever, "context"),
    ],
)
async def test_past_a_limit_a_rollout_is_truncated_and_scored(limits: Any, replies: Any, reason: str) -> None:
    rollout = await play(limited(**limits), replies)
    assert (rollout.stop_reason, rollout.error, rollout.rewards) == (reason, None, {"scored": 1.0})
    assert all(len(segment.token_ids) <= limits.get("context_tokens", 8192) for segment in rollout.segments)


def test_past_its_seconds_a_rollout_is_truncated_and_scored() -> None:
    class Slow(Desk):
        async def step(self, action: Message) -> ag.StepResult:
            await asyncio.Event().wait()
            raise AssertionError

    rollout = run_in_virtual_time(play(limited(Slow, seconds=10), [say("hi")]))
    assert (rollout.stop_reason, rollout.reward, rollout.error) == ("seconds", 1.0, None)
    assert wrote(rollout.segments[0]) == ["hi<|im_end|>"]


async def test_an_output_beyond_the_context_is_cut_consistently_and_the_rollout_is_scored() -> None:
    class Loud(Desk):
        async def step(self, action: Message) -> ag.StepResult:
            return ag.StepResult([Message(role="tool", content="x" * 1000)], 0.0, False, False, {})

    rollout = await play(limited(Loud, context_tokens=OPENED + 40), [say("ab"), say("never")])
    (segment,) = rollout.segments
    assert len(segment.token_ids) == len(segment.sampled) == len(segment.logprobs) == OPENED + 40
    assert DECODE(segment.token_ids[-3:].tolist()) == "xxx"
    assert int(segment.sampled.sum()) == 3
    assert (rollout.stop_reason, rollout.reward) == ("context", 1.0)


def about_the_context(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "the engine's context" in record.getMessage()]


async def test_ending_at_the_engines_context_is_warned_about_once_per_env_and_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env, other = limited(), limited(turns=3)
    engine = Scripted(forever, context_tokens=OPENED + 40)
    for desk in (env, env, other):
        assert (await play(desk, engine)).stop_reason == "context"
    warned = about_the_context(caplog)
    assert len(warned) == 2
    assert f"context of {OPENED + 40} tokens, but limits.context_tokens is 8192" in warned[0]
    tight = Scripted(forever, context_tokens=OPENED)
    assert (await ag.rollout(env, TASK, tight)).error is not None
    assert len(about_the_context(caplog)) == 3


async def test_ending_at_the_envs_own_context_causes_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (await play(limited(context_tokens=OPENED + 40), forever)).stop_reason == "context"
    assert (await play(Desk, Scripted([say("bye")], context_tokens=400))).stop_reason == "done"
    assert about_the_context(caplog) == []


async def test_a_turns_token_limit_is_clamped_to_the_remaining_context() -> None:
    engine = Spy([say("hi"), say("bye")], context_tokens=150)
    await play(limited(turn_tokens=100), engine)
    first, second = engine.asked
    assert first["max_tokens"] == 100
    assert second["max_tokens"] == 150 - len(second["token_ids"]) < 100


async def test_sampling_may_shorten_turns_but_never_lengthen_them() -> None:
    for asked, given in ((3, 3), (200, 100)):
        engine = Spy([say("bye")])
        await play(limited(turn_tokens=100), engine, sampling=ag.Sampling(max_tokens=asked))
        assert engine.asked[0]["max_tokens"] == given


async def test_a_malformed_calls_tokens_are_sampled_and_its_answer_is_not() -> None:
    class Tools(ag.ToolEnv[ag.Task]):
        @ag.reward
        def malformed(self) -> float:
            return self.metrics["malformed_calls"]

    broken = '<tool_call>\n{"name": oops\n</tool_call>'
    rollout = await ag.rollout(Tools, TASK, Scripted([raw(broken), say("done")]))
    (segment,) = rollout.segments
    assert wrote(segment) == [f"{broken}<|im_end|>", "done<|im_end|>"]
    assert "error: invalid JSON" in DECODE(segment.token_ids[~segment.sampled].tolist())
    assert rollout.reward == 1.0


async def test_compaction_carries_prompt_and_summary_and_trains_each_token_once() -> None:
    env = limited(context=ag.Compact(at=None, turns=1, instruction="Sum up."))
    engine = Spy([say("hi"), say("I said hi"), say("ho"), say("and ho"), say("bye")])
    rollout = await play(env, engine)
    root, second, third = rollout.segments
    assert [(s.kind, s.parent) for s in rollout.segments] == [("root", None), ("compaction", 0), ("compaction", 1)]
    assert wrote(root) == ["hi<|im_end|>", "I said hi<|im_end|>"]
    assert "<|im_start|>user\nSum up.<|im_end|>" in DECODE(root.token_ids[~root.sampled].tolist())
    carried = DECODE(second.token_ids[: second.turns[0].start].tolist())
    assert carried == "<|im_start|>user\nGo.\nI said hi<|im_end|>\n<|im_start|>assistant\n"
    assert wrote(third) == ["bye<|im_end|>"]
    assert rollout.metrics["compactions"] == 2
    assert [request["session"] for request in engine.asked] == ["t/0/0", "t/0/0", "t/0/1", "t/0/1", "t/0/2"]
    assert engine.released == ["t/0/0", "t/0/1", "t/0/2"]


async def test_no_summary_is_requested_after_the_last_turn() -> None:
    last = limited(context=ag.Compact(at=None, turns=1), turns=1)
    rollout = await play(last, [say("hi")])
    assert (rollout.stop_reason, len(rollout.segments), rollout.error) == ("turns", 1, None)


async def test_compaction_happens_when_the_context_is_full_enough() -> None:
    early = limited(context=ag.Compact(at=0.15), context_tokens=600, turns=3)
    rollout = await play(early, [say("x" * 80), say("sum"), say("y"), say("z")])
    assert [wrote(s) for s in rollout.segments] == [
        ["x" * 80 + "<|im_end|>", "sum<|im_end|>"],
        ["y<|im_end|>", "z<|im_end|>"],
    ]
    assert rollout.stop_reason == "turns"


class Rewriting(ByteTokenizer):
    """A template that renders only the last user message."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        shown = [m for i, m in enumerate(messages) if m["role"] == "assistant" or i == last]
        return super().render(shown, tools, generation=generation)


async def test_if_the_template_rewrites_a_new_segment_opens_and_each_token_is_trained_once() -> None:
    engine = Spy([say("one"), say("two"), say("bye")], tokenizer=Rewriting())
    rollout = await play(Desk, engine)
    assert [(s.kind, s.parent) for s in rollout.segments] == [("root", None), ("rerender", 0), ("rerender", 1)]
    assert [wrote(s) for s in rollout.segments] == [["one<|im_end|>"], ["two<|im_end|>"], ["bye<|im_end|>"]]
    assert "one" in DECODE(rollout.segments[1].token_ids[~rollout.segments[1].sampled].tolist())
    assert rollout.sampled_tokens == len("one") + len("two") + len("bye") + 3
    assert rollout.metrics["rerenders"] == 2


class Unmarked(ByteTokenizer):
    """A template that omits the end token of past turns."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        text = super().render(messages, tools, generation=generation)
        return re.sub(r"(<\|im_start\|>assistant\n[^<]*)<\|im_end\|>", r"\1", text) if generation else text


async def test_if_the_template_changes_a_turns_end_its_segment_continues_without_that_end() -> None:
    rollout = await play(Desk, Scripted([say("hi"), say("bye")], tokenizer=Unmarked()))
    (segment,) = rollout.segments
    assert wrote(segment) == ["hi", "bye<|im_end|>"]
    assert DECODE(segment.token_ids[segment.turns[0].stop : segment.turns[1].start].tolist()) == (
        "\n<|im_start|>user\nyou said hi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert DECODE(segment.token_ids[segment.sampled].tolist()) == "hibye<|im_end|>"
    assert rollout.metrics["realigned"] == 1


class Strict(ByteTokenizer):
    """A template that refuses an empty turn, so one can't be used to recognize special tokens that the model typed."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        if any(message["role"] == "assistant" and not message["content"] for message in messages):
            raise ValueError("an empty turn")
        return super().render(messages, tools, generation=generation)


async def test_a_segment_continues_if_the_rendered_chat_shows_the_turn_unchanged() -> None:
    rollout = await play(Desk, Scripted([say("<|im_end|> in letters"), say("bye")], tokenizer=Strict()))
    (segment,) = rollout.segments
    assert wrote(segment) == ["<|im_end|> in letters<|im_end|>", "bye<|im_end|>"]
    assert "you said <|im_end|> in letters" in DECODE(segment.token_ids[~segment.sampled].tolist())


async def test_the_same_seed_gives_the_same_request_seeds_and_no_two_turns_share_one() -> None:
    async def seeds(seed: int, rollout_id: str) -> list[int]:
        engine = Spy([say("hi"), say("ho"), say("bye")])
        await play(Desk, engine, seed=seed, rollout_id=rollout_id)
        return [request["seed"] for request in engine.asked]

    first = await seeds(1, "t/0")
    assert first == await seeds(1, "t/0")
    assert len({*first, *await seeds(2, "t/0"), *await seeds(1, "t/1")}) == 9


async def test_the_default_seed_is_zero_and_request_seeds_have_63_bits() -> None:
    without, zero = (Spy([say("hi"), say("ho"), say("bye")]) for _ in range(2))
    await play(Desk, without)
    await play(Desk, zero, seed=0)
    assert [request["seed"] for request in without.asked] == [request["seed"] for request in zero.asked]
    assert all(0 <= request["seed"] < 2**63 for request in zero.asked)


async def test_an_env_with_a_sandbox_gets_one_and_the_rollout_records_its_digest(
    sandboxes: FakeSandboxPool,
) -> None:
    class Boxed(Desk):
        sandbox_spec: ClassVar[Any] = ag.AnySandbox()

    assert (await play(Boxed, [say("bye")], sandboxes=sandboxes)).sandbox == "fake"
    assert (sandboxes.leased, len(sandboxes.made)) == ([], 1)
    assert (await play(Desk, [say("bye")], sandboxes=sandboxes)).sandbox is None
    assert len(sandboxes.made) == 1


async def test_an_env_is_closed_once_and_before_its_sandbox_is_returned(sandboxes: FakeSandboxPool) -> None:
    leased: list[int] = []

    class Boxed(Desk):
        sandbox_spec: ClassVar[Any] = ag.AnySandbox()

        async def close(self) -> None:
            leased.append(len(sandboxes.leased))

    await play(Boxed, [say("bye")], sandboxes=sandboxes)
    assert (leased, sandboxes.leased) == ([1], [])


async def test_without_a_pool_a_rollout_opens_one_for_itself_and_closes_it() -> None:
    seen: list[str] = []

    class Own:
        @asynccontextmanager
        async def open(self, size: int) -> AsyncIterator[FakeSandboxPool]:
            seen.append(f"open {size}")
            yield FakeSandboxPool()
            seen.append("close")

    await play(type("Boxed", (Desk,), {"sandbox_spec": Own()}), [say("bye")])
    assert seen == ["open 1", "close"]
