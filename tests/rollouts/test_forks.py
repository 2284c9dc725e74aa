"""Forks and sub-agents: one rollout, one reward, and each sampled token trained in exactly one segment."""

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, say
from agentgym.errors import EnvError
from agentgym.samples import build_samples
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.types.completion import Completion
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment
from tests.rollouts.test_rollout import Rewriting

TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="Go."),))
DECODE = ByteTokenizer().decode


class Desk(ag.ToolEnv[ag.Task]):
    """An env that queries sub-agents."""

    @ag.tool
    async def look(self) -> str:
        """Look around."""
        return "nothing"

    @ag.tool
    async def ask(self, what: str = "?", turns: int | None = None) -> str:
        """Ask a sub-agent."""
        question = Message(role="user", content=what)
        async with self.fork("subagent", [question], tools=[self.look, "ask"], turns=turns) as agent:
            text = await agent.run()
        return f"{agent.stop_reason}: {text}"

    @ag.tool
    async def split(self) -> str:
        """Try two ways."""
        texts = []
        for way in ("left", "right"):
            async with self.fork("fork", [Message(role="tool", content=way, name="split")]) as agent:
                texts.append(await agent.run())
        return ", ".join(texts)

    @ag.reward
    def one(self) -> float:
        return 1.0


async def play(replies: Any, env: type[Desk] = Desk, **given: Any) -> Rollout:
    return await ag.rollout(env, TASK, replies if isinstance(replies, Scripted) else Scripted(replies), **given)


def shape(rollout: Rollout) -> list[tuple[str, int | None]]:
    return [(s.kind, s.parent) for s in rollout.segments]


def wrote(segment: Segment) -> list[str]:
    return [DECODE(segment.token_ids[t.start : t.stop].tolist()).removesuffix("<|im_end|>") for t in segment.turns]


def limited(**limits: Any) -> type[Desk]:
    return type("Limited", (Desk,), {"limits": ag.Limits(**limits)})


async def test_a_sub_agent_has_its_own_context_and_answers_like_a_tool() -> None:
    rollout = await play([call("ask", what="Well?"), call("look"), say("found"), say("done")])
    assert shape(rollout) == [("root", None), ("subagent", 0)]
    root, agent = rollout.segments
    assert wrote(agent)[1:] == ["found"]
    assert "answer: found" in DECODE(root.token_ids.tolist())
    opened = DECODE(agent.token_ids[: agent.turns[0].start].tolist())
    assert "Well?" in opened
    assert "Go." not in opened
    assert (rollout.reward, rollout.metrics["subagents"], rollout.metrics["turns"]) == (1.0, 1, 4)


async def test_a_sub_agent_can_call_only_its_tools() -> None:
    class Narrow(Desk):
        @ag.tool
        async def ask_alone(self) -> str:
            """Ask a sub-agent without tools."""
            async with self.fork("subagent", [Message(role="user", content="?")]) as agent:
                return await agent.run()

    rollout = await play([call("ask_alone"), call("look"), say("no"), say("done")], Narrow)
    assert "<|im_start|>tools" not in DECODE(rollout.segments[1].token_ids.tolist())
    assert "unknown tool 'look'; the tools are: none" in DECODE(rollout.segments[1].token_ids.tolist())


async def test_a_sub_agents_prompt_lists_only_the_tools_it_was_given() -> None:
    rollout = await play([call("ask"), say("found"), say("done")])
    opened = DECODE(rollout.segments[1].token_ids.tolist())
    assert [name for name in ("look", "ask", "split") if f'"name": "{name}"' in opened] == ["look", "ask"]


async def test_a_fork_under_a_rewriting_template_continues_from_the_rewritten_text() -> None:
    class Splits(Desk):
        @ag.tool
        async def split(self) -> str:
            """Try another way."""
            async with self.fork("fork", [Message(role="user", content="another way")]) as agent:
                return await agent.run()

    rollout = await play(Scripted([call("split"), say("a"), say("done")], tokenizer=Rewriting()), Splits)
    assert rollout.error is None
    opened = DECODE(rollout.segments[1].token_ids.tolist())
    assert "another way" in opened
    assert "Go." not in opened


async def test_a_fork_of_an_agent_without_turns_continues_from_its_prompt() -> None:
    class Doubts(Desk):
        @ag.tool
        async def split(self) -> str:
            """Ask a sub-agent otherwise."""
            async with (
                self.fork("subagent", [Message(role="user", content="Which?")]) as agent,
                agent.env.fork("fork", [Message(role="user", content="And why?")]) as other,
            ):
                text: str = await other.run()
            return text

    rollout = await play([call("split"), say("so"), say("done")], Doubts)
    fork = rollout.segments[2]
    opened = DECODE(fork.token_ids[: fork.turns[0].start].tolist())
    assert opened.index("Which?") < opened.index("And why?")
    assert [message["content"] for message in fork.prompt_messages] == ["Which?", "And why?"]
    assert wrote(fork) == ["so"]


