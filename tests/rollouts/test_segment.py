"""The messages kept when a context is cut, and the limits that end or retry a rollout."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, say
from agentgym.environments.limits import KeepLast, KeepPrompt, Limits, Window, last_turns
from agentgym.errors import EngineError, SandboxError
from agentgym.rollouts.segment import OpenSegment, is_due
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool
from agentgym.sandboxes.protocol import Sandbox
from agentgym.scheduling import run_groups
from agentgym.types.completion import Completion, Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout, Segment
from tests.rollouts.test_rollout import Rewriting

TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="Go."),))
DECODE = ByteTokenizer().decode
SAMPLED = Completion(token_ids=np.array([10, 11]), logprobs=np.array([-0.5, -0.7]), finish_reason="stop")


def user(text: str) -> Message:
    return Message(role="user", content=text)


class Desk(ag.Env[ag.Task]):
    """An env that echoes each turn."""

    async def step(self, action: Message) -> ag.StepResult:
        return ag.StepResult([user(f"you said {action['content']}")], 0.0, action["content"] == "bye", False, {})


def shown(segment: Segment, turn: int = 0) -> str:
    return DECODE(segment.token_ids[: segment.turns[turn].start].tolist())


async def play(replies: Any, **settings: Any) -> Rollout:
    engine = replies if isinstance(replies, Scripted) else Scripted(replies)
    return await ag.rollout(type("Desk", (Desk,), settings), TASK, engine)


async def test_a_window_carries_the_prompt_and_the_last_turns_and_trains_them_once() -> None:
    rollout = await play([*map(say, "abcd"), say("bye")], context=Window(at=None, turns=3, keep=1))
    first, second = rollout.segments
    assert [(s.kind, s.parent) for s in rollout.segments] == [("root", None), ("rerender", 0)]
    assert "Go." in shown(second)
    assert "you said c" in shown(second)
    assert "you said b" not in shown(second)
    assert (len(first.turns), len(second.turns), rollout.metrics["slides"]) == (3, 2, 1)
    assert rollout.sampled_tokens == 4 * 2 + 4


async def test_a_window_slides_when_the_context_is_full_enough() -> None:
    limits = Limits(context_tokens=300)
    rollout = await play([*[say("x" * 40)] * 4, say("bye")], context=Window(at=0.5, keep=1), limits=limits)
    assert rollout.stop_reason == "done"
    assert len(rollout.segments) > 1


async def test_a_compactions_keep_argument_may_be_a_policy() -> None:
    compact = ag.Compact(at=None, turns=2, keep=KeepLast(1))
    rollout = await play([say("a"), say("b"), say("all so far"), say("bye")], context=compact)
    assert shown(rollout.segments[1]) == ByteTokenizer().render(
        [user("Go.\nall so far"), say("b"), user("you said b")], [], generation=True
    )
    assert rollout.segments[1].kind == "compaction"


async def test_any_function_can_be_the_keep_policy_and_its_failure_is_the_envs() -> None:
    own = ag.Compact(at=None, turns=1, keep=lambda first, since, summary: [user(f"{len(since)} {summary}")])
    rollout = await play([say("a"), say("sum"), say("bye")], context=own)
    assert "2 sum" in shown(rollout.segments[1])
    broken = ag.Compact(at=None, turns=1, keep=lambda first, since, summary: [first[7]])
    failed = await play([say("a"), say("sum")], context=broken)
    assert str(failed.error).startswith(
        "EnvError: Desk: keep: IndexError: list index out of range, at test_segment.py:"
    )


class Loud(ag.ToolEnv[ag.Task]):
    """An env whose tool's answer takes up `size` characters of the context."""

    limits = Limits(turns=9, context_tokens=2000)
    size = 0

    @ag.tool
    def look(self) -> str:
        """Look."""
        return "x" * self.size

    @ag.reward
    def one(self) -> float:
        return 1.0


def looks(text: str) -> Message:
    return say("nothing yet") if "Summarise" in text[-200:] else call("look")


