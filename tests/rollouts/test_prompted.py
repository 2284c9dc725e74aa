"""Conversations that are sent in full each time: every sampled id is stored once, as it was sampled."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings, strategies as st

import agentgym as ag
from agentgym.agent_api.requests import LimitError, RefusedError
from agentgym.engines.scripted import Scripted, call, raw, say
from agentgym.types.messages import Message
from tests.agent_api.drawing import LOOK, Drawing, Played, check_exact, request
from tests.rollouts.test_rollout import Rewriting, Unmarked

SYSTEM = Message(role="system", content="Be brief.")


def ask(text: str) -> Message:
    return Message(role="user", content=text)


async def test_an_extended_conversation_continues_its_segment_with_the_sampled_ids() -> None:
    rollout = Played(Drawing(calls=False))
    said = [SYSTEM, ask("one")]
    for text in ("two", "three", "four"):
        said += [await rollout.say(*said), ask(text)]
    assert rollout.shape == [("root", None, 3)]
    check_exact(rollout.engine, [rollout.rollout()])


async def test_an_answer_sent_back_without_spaces_and_ids_is_recognized() -> None:
    rollout = Played(
        Scripted([raw('  hm <tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'), say("done")])
    )
    first = await rollout.say(ask("go"), tools=[LOOK])
    again = Message(role="assistant", content=" hm ", tool_calls=[{"function": first["tool_calls"][0]["function"]}])
    told = Message(role="tool", content="nothing", tool_call_id=first["tool_calls"][0]["id"])
    await rollout.say(ask("go"), again, told, tools=[LOOK])
    assert rollout.shape == [("root", None, 2)]


async def test_a_repeated_request_is_another_sample_in_a_fork() -> None:
    rollout = Played(Drawing(calls=False))
    answers = [await rollout.say(ask("go")) for _ in range(3)]
    assert rollout.shape == [("root", None, 1), ("fork", 0, 1), ("fork", 0, 1)]
    assert len({answer["content"] for answer in answers}) > 1
    check_exact(rollout.engine, [rollout.rollout()])


async def test_a_repeated_later_request_forks_after_the_sampled_ids() -> None:
    rollout = Played(Drawing(calls=False))
    first = await rollout.say(ask("go"))
    await rollout.say(ask("go"), first, ask("on"))
    await rollout.say(ask("go"), first, ask("on"))
    await rollout.say(ask("go"), first, ask("back"))
    root, *forks = rollout.rollout().segments
    assert rollout.shape == [("root", None, 2), ("fork", 0, 1), ("fork", 0, 1)]
    stop = root.turns[0].stop
    assert all((fork.token_ids[:stop] == root.token_ids[:stop]).all() for fork in forks)
    assert max(root.token_ids[:stop]) > 512
    check_exact(rollout.engine, [rollout.rollout()])


async def test_concurrent_branches_are_forks_and_continue_separately() -> None:
    rollout = Played(Drawing(calls=False))
    first = await rollout.say(ask("go"))
    start = [ask("go"), first]
    left, right = await asyncio.gather(rollout.say(*start, ask("left")), rollout.say(*start, ask("right")))
    await asyncio.gather(
        rollout.say(*start, ask("left"), left, ask("x")), rollout.say(*start, ask("right"), right, ask("y"))
    )
    assert rollout.shape == [("root", None, 3), ("fork", 0, 2)]
    check_exact(rollout.engine, [rollout.rollout()])


async def test_an_edited_history_opens_a_segment_that_trains_none_of_it() -> None:
    rollout = Played(Drawing(calls=False))
    said = [ask("go")]
    for text in ("two", "three"):
        said += [await rollout.say(*said), ask(text)]
    edited = [*said[:2], ask("(removed)"), *said[3:]]
    foreign = [ask("go"), say("What I never said."), ask("two")]
    await rollout.say(*edited)
    await rollout.say(*foreign)
    assert rollout.shape == [("root", None, 2), ("rerender", 0, 1), ("compaction", 1, 1)]
    check_exact(rollout.engine, [rollout.rollout()])


async def test_a_summary_of_all_turns_is_a_compaction_and_another_system_prompt_a_sub_agent() -> None:
    rollout = Played(Drawing(calls=False))
    await rollout.say(SYSTEM, ask("go"))
    await rollout.say(Message(role="system", content="You search."), ask("find"))
    await rollout.say(SYSTEM, ask("go"), tools=[LOOK])
    await rollout.say(SYSTEM, ask("so far: nothing"))
    assert rollout.shape == [("root", None, 1), ("subagent", 0, 1), ("subagent", 1, 1), ("compaction", 0, 1)]
    check_exact(rollout.engine, [rollout.rollout()])


async def test_two_equal_answers_to_a_request_are_two_turns_and_either_can_continue() -> None:
    rollout = Played(Scripted([say("yes"), say("yes"), say("a"), say("b"), say("c")]))
    for _ in range(2):
        await rollout.say(ask("go"))
    for _ in range(3):
        await rollout.say(ask("go"), say("yes"), ask("on"))
    assert rollout.shape == [("root", None, 2), ("fork", 0, 2), ("fork", 1, 1)]


async def test_a_cancelled_request_leaves_its_conversation_to_a_repeated_request() -> None:
    rollout = Played(Drawing(calls=False))
    first = await rollout.say(ask("go"))
    rollout.engine.gate.clear()
    rollout.engine.asked.clear()
    hung_up = asyncio.create_task(rollout.say(ask("go"), first, ask("on")))
    await rollout.engine.asked.wait()
    hung_up.cancel()
    with suppress(asyncio.CancelledError):
        await hung_up
    rollout.engine.gate.set()
    await rollout.say(ask("go"), first, ask("on"))
    assert rollout.shape == [("root", None, 2)]
    assert rollout.state.turns == 2
    check_exact(rollout.engine, [rollout.rollout()])


async def test_an_answer_that_was_cut_is_returned_and_can_be_continued() -> None:
    rollout = Played(Scripted([say("a long answer"), say("on")]))
    cut = await rollout.policy.answer(request(ask("go"), max_tokens=6))
    assert (cut.end, cut.message["content"], cut.sampled_tokens) == ("length", "a long", 6)
    await rollout.say(ask("go"), cut.message, ask("more"))
    assert rollout.shape == [("root", None, 2)]
    assert [turn.finish_reason for turn in rollout.rollout().segments[0].turns] == ["length", "stop"]


async def test_unparsable_calls_and_calls_without_tools_are_returned_as_text() -> None:
    written = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    rollout = Played(Scripted([call("look"), call("look"), raw("<tool_call>{oops</tool_call>"), say("on")]))
    bare = await rollout.say(ask("go"))
    assert (bare["content"], "tool_calls" in bare) == (written, False)
    called = await rollout.policy.answer(request(ask("go"), tools=[LOOK]))
    assert (called.end, called.message["tool_calls"][0]["function"]["name"]) == ("tool_calls", "look")
    broken = await rollout.say(ask("again"), tools=[LOOK])
    assert broken == say("<tool_call>{oops</tool_call>")
    await rollout.say(ask("again"), broken, ask("that was no call"), tools=[LOOK])
    assert rollout.shape == [("root", None, 1), ("subagent", 0, 1), ("compaction", 1, 2)]


async def test_the_limits_of_the_rollout_are_errors_and_change_nothing() -> None:
    rollout = Played(Scripted([say("one"), say("two")]), ag.Limits(turns=2, context_tokens=100))
    first = await rollout.say(ask("go"))
    with pytest.raises(LimitError, match="maximum context length is 100 tokens") as long:
        await rollout.say(ask("go"), first, ask("x" * 100))
    assert (long.value.reason, long.value.is_final, long.value.status) == ("context", False, 400)
    await rollout.say(ask("go"), first, ask("on"))
    with pytest.raises(LimitError, match="all 2 turns") as over:
        await rollout.say(ask("go"), first, ask("on"))
    assert (over.value.reason, over.value.is_final, over.value.status) == ("turns", True, 403)
    assert rollout.shape == [("root", None, 2)]


async def test_the_token_limit_ends_a_turn_and_then_the_rollout() -> None:
    rollout = Played(Scripted([say("12345678")]), ag.Limits(tokens=5))
    cut = await rollout.policy.answer(request(ask("go")))
    assert (cut.end, cut.message["content"]) == ("length", "12345")
    with pytest.raises(LimitError, match="all 5 tokens") as over:
        await rollout.say(ask("go"), cut.message, ask("on"))
    assert over.value.reason == "tokens"


async def test_a_template_refusal_is_a_clear_error() -> None:
    class Strict(Drawing):
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer.render = self.refuse  # type: ignore[method-assign]

        def refuse(self, *_: object, **__: object) -> str:
            raise ValueError("roles must alternate")

    with pytest.raises(RefusedError, match="template rejects them: ValueError: roles must alternate"):
        await Played(Strict()).say(ask("go"))


async def test_if_a_template_rewrites_the_end_of_a_turn_the_rest_of_it_is_kept() -> None:
    rollout = Played(Scripted([raw("x" * 40), raw("y" * 40), raw("z" * 40)], tokenizer=Unmarked()))
    first = await rollout.say(ask("go"))
    await rollout.say(ask("go"), first, ask("on"))
    await rollout.say(ask("go"), first, ask("back"))
    assert rollout.shape == [("root", None, 2), ("rerender", 0, 1)]
    assert rollout.rollout().sampled_tokens == 3 * 41 - 1


async def test_if_a_template_rewrites_earlier_messages_a_new_segment_continues() -> None:
    rollout = Played(Scripted([raw("x"), raw("y"), raw("z")], tokenizer=Rewriting()))
    said = [ask("go")]
    for text in ("on", "on", "end"):
        said += [await rollout.say(*said), ask(text)]
    assert rollout.shape == [("root", None, 1), ("rerender", 0, 1), ("rerender", 1, 1)]
    assert rollout.rollout().sampled_tokens == 3 * 2


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["on", "again", "edit", "cut", "head"])), max_size=12))
def test_whatever_an_agent_sends_each_sampled_token_is_trained_once(plan: list[tuple[int, str]]) -> None:
    async def play() -> None:
        rollout = Played(Drawing(calls=False))
        known: list[list[Message]] = [[SYSTEM, ask("go")]]
        for number, (which, kind) in enumerate(plan):
            said = known[which % len(known)]
            if kind == "edit":
                said = [ask(f"(edited {number})") if i == len(said) // 2 else m for i, m in enumerate(said)]
            elif kind == "cut":
                said = [*said[: max(1, len(said) // 2)], ask("so far")]
            elif kind == "head":
                said = [Message(role="system", content=f"You are {which}."), *said[1:]]
            answer = await rollout.say(*said)
            known.append(said if kind == "again" else [*said, answer, ask(f"{which % 3}")])
        check_exact(rollout.engine, [rollout.rollout()])

    asyncio.run(play())


async def test_an_agent_that_drops_messages_gets_no_id_twice_in_one_conversation() -> None:
    look = raw('<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>')
    rollout = Played(Scripted([look] * 6))
    said = [ask("go")]
    for _ in range(3):
        answer = await rollout.say(*said, tools=[LOOK])
        said += [answer, Message(role="tool", content="57", tool_call_id=answer["tool_calls"][0]["id"])]
    for kept in (2, 4, 6):
        short = [ask(f"go on after {kept}"), *said[-kept:]]
        short.append(await rollout.say(*short, tools=[LOOK]))
        ids = [made["id"] for message in short for made in message.get("tool_calls", ())]
        assert len(ids) == len({*ids}) == kept // 2 + 1