async def test_fork_trains_the_shared_prefix_once() -> None:
    rollout = await play([call("look"), call("split"), say("a"), say("b"), say("done")])
    root, left, right = rollout.segments
    assert shape(rollout) == [("root", None), ("fork", 0), ("fork", 0)]
    shared = root.turns[1].stop
    for agent, way, text in ((left, "left", "a"), (right, "right", "b")):
        assert agent.token_ids[:shared].tolist() == root.token_ids[:shared].tolist()
        assert not agent.sampled[:shared].any()
        assert way in DECODE(agent.token_ids[shared : agent.turns[0].start].tolist())
        assert wrote(agent) == [text]
    total = sum(int(s.sampled.sum()) for s in rollout.segments)
    assert total == rollout.sampled_tokens == sum(t.stop - t.start for s in rollout.segments for t in s.turns)


async def test_sub_agents_nest_to_any_depth_under_one_rollout() -> None:
    depth = 7
    script = [call("ask", what=str(n)) for n in range(depth)] + [say("bottom")] + [say(f"up {n}") for n in range(depth)]
    rollout = await play(script)
    assert shape(rollout) == [("root", None), *[("subagent", n) for n in range(depth)]]
    assert rollout.reward == 1.0
    batch = build_samples([Group(group_id="t", rollouts=(rollout, await play_other()))])
    mine = [row for row in batch if row.rollout_id == "t/0"]
    assert sum(row.weight for row in mine) == pytest.approx(1.0)
    assert len({float(row.advantages[row.loss_mask][0]) for row in mine}) == 1


async def play_other() -> Rollout:
    class Zero(Desk):
        @ag.reward
        def one(self) -> float:
            return 0.0

    return await play([say("done")], Zero, rollout_id="t/1")


