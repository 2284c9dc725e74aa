"""A rollout's record for a reader: each message once and in order, the lines of a failure, and tool failures."""

import asyncio
import logging
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, calls, say
from agentgym.errors import EngineError, EnvError, Failure, SandboxError, boundary
from agentgym.run.summary import Report
from agentgym.scheduling import run_groups
from agentgym.scheduling.accounting import Groups
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout
from tests.support.virtual_time import run_in_virtual_time

TASK = ag.Task(id="t", prompt=(Message(role="user", content="Go."),))
DECODE = ByteTokenizer().decode


class Desk(ag.ToolEnv[ag.Task]):
    """An env that looks, splits, queries a sub-agent and submits."""

    system = "Be brief."

    @ag.tool
    async def look(self, where: str = "here") -> str:
        """Look."""
        return f"nothing {where}"

    @ag.tool
    async def split(self) -> str:
        """Try two ways."""
        for way in ("left", "right"):
            async with self.fork("fork", [Message(role="tool", content=f"go {way}", name="split")]) as agent:
                await agent.run()
        return "both ways tried"

    @ag.tool
    async def ask(self) -> str:
        """Ask a sub-agent."""
        question = Message(role="user", content="Is it there?")
        async with self.fork("subagent", [question], tools=[self.look, self.submit]) as agent:
            return await agent.run()

    @ag.tool
    async def submit(self, answer: str) -> ag.Stop:
        """Hand in the answer."""
        return ag.Stop("submitted", f"got {answer}")

    @ag.reward
    def one(self) -> float:
        return 1.0


def env(base: type[Any] = Desk, **parts: Any) -> type[Any]:
    return type("Made", (base,), parts)


async def play(cls: type[Any], *replies: Message, **given: Any) -> Rollout:
    return await ag.rollout(cls, TASK, Scripted(list(replies)), **given)


def lines(rollout: Rollout) -> list[list[str]]:
    """Return each segment's messages as `role content-or-calls`."""
    return [[line(message) for message in segment.messages] for segment in rollout.transcript()]


def line(message: Message) -> str:
    names = " ".join(made["function"]["name"] for made in message.get("tool_calls", ()))
    return f"{message['role']} {message['content'] or names}"


# Messages


async def test_a_transcript_has_the_prompt_the_turns_and_the_final_answer() -> None:
    rollout = await play(Desk, call("look"), call("submit", answer="7"))
    assert lines(rollout) == [
        ["system Be brief.", "user Go.", "assistant look", "tool nothing here", "assistant submit", "tool got 7"]
    ]
    (segment,) = rollout.segments
    assert "got 7" not in DECODE(segment.token_ids.tolist())
    assert [m["content"] for m in segment.prompt_messages] == ["Be brief.", "Go."]
    assert [[m["content"] for m in turn.env_messages] for turn in segment.turns] == [["nothing here"], ["got 7"]]
    assert segment.turns[0].env_seconds > 0


async def test_forks_and_sub_agents_have_transcripts_that_print_shared_messages_once() -> None:
    rollout = await play(
        Desk,
        call("look", where="first"),
        call("split"),
        say("left done"),
        call("look", where="right"),
        say("right done"),
        call("ask"),
        call("submit", answer="sub"),
        say("end"),
    )
    shared = ["system Be brief.", "user Go.", "assistant look", "tool nothing first", "assistant split"]
    assert lines(rollout) == [
        [*shared, "tool both ways tried", "assistant ask", "tool got sub", "assistant end"],
        [*shared, "tool go left", "assistant left done"],
        [*shared, "tool go right", "assistant look", "tool nothing right", "assistant right done"],
        ["user Is it there?", "assistant submit", "tool got sub"],
    ]
    printed = str(rollout)
    for text in ("Be brief.", "Go.", "nothing first", "left done", "nothing right", "Is it there?", "both ways tried"):
        assert printed.count(text) == 1
    assert printed.count("[5 messages as in segment 0]") == 2


async def test_a_compaction_shows_its_instruction_summary_and_continuation() -> None:
    brief = env(context=ag.Compact(at=None, turns=1, instruction="Sum up."))
    rollout = await play(brief, call("look"), say("I looked."), say("end"))
    assert lines(rollout) == [
        ["system Be brief.", "user Go.", "assistant look", "tool nothing here", "user Sum up.", "assistant I looked."],
        ["system Be brief.", "user Go.\nI looked.", "assistant end"],
    ]


class Loud(ag.ToolEnv[ag.Task]):
    """An env whose tool's second answer doesn't fit the context."""

    context = ag.Compact(instruction="Sum up.")
    limits = ag.Limits(context_tokens=2000)

    @ag.tool
    async def look(self, what: str) -> str:
        """Look."""
        return what * 700

    @ag.reward
    def one(self) -> float:
        return 1.0