@pytest.mark.parametrize("policy", [ag.Compact(), ag.Compact(at=None, turns=50), Window(keep=1)])
@pytest.mark.parametrize("size", [200, 300, 400, 500, 600, 900])
async def test_answers_of_any_size_trigger_a_cut_before_they_overflow_the_context(policy: Any, size: int) -> None:
    env = type("Loud", (Loud,), {"context": policy, "size": size})
    rollout = await ag.rollout(env, TASK, Scripted(looks))
    assert (rollout.stop_reason, rollout.metrics["turns"]) == ("turns", 9)
    assert max(len(s.token_ids) for s in rollout.segments) <= 2000
    assert rollout.metrics.get("compactions", 0) + rollout.metrics.get("slides", 0) > 0


async def test_an_answer_that_does_not_fit_is_read_after_the_summary_with_its_turn() -> None:
    limits = Limits(turns=3, context_tokens=2000)
    env = type("Loud", (Loud,), {"context": ag.Compact(keep=KeepLast(1)), "size": 700, "limits": limits})
    rollout = await ag.rollout(env, TASK, Scripted([call("look"), call("look"), say("so far"), call("look")]))
    first, second = rollout.segments
    assert [turn.message["content"] for turn in first.turns] == ["", "", "so far"]
    assert "Go.\nso far" in shown(second)
    assert (shown(second).count('"look"'), shown(second).count("x" * 700)) == (2 + 1, 2)  # the tool's schema, two calls
    assert (rollout.metrics["compactions"], rollout.metrics["answers_carried"]) == (1, 1)
    assert int(second.sampled.sum()) == second.turns[-1].stop - second.turns[0].start


async def test_a_call_in_place_of_a_summary_is_carried_as_text_and_an_empty_summary_is_counted() -> None:
    env = type("Loud", (Loud,), {"context": ag.Compact(turns=2), "size": 10})
    written = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    for summary, told, empty in ((call("look"), f"Go.\n{written}", None), (say(" "), "Go.", 1.0)):
        rollout = await ag.rollout(env, TASK, Scripted([call("look"), call("look"), summary, say("done")]))
        assert told in shown(rollout.segments[1])
        assert (rollout.metrics["tool_calls"], rollout.metrics.get("empty_summaries")) == (2.0, empty)


async def test_the_largest_answer_before_a_summary_leaves_exactly_the_summarys_reserve() -> None:
    context, room = 1000, 100
    limits = Limits(context_tokens=context, turns=2)
    read, carried = [], 0
    for size in range(550, 590):
        env = type("Loud", (Loud,), {"context": ag.Compact(at=None, turns=1), "size": size, "limits": limits})
        rollout = await ag.rollout(env, TASK, Scripted([call("look"), say("so far"), say("done")]))
        if rollout.metrics.get("answers_carried"):
            carried += 1
        else:
            read.append(rollout.segments[0].turns[1].start)
    assert max(read) == context - room
    assert 0 < carried == 40 - len(read)


async def test_the_summary_request_is_recorded_after_the_answer_or_in_place_of_a_carried_one() -> None:
    request = user(ag.Compact().instruction)
    rollout = await play([say("a"), say("so far"), say("bye")], context=ag.Compact(at=None, turns=1))
    assert rollout.segments[0].turns[0].env_messages == (user("you said a"), request)
    env = type("Loud", (Loud,), {"context": ag.Compact(), "size": 700, "limits": Limits(turns=3, context_tokens=2000)})
    rollout = await ag.rollout(env, TASK, Scripted([call("look"), call("look"), say("so far"), say("done")]))
    assert rollout.metrics["answers_carried"] == 1
    assert rollout.segments[0].turns[1].env_messages == (request,)


async def test_a_window_that_holds_everything_does_not_slide() -> None:
    env = type("Loud", (Loud,), {"context": Window(at=0.1, keep=1), "size": 900, "limits": Limits(turns=2)})
    rollout = await ag.rollout(env, TASK, Scripted(looks))
    assert (len(rollout.segments), rollout.metrics.get("slides")) == (1, None)
    assert "x" * 900 in shown(rollout.segments[0], turn=1)