async def test_no_two_conversations_share_a_session_or_a_seed() -> None:
    asked: list[tuple[str, int, int]] = []

    class Spy(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            asked.append((given["session"], len(token_ids), given["seed"]))
            return await super().generate(token_ids, **given)

    engine = Spy([call("split"), call("ask"), say("x"), say("a"), say("b"), call("ask"), say("y"), say("end")])
    rollout = await play(engine)
    assert rollout.error is None
    assert list(dict.fromkeys(session for session, _, _ in asked)) == [
        f"t/0/{name}" for name in ("0", "0.0.0", "0.0.0.0.0", "0.1.0", "0.2.0")
    ]
    assert len(rollout.segments) == 5
    assert len({seed for _, _, seed in asked}) == len(asked)
    assert engine._played == {}


async def test_turns_are_numbered_in_the_order_they_were_sampled() -> None:
    rollout = await play([call("ask"), say("sub"), say("done")])
    assert [[t.number for t in s.turns] for s in rollout.segments] == [[0, 2], [1]]


async def test_a_turn_limit_holds_for_all_conversations_together() -> None:
    rollout = await play([call("ask"), *[call("look")] * 10], limited(turns=4))
    assert (rollout.stop_reason, rollout.metrics["turns"], rollout.reward) == ("turns", 4, 1.0)
    assert "done" not in str(rollout.messages)


async def test_a_sub_agent_can_have_fewer_turns_and_its_parent_continues() -> None:
    rollout = await play([call("ask", turns=2), call("look"), call("look"), say("done")])
    assert "turns: " in DECODE(rollout.segments[0].token_ids.tolist())
    assert rollout.stop_reason == "answer"


async def test_a_token_limit_holds_for_all_conversations_together() -> None:
    rollout = await play([call("ask"), say("x" * 300), say("never")], limited(tokens=100))
    assert rollout.sampled_tokens == 100
    assert (rollout.stop_reason, rollout.reward) == ("tokens", 1.0)


async def test_the_context_of_a_sub_agent_is_limited_like_its_parents() -> None:
    rollout = await play([call("ask"), say("x" * 4000), say("done")], limited(context_tokens=1000))
    assert max(len(s.token_ids) for s in rollout.segments) <= 1000
    assert "context: " in DECODE(rollout.segments[0].token_ids.tolist())
    assert rollout.stop_reason == "answer"


async def test_a_fork_may_have_a_branch_of_the_sandbox(sandboxes: FakeSandboxPool) -> None:
    class Boxed(Desk):
        sandbox_spec: ClassVar[Any] = ag.AnySandbox()

        @ag.tool
        async def split(self) -> str:
            """Change a branch of the sandbox."""
            await self.sandbox.write({"here": "before"})
            async with self.fork("fork", [Message(role="tool", content="go on", name="split")], sandbox=True) as agent:
                await agent.env.sandbox.write({"here": "changed"})
                await agent.run()
            return (await self.sandbox.read("here")).decode()

    rollout = await play([call("split"), say("sub"), say("done")], Boxed, sandboxes=sandboxes)
    assert rollout.error is None
    assert "before" in DECODE(rollout.segments[0].token_ids.tolist())


async def test_forks_may_run_concurrently_and_sample_as_if_run_in_sequence() -> None:
    seeds: dict[str, int] = {}

    class Slow(Scripted):
        """An engine that answers the second fork first."""

        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            seeds[given["session"]] = given["seed"]
            if "left" in DECODE(token_ids):
                await second.wait()
            elif "right" in DECODE(token_ids):
                second.set()
            return await super().generate(token_ids, **given)

    class Both(Desk):
        @ag.tool
        async def split(self) -> str:
            """Both ways at once."""
            async with asyncio.TaskGroup() as ways:
                for way in ("left", "right"):
                    ways.create_task(self.go(way))
            return "both"

        async def go(self, way: str) -> None:
            async with self.fork("fork", [Message(role="tool", content=way, name="split")]) as agent:
                await agent.run()

    second = asyncio.Event()
    rollout = await play(Slow([call("split"), say("r"), say("l"), say("done")]), Both)
    assert [wrote(s)[-1] for s in rollout.segments[1:]] == ["l", "r"]
    apart = dict(seeds)
    seeds.clear()
    second.set()
    await play(Slow([call("split"), say("l"), say("r"), say("done")]), Both)
    assert seeds == apart


async def test_a_sub_agent_compacts_like_its_parent() -> None:
    class Forgets(Desk):
        context = ag.Compact(at=None, turns=1)

    replies = [call("ask"), call("look"), say("summary"), say("sub"), say("summary"), say("done")]
    rollout = await play(replies, Forgets)
    assert shape(rollout) == [("root", None), ("subagent", 0), ("compaction", 1), ("compaction", 0)]
    assert rollout.reward == 1.0


async def test_an_engine_that_fails_in_a_sub_agent_fails_the_rollout() -> None:
    rollout = await play([call("ask")])
    assert rollout.reward is None
    assert "EngineError" in str(rollout.error)
    assert shape(rollout) == [("root", None), ("subagent", 0)]


async def test_the_engine_releases_a_sub_agents_session_when_it_is_closed() -> None:
    log: list[str] = []

    class Spy(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            log.append(f"ask {given['session']}")
            return await super().generate(token_ids, **given)

        async def release(self, session: str) -> None:
            log.append(f"release {session}")
            await super().release(session)

    await play(Spy([call("ask"), say("sub"), say("done")]))
    assert log[:4] == ["ask t/0/0", "ask t/0/0.0.0", "release t/0/0.0.0", "ask t/0/0"]


async def test_a_cancelled_sub_agent_leaves_no_session(no_leaks: None) -> None:
    asked = asyncio.Event()

    class Waiting(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            if "." in given["session"].rpartition("/")[2]:
                asked.set()
                await asyncio.Event().wait()
            return await super().generate(token_ids, **given)

    engine = Waiting([call("ask")])
    playing = asyncio.create_task(play(engine))
    await asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert engine._played == {}


async def test_attributes_set_by_a_sub_agent_stay_with_it_but_its_counts_do_not() -> None:
    notes: list[str] = []

    class Notes(Desk):
        note = "nobody"

        @ag.tool
        async def look(self) -> str:
            """Leave a note."""
            self.note = "sub"
            return self.note

        @ag.reward
        def one(self) -> float:
            notes.append(self.note)
            return self.metrics["tool_calls"]

    rollout = await play([call("ask"), call("look"), say("seen"), say("done")], Notes)
    assert notes == ["nobody"]
    assert rollout.reward == 2.0


async def test_forking_outside_a_rollout_is_refused_with_advice() -> None:
    env = Desk(TASK)
    with pytest.raises(EnvError, match="only available inside a rollout"):
        env.fork("subagent")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"kind": "twig"}, "kind: expected 'fork' or 'subagent', got 'twig'"),
        ({"kind": "fork", "tools": ["look"]}, "tools: a fork keeps"),
        ({"kind": "subagent", "tools": ["shout"]}, "tools: 'shout' is not an @ag.tool of"),
    ],
)
async def test_an_invalid_fork_is_refused(given: dict[str, Any], error: str) -> None:
    seen: list[str] = []

    class Wrong(Desk):
        @ag.tool
        async def split(self) -> str:
            """Ask for the impossible."""
            with pytest.raises(ValueError, match=error) as raised:
                self.fork(**given)
            seen.append(str(raised.value))
            return ""

    await play([call("split"), say("done")], Wrong)
    assert len(seen) == 1


async def test_an_agents_messages_include_its_turn_before_and_after_the_answer() -> None:
    seen: list[list[str]] = []

    class Watched(Desk):
        @ag.tool
        async def watch(self) -> str:
            """Play a sub-agent by hand."""
            async with self.fork("subagent", [Message(role="user", content="?")]) as agent:
                for _ in range(2):
                    await agent.turn()
                    seen.append([message["content"] for message in agent.messages])
                    agent.reply([Message(role="user", content="go on")])
            return "seen"

    rollout = await play([call("watch"), say("one"), say("two"), say("done")], Watched)
    assert seen == [["?", "one"], ["?", "one", "go on", "two"]]
    assert [turn.env_messages for turn in rollout.segments[1].turns] == [(Message(role="user", content="go on"),)] * 2
