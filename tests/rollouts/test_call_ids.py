"""Ids of tool calls: unique in a rollout, accepted by every template, and the same if a rollout is repeated."""

import re
from typing import Any

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, calls, raw, say
from agentgym.rollouts.call_ids import CallIds
from agentgym.types.branching import BranchingConfig
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout

TASK = ag.Task(id="t", prompt=(Message(role="user", content="Go."),))


class Desk(ag.ToolEnv[ag.Task]):
    limits = ag.Limits(turns=600, turn_tokens=10_000, context_tokens=1_000_000)

    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "nothing"

    @ag.tool
    async def split(self) -> str:
        """Try two ways, and ask a sub-agent."""
        for _ in range(2):
            async with self.fork("fork", [Message(role="tool", content="go", name="split")]) as agent:
                await agent.run()
        async with self.fork("subagent", [Message(role="user", content="?")], tools=[self.look]) as agent:
            return await agent.run()

    @ag.reward
    def one(self) -> float:
        return 1.0


class Named(ByteTokenizer):
    """A format in which the model writes an id for each call: always the same one."""

    def parse(self, text: str, tools: Any) -> Message:
        message = super().parse(text, tools)
        for made in message.get("tool_calls", ()):
            made["id"] = "functions.look:0"
        return message


def made(rollout: Rollout) -> list[str]:
    """Return the id of each call that was sampled in a rollout."""
    turns = [turn for segment in rollout.segments for turn in segment.turns]
    return [each["id"] for turn in turns for each in turn.message.get("tool_calls", ())]


def check_unique(ids: list[str], number: int) -> None:
    assert len(ids) == len({*ids}) == number
    assert all(re.fullmatch("[a-z0-9]{9}", each) for each in ids), "Mistral's templates accept nothing else"


async def played(env: type[Any], replies: Any, **settings: Any) -> Rollout:
    return await ag.rollout(env, TASK, Scripted(replies), **settings)


async def test_no_two_calls_have_the_same_id_past_a_thousand_messages_and_a_hundred_calls_in_a_turn() -> None:
    many = await played(Desk, [*[call("look")] * 502, calls(*[("look", {})] * 120), say("done")])
    check_unique(made(many), 622)


async def test_no_two_calls_have_the_same_id_where_the_context_is_shortened() -> None:
    sliding = type("Sliding", (Desk,), {"context": ag.Window(turns=4, keep=3)})
    summing = type("Summing", (Desk,), {"context": ag.Compact(turns=3)})
    slid = await played(sliding, [*[call("look")] * 9, say("done")])
    check_unique(made(slid), 9)
    for branch in slid.transcript():
        ids = [each["id"] for message in branch.messages for each in message.get("tool_calls", ())]
        assert len(ids) == len({*ids}), "a slide keeps calls, whose ids no later call may have"
    summed = [call("look"), call("look"), call("look"), say("seen"), call("look"), call("look"), say("done")]
    check_unique(made(await played(summing, summed)), 5)


async def test_forks_and_sub_agents_give_ids_that_no_other_conversation_of_the_rollout_gives() -> None:
    each = [call("look"), say("done")]
    rollout = await played(Desk, [call("look"), call("split"), *each, *each, *each, call("look"), say("done")])
    assert sorted(segment.kind for segment in rollout.segments) == ["fork", "fork", "root", "subagent"]
    check_unique(made(rollout), 6)


async def test_branches_give_ids_that_neither_the_rollout_nor_another_branch_gives() -> None:
    engine = Scripted(lambda asked: call("look") if asked.count("nothing") < 3 else say("done"))
    rollout = await ag.rollout(Desk, TASK, engine, branching=BranchingConfig(per_state=2))
    assert len(rollout.branches) == 6
    check_unique(made(rollout), 3 + 2 * 2 + 2)


async def test_a_repeated_rollout_gives_the_same_ids() -> None:
    replies = [call("split"), *[call("look"), say("done")] * 3, call("look"), say("done")]
    first = made(await played(Desk, replies, seed=3))
    assert first == made(await played(Desk, replies, seed=3, rollout_id="again"))
    assert len(first) == 5
    assert not {*first} & {*made(await played(Desk, replies, seed=4))}


async def test_an_id_that_the_model_wrote_is_kept_only_the_first_time() -> None:
    engine = Scripted([call("look"), call("look"), say("done")], tokenizer=Named())
    rollout = await ag.rollout(Desk, TASK, engine)
    first, second = made(rollout)
    assert [first, second] == ["functions.look:0", "functions.look:1"], "Kimi's templates show no other name of a call"
    told = [message["tool_call_id"] for turn in rollout.segments[0].turns for message in turn.env_messages]
    assert told == [first, second]


def test_an_id_without_a_number_that_is_known_is_replaced() -> None:
    twice = Message(
        role="assistant", content="", tool_calls=[{"id": "a", "function": {"name": "look", "arguments": {}}}]
    )
    ids = CallIds((0,), [twice])
    check_unique([each["id"] for _ in range(2) for each in ids.named(twice)["tool_calls"]], 2)


def test_no_id_of_the_first_messages_is_given_again_and_a_message_is_not_changed() -> None:
    before = CallIds((0,), ())
    twice = Message(role="assistant", content="", tool_calls=[{"function": {"name": "look", "arguments": {}}}])
    (given,) = before.named(twice)["tool_calls"]
    assert "id" not in twice["tool_calls"][0]
    (other,) = CallIds((0,), [before.named(twice), {**twice, "tool_calls": [given]}]).named(twice)["tool_calls"]
    assert other["id"] != given["id"]
    assert before.named(say("x")) == say("x")


async def test_a_malformed_call_has_an_id_too() -> None:
    rollout = await played(Desk, [raw("<tool_call>{</tool_call>"), raw("<tool_call>{</tool_call>"), say("done")])
    check_unique(made(rollout), 2)