async def test_a_policy_measures_the_text_of_a_rewriting_template() -> None:
    engine = Scripted([say("one"), say("two"), say("bye")], tokenizer=Rewriting())
    rollout = await play(engine, context=Window(at=0.9, keep=1))
    assert (rollout.error, rollout.metrics["rerenders"], rollout.metrics.get("slides")) == (None, 2, None)


async def test_a_template_error_names_the_messages_that_it_refused() -> None:
    class Strict(ByteTokenizer):
        def render(self, messages: Sequence[Message], tools: Any, *, generation: bool) -> str:
            if any("Summarise" in message["content"] for message in messages):
                raise ValueError("no summaries")
            return super().render(messages, tools, generation=generation)

    engine = Scripted([say("a"), say("sum")], tokenizer=Strict())
    rollout = await play(engine, context=ag.Compact(at=None, turns=1))
    assert (rollout.error or "").startswith("EnvError: Desk: the instruction of Compact: ValueError: no summaries")


def test_the_prompt_is_kept_with_the_summary_after_its_last_user_message() -> None:
    system = Message(role="system", content="Be kind.")
    assert KeepPrompt()([system, user("Go.")], [], "so far") == [system, user("Go.\nso far")]
    assert KeepPrompt()([system], [], "so far") == [system, user("so far")]