async def test_an_answer_carried_over_a_compaction_appears_where_it_was_read() -> None:
    rollout = await play(Loud, call("look", what="a"), call("look", what="b"), say("I looked."), say("end"))
    assert rollout.metrics["answers_carried"] == 1
    a, b = "a" * 700, "b" * 700
    assert lines(rollout) == [
        ["user Go.", "assistant look", f"tool {a}", "assistant look", "user Sum up.", "assistant I looked."],
        ["user Go.\nI looked.", "assistant look", f"tool {b}", "assistant end"],
    ]
    assert (str(rollout).count(a), str(rollout).count(b)) == (1, 1)


async def test_an_answer_that_was_to_be_carried_is_kept_if_there_is_no_summary() -> None:
    rollout = await play(Loud, call("look", what="a"), call("look", what="b"), say("y" * 2000))
    assert (rollout.stop_reason, len(rollout.segments)) == ("context", 1)
    assert lines(rollout)[0][3:6] == ["assistant look", f"tool {'b' * 700}", "user Sum up."]


async def test_a_window_opens_with_the_prompt_and_the_last_turns() -> None:
    slid = env(context=ag.Window(at=None, turns=2, keep=1))
    rollout = await play(slid, call("look", where="1"), call("look", where="2"), say("end"))
    assert lines(rollout)[1] == ["system Be brief.", "user Go.", "assistant look", "tool nothing 2", "assistant end"]


async def test_replies_to_a_forked_agent_are_its_answers() -> None:
    class Talks(Desk):
        @ag.tool
        async def ask(self) -> str:
            """Talk to a sub-agent."""
            async with self.fork("subagent", [Message(role="user", content="Hello?")]) as agent:
                await agent.turn()
                agent.reply([Message(role="user", content="And?")])
                agent.reply([Message(role="user", content="Well?")])
                await agent.turn()
            return "talked"

    rollout = await play(Talks, call("ask"), say("hello"), say("bye"), say("end"))
    assert lines(rollout)[1] == ["user Hello?", "assistant hello", "user And?", "user Well?", "assistant bye"]


async def test_messages_are_stored_as_given_and_not_copied() -> None:
    answer = Message(role="user", content="again")

    class Echo(ag.Env[ag.Task]):
        limits = ag.Limits(turns=2)

        async def step(self, action: Message) -> ag.StepResult:
            return ag.StepResult([answer], 0.0, False, False, {})

    rollout = await play(Echo, say("a"), say("b"))
    assert all(turn.env_messages[0] is answer for turn in rollout.segments[0].turns)


async def test_terminal_control_characters_are_stored_and_printed_escaped() -> None:
    async def look(self: Desk) -> str:
        """Look."""
        return "\x1b[2J\ud800"

    rollout = await play(env(look=ag.tool(look)), call("look"), say("\x07"))
    assert rollout.segments[0].turns[0].env_messages[0]["content"] == "\x1b[2J\ud800"
    str(rollout).encode()
    assert r"tool look: \x1b[2J\ud800" in str(rollout)


# Failures


def helper(text: str) -> None:
    raise KeyError(text)


def awaited(text: str) -> Any:
    """Return an env method that fails in the helper when awaited."""

    async def method(self: Desk) -> None:
        helper(text)

    return method


async def test_a_failure_names_the_boundary_and_has_the_traceback_of_the_users_lines() -> None:
    async def setup(self: Desk) -> None:
        try:
            helper("inner")
        except KeyError as error:
            raise ValueError("outer\ud800") from error

    failure = (await play(env(setup=setup))).failure
    assert failure is not None
    assert (failure.type, failure.where) == ("EnvError", "Made.setup")
    assert failure.message.startswith("Made.setup: ValueError: outer\\ud800, at test_windows.py:")
    first, _, second = failure.traceback.partition("direct cause")
    assert first.index("in setup") < first.index("in helper") < first.index("KeyError: 'inner'")
    assert "ValueError: outer\\ud800" in second
    assert "/agentgym/rollouts/" not in failure.traceback
    failure.traceback.encode()


def dead(self: Desk) -> None:
    raise SandboxError("the sandbox died")


@pytest.mark.parametrize(
    ("parts", "where", "line"),
    [
        ({"one": ag.reward(lambda self: helper("r"))}, "Made: reward 'one'", "in helper"),
        ({"close": awaited("c")}, "Made.close", "in helper"),
        ({"__init__": lambda self, task: helper("i")}, "Made(task)", "in helper"),
    ],
)
async def test_every_boundary_is_named(parts: dict[str, Any], where: str, line: str) -> None:
    failure = (await play(env(**parts), say("end"))).failure
    assert failure is not None
    assert failure.where == where
    assert line in failure.traceback
    assert "/agentgym/" not in failure.traceback


async def test_a_sandbox_that_dies_in_a_tool_names_the_tool_and_its_line() -> None:
    async def look(self: Desk) -> str:
        """Look."""
        dead(self)
        return ""

    rollout = await play(env(look=ag.tool(look)), call("look"))
    assert rollout.failure is not None
    assert (rollout.failure.type, rollout.failure.where) == ("SandboxError", "tool 'look' of Made")
    assert "in look\n" in rollout.failure.traceback
    assert len(rollout.messages) == 1