def test_the_last_turns_include_their_answers() -> None:
    told = [say("a"), user("1"), say("b"), user("2"), user("3"), say("c")]
    assert last_turns(told, 2) == told[2:]
    assert last_turns([user("1")], 2) == []


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Window(at=None), "at: pass"),
        (lambda: Window(at=1.5), "at: must be"),
        (lambda: Window(keep=0), "keep: must be at least 1"),
        (lambda: Window(turns=2, keep=2), "keep: must be less than turns"),
        (lambda: KeepLast(0), "turns: must be at least 1"),
        (lambda: Limits(tokens=0), "tokens: must be at least 1"),
        (lambda: Limits(retries=-1), "retries: must be at least 0"),
    ],
)
def test_an_invalid_policy_names_its_field(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        make()


class Shaky(Scripted):
    """An engine that fails on the given requests, counted from 0."""

    def __init__(self, replies: Any, *fails: int) -> None:
        super().__init__(replies)
        self.fails, self.asked = fails, 0

    async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
        self.asked += 1
        if self.asked - 1 in self.fails:
            raise EngineError("shaky")
        return await super().generate(token_ids, **given)


async def test_an_engine_that_fails_before_the_first_action_is_retried_from_scratch() -> None:
    rollout = await play(Shaky([say("bye")], 0, 1), limits=Limits(retries=2))
    assert (rollout.stop_reason, rollout.metrics["retries"], len(rollout.segments)) == ("done", 2, 1)
    assert len(rollout.segments[0].turns) == 1


async def test_retries_are_limited() -> None:
    engine = Shaky([say("bye")], 0, 1, 2)
    rollout = await play(engine, limits=Limits(retries=1))
    assert (rollout.reward, engine.asked) == (None, 2)


async def test_nothing_is_retried_once_an_action_reached_the_env() -> None:
    engine = Shaky([say("a"), say("bye")], 1)
    rollout = await play(engine, limits=Limits(retries=5))
    assert (rollout.error, engine.asked) == ("EngineError: shaky", 2)


async def test_a_failing_env_is_not_retried() -> None:
    made: list[int] = []

    async def reset(self: Desk, **given: Any) -> Any:
        made.append(1)
        raise RuntimeError("oops")

    rollout = await play([say("bye")], reset=reset, limits=Limits(retries=5))
    assert (len(made), rollout.reward) == (1, None)


async def test_each_attempt_has_its_own_sandbox() -> None:
    def sandbox() -> Sandbox:
        if len(pool.made) < 1:
            pool.made.append(FakeSandbox())
            raise SandboxError("none")
        return FakeSandbox()

    pool = FakeSandboxPool(sandbox)
    env = type("Boxed", (Desk,), {"sandbox_spec": ag.AnySandbox(), "limits": Limits(retries=1)})
    rollout = await ag.rollout(env, TASK, Scripted([say("bye")]), sandboxes=pool)
    assert (rollout.error, len(pool.made), pool.leased) == (None, 2, [])


async def test_an_engine_that_samples_more_than_requested_fails_the_rollout() -> None:
    class Greedy(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            return await super().generate(token_ids, **(given | {"max_tokens": 10**6}))

    rollout = await play(Greedy([say("x" * 50)]), limits=Limits(turn_tokens=20))
    assert rollout.error == "EngineError: the engine sampled 51 ids, but at most 20 were requested"


async def test_the_reward_of_a_step_is_recorded_at_its_turn() -> None:
    async def step(self: Desk, action: Message) -> ag.StepResult:
        return ag.StepResult([user("on")], 0.25, action["content"] == "bye", False, {})

    rollout = await play([say("a"), say("b"), say("bye")], step=step)
    assert [t.reward for t in rollout.segments[0].turns] == [0.25, 0.25, 0.25]
    assert rollout.reward == 0.75


def begun(context_tokens: int = 9) -> OpenSegment:
    """Return a segment of three ids and a turn of two."""
    segment = OpenSegment(index=0, parent=None, kind="root", session="", context_tokens=context_tokens)
    segment.extend([1, 2, 3])
    segment.append(SAMPLED, array("q", [10, 11]), say(""), seconds=0.0, number=0)
    return segment


async def test_an_engine_may_reuse_its_arrays_for_its_next_answer() -> None:
    class Reusing(Scripted):
        """An engine that answers each turn in the same two arrays."""

        ids, logprobs, turns = np.zeros(64, np.int64), np.zeros(64, np.float32), 0

        async def generate(self, *given: Any, **how: Any) -> Completion:
            made, self.turns = await super().generate(*given, **how), self.turns + 1
            n = len(made.token_ids)
            self.ids[:n], self.logprobs[:n] = made.token_ids, -self.turns
            return Completion(token_ids=self.ids[:n], logprobs=self.logprobs[:n], finish_reason=made.finish_reason)

    (segment,) = (await play(Reusing([say("one"), say("two"), say("bye")]))).segments
    found = [segment.logprobs[turn.start : turn.stop].tolist() for turn in segment.turns]
    assert found == [[-1.0] * 4, [-2.0] * 4, [-3.0] * 4]
    assert DECODE(segment.token_ids[segment.sampled].tolist()) == "".join(
        f"{w}<|im_end|>" for w in ("one", "two", "bye")
    )


def test_a_view_of_the_ids_never_changes_however_the_segment_continues() -> None:
    segment = begun()
    views = {tuple(segment.shown()): segment.shown()}
    goes_on: list[Callable[[], object]] = [
        lambda: segment.extend([4]),
        lambda: segment.realign(4, [12]),
        lambda: segment.recount(7),
        lambda: segment.append(SAMPLED, array("q", [10, 11]), say(""), seconds=0.0, number=1),
    ]
    for go_on in goes_on:
        go_on()
        views[tuple(segment.shown())] = segment.shown()
    assert len(views) == 5
    assert {ids: tuple(view) for ids, view in views.items()} == {ids: ids for ids in views}
    with pytest.raises(TypeError, match="read-only"):
        segment.shown()[0] = 9


@pytest.mark.parametrize("ids", [(4, 5), b"\4\5", bytearray([4, 5]), np.array([4, 5], np.int32), range(4, 6)])
def test_ids_may_be_any_sequence_of_numbers(ids: Any) -> None:
    segment = begun()
    segment.extend(ids)
    assert segment.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 5]


def test_a_closed_segment_does_not_see_later_changes_of_the_open_one() -> None:
    segment = begun()
    closed = segment.close()
    segment.extend([4, 5])
    segment.realign(4, [12])
    assert closed.token_ids.tolist() == [1, 2, 3, 10, 11]


async def test_an_engine_may_keep_the_ids_that_it_was_given() -> None:
    kept: list[tuple[Sequence[int], list[int]]] = []

    class Keeping(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            kept.append((token_ids, list(token_ids)))
            return await super().generate(token_ids, **given)

    groups = await run_groups(Desk, [TASK], Keeping([say("a"), say("b"), say("bye")]), n=1)
    (segment,) = groups.rollouts[0].segments
    assert [list(given) for given, _ in kept] == [then for _, then in kept]
    assert [then for _, then in kept] == [segment.token_ids[: turn.start].tolist() for turn in segment.turns]


def test_the_seconds_of_an_answer_are_counted_from_the_end_of_its_turn() -> None:
    segment = begun()
    segment.answer([user("on")])
    (turn,) = segment.turns
    assert 0 <= turn.env_seconds <= time.perf_counter() - segment.sampled_at
    assert turn.reward == 0.0


def test_an_unanswered_turn_has_no_reward_and_no_env_seconds() -> None:
    (turn,) = begun().close().turns
    assert (turn.env_messages, turn.env_seconds, turn.reward) == ((), 0.0, 0.0)


@pytest.mark.parametrize(
    ("policy", "held", "reserve"),
    [(Window(at=0.5), 50, 0), (Window(at=0.9), 81, 20), (ag.Compact(at=None, turns=1), 0, 0)],
)
def test_a_policy_cuts_at_its_share_or_when_less_than_the_reserve_is_left(policy: Any, held: int, reserve: int) -> None:
    segment = begun(context_tokens=100)
    assert is_due(policy, segment, held, reserve)
    segment.turns.clear()
    assert not is_due(policy, segment, held - 1, reserve)


@pytest.mark.parametrize(("counted", "held"), [(7, [4, 0]), (6, [4]), (5, []), (4, [])])
def test_recount_holds_as_many_ids_as_the_engine_counted_and_all_of_the_turns(counted: int, held: list[int]) -> None:
    segment = begun()
    segment.extend([4])
    segment.recount(counted)
    assert segment.token_ids.tolist() == [1, 2, 3, 10, 11, *held]


def test_recount_before_the_first_turn_holds_as_many_ids_as_the_engine_counted() -> None:
    segment = OpenSegment(index=0, parent=None, kind="root", session="", context_tokens=9)
    segment.extend([1, 2, 3])
    segment.recount(2)
    assert segment.token_ids.tolist() == [1, 2]


def test_each_turn_has_the_versions_it_was_sampled_under() -> None:
    segment = begun()
    for number, version in enumerate([1, 1, 2], start=1):
        sampled = replace(SAMPLED, versions=(Version(0, version),))
        segment.append(sampled, array("q", [10, 11]), say(""), seconds=0.0, number=number)
    assert [turn.versions[0].version for turn in segment.close().turns] == [0, 1, 1, 2]


def test_a_segment_belongs_to_the_policy_and_is_trained_by_default() -> None:
    closed = begun().close()
    assert (closed.role, closed.model, closed.trained) == ("", "", True)


def test_a_realigned_turn_keeps_its_earlier_sampled_ids() -> None:
    segment = begun()
    assert segment.logprobs(0).tolist() == SAMPLED.logprobs.tolist()
    segment.realign(4, [12, 20])
    assert segment.logprobs(0).tolist() == [-0.5]
    closed = segment.close()
    assert closed.token_ids.tolist() == [1, 2, 3, 10, 12, 20]
    assert closed.sampled.tolist() == [False, False, False, True, False, False]
    assert closed.logprobs[3] == -0.5


async def test_a_summary_that_is_cut_at_its_limit_ends_the_rollout() -> None:
    limits = Limits(turn_tokens=50)
    replies = [say("a"), say("s" * 100), say("never asked for")]
    rollout = await play(replies, context=ag.Compact(at=None, turns=1), limits=limits)
    assert rollout.stop_reason == "length"
    assert [len(segment.turns) for segment in rollout.segments] == [2]