async def test_a_validation_error_has_neither_a_boundary_nor_a_traceback() -> None:
    async def reset(self: Desk, **_: Any) -> Any:
        return [], {}

    failure = (await play(env(reset=reset))).failure
    assert failure == Failure(
        type="EnvError", message="Made.reset: messages must not be empty, because the model needs a prompt"
    )


def test_an_error_inside_a_library_keeps_the_librarys_frames() -> None:
    try:
        with boundary(EngineError, "generate"):
            __import__("json").loads("{")
    except EngineError as error:
        failure = Failure.of(error)
    assert failure.where == "generate"
    assert "in test_an_error_inside_a_library" in failure.traceback
    assert "in raw_decode" in failure.traceback


def test_a_long_chain_of_causes_is_kept_completely() -> None:
    error = cause = ValueError("0")
    for number in range(1, 3000):
        error = ValueError(str(number))
        error.__cause__, cause = cause, error
    outer = EnvError("step")
    outer.__cause__ = error
    assert Failure.of(outer).traceback.count("ValueError") == 3000


async def test_later_failures_are_notes_on_the_first() -> None:
    rollout = await play(env(setup=awaited("first"), close=awaited("second")))
    assert rollout.failure is not None
    assert rollout.failure.where == "Made.setup"
    assert "; Made.close: KeyError: 'second', at test_windows.py:" in rollout.failure.message


async def test_a_failed_rollout_in_a_group_keeps_its_failure_and_transcript() -> None:
    def one(self: Desk) -> float:
        return {"good": 1.0}[self.task.id]

    tasks = [TASK, ag.Task(id="good", prompt=TASK.prompt)]
    group, good = await run_groups(env(one=ag.reward(one)), tasks, Scripted(lambda text: say("end")), n=2)
    assert (group.task, good.task) == tuple(tasks)
    for rollout in group.rollouts:
        assert rollout.failure is not None
        assert rollout.failure.where == "Made: reward 'one'"
        assert lines(rollout) == [["system Be brief.", "user Go.", "assistant end"]]


def test_a_reset_over_the_time_limit_is_a_failure_that_names_its_line() -> None:
    async def setup(self: Desk) -> None:
        await asyncio.sleep(60)

    slow = env(setup=setup, limits=ag.Limits(seconds=10))
    rollout = run_in_virtual_time(ag.rollout(slow, TASK, Scripted([])))
    assert (rollout.reward, rollout.segments, rollout.stop_reason) == (None, (), "error")
    said = "EnvError: Made.reset: TimeoutError: not finished after 10 s (limits.seconds), at test_windows.py:"
    assert (rollout.error or "").startswith(said)
    assert rollout.failure is not None
    assert (rollout.failure.where, "in setup" in rollout.failure.traceback) == ("Made.reset", True)


async def test_an_env_without_metrics_is_a_failed_rollout() -> None:
    def make(self: Desk, task: ag.Task) -> None:
        Desk.__init__(self, task)
        del self.metrics

    rollout = await play(env(__init__=make, system=None), say("end"))
    assert (rollout.error or "").startswith("EnvError: Made.metrics: AttributeError")


# Tools


def raising(self: Desk) -> str:
    """Look."""
    raise KeyError("drawer")


async def test_tool_failures_are_counted_by_tool_up_to_the_runs_summary() -> None:
    broken = env(look=ag.tool(raising))
    replies = [calls(("look", {}), ("look", {}), ("nonsense", {}), ("submit", {"answer": "1"}))]
    rollout = await play(broken, *replies)
    assert rollout.metrics["tool_errors/look"] == 2
    assert [name for name in rollout.metrics if name.startswith("tool_errors/")] == ["tool_errors/look"]
    report = Report()
    report.add(Groups([Group(group_id="t", rollouts=(rollout,))]))
    assert report.summary([])["tool_errors"] == {"look": 2}
    assert "The tool 'look' failed in 2 of 2 calls." in report.warnings([])


async def test_a_failed_rollout_also_counts_its_tools_failures() -> None:
    broken = env(look=ag.tool(raising), one=ag.reward(lambda self: helper("score")))
    rollout = await play(broken, call("look"), say("end"))
    assert (rollout.reward, rollout.metrics["tool_errors/look"]) == (None, 1)


async def test_a_tools_exception_is_logged_once_with_file_and_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Once(Desk):
        @ag.tool
        async def look(self, where: str = "") -> str:
            """Look."""
            raise RuntimeError("no such drawer")

        @ag.reward
        def one(self) -> float:
            return {"good": 1.0}[self.task.id]

    tasks = [TASK, ag.Task(id="good", prompt=TASK.prompt)]
    engine = Scripted(lambda text: say("end") if "no such" in text else call("look"))
    with caplog.at_level(logging.WARNING):
        await run_groups(Once, tasks, engine, n=3)
    said = [record.getMessage() for record in caplog.records]
    for what in ("tool 'look' of Once raised RuntimeError", "Once: reward 'one' raised KeyError"):
        (found,) = [text for text in said if text.startswith(what)]
        assert ", at test_windows.py:" in found
