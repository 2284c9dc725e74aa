"""Envs whose agent is a program: started in a sandbox, held to its limits, scored, and ended."""

import asyncio
import itertools
import os
import secrets
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.rollouts.rollout_warnings import ToolUse
from agentgym.samples import build_samples
from agentgym.sandboxes import ExecResult
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.scheduling import run_groups
from agentgym.testing import check_env
from tests.agent_api.drawing import Drawing, Played

TASK = ag.Task(id="t", prompt="Count to three.")
ASK = """
import json, os, sys, threading, time, urllib.error, urllib.request

def ask(messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

def user(text):
    return {"role": "user", "content": text}
"""
"""The beginning of each agent program here: an HTTP client that uses only the standard library."""
COUNT = """
messages = [user(sys.stdin.read())]
for _ in range(3):
    messages += [ask(messages), user("on")]
print(messages[-2]["content"])
"""


def command(code: str) -> list[str]:
    return [sys.executable, "-c", ASK + code]


class Here(ag.AgentEnv[ag.Task]):
    """An agent that runs as a plain process."""

    sandbox_spec = ag.Process(unsafe=True)
    command = command(COUNT)

    @ag.reward
    def counted(self) -> float:
        return float(self.answer == "three")


async def play(code: str, engine: Any, **declared: Any) -> ag.Rollout:
    env: type[Here] = type("Agent", (Here,), {"command": command(code), **declared})
    return await ag.rollout(env, TASK, engine)


async def test_an_agent_gets_the_prompt_and_is_scored_by_its_files() -> None:
    played = await ag.rollout(Here, TASK, Scripted([say("one"), say("two"), say("three")]))
    assert (played.error, played.reward, played.stop_reason) == (None, 1.0, "done")
    assert [(segment.kind, len(segment.turns)) for segment in played.segments] == [("root", 3)]
    assert played.segments[0].prompt_messages[0]["content"] == "Count to three."
    assert (played.metrics["agent_requests"], played.metrics["turns"]) == (3, 3)
    assert "tool_calls" not in played.metrics


@pytest.mark.parametrize(("said", "calls"), [('{"name": "run", "arguments": {}}', 1), ('{"name": "run"', 0)])
async def test_the_calls_of_an_agent_count_as_tool_use_unless_they_are_malformed(said: str, calls: int) -> None:
    code = 'ask([user("go")], tools=[{"type": "function", "function": {"name": "run", "parameters": {}}}])'
    use = ToolUse()
    use.add([await play(code, Scripted([say(f"<tool_call>{said}</tool_call>")]))])
    assert (use.offered, use.calls, use.malformed) == (1, calls, 1 - calls)


@pytest.mark.skipif(why_no_bubblewrap() is not None, reason=f"no bubblewrap: {why_no_bubblewrap()}")
async def test_an_agent_in_a_sandbox_without_network_reaches_only_its_policy() -> None:
    class Boxed(Here):
        sandbox_spec: ClassVar[Any] = ag.Bubblewrap(network="loopback")
        command = ["python3", "-c", ASK + COUNT]  # noqa: RUF012

        @ag.reward
        async def alone(self) -> float:
            return float((await self.sandbox.exec("ls /tmp")).stdout == "")

    played = await ag.rollout(Boxed, TASK, Scripted([say("one"), say("two"), say("three")]))
    assert (played.error, played.reward) == (None, 2.0)


@pytest.mark.docker
@pytest.mark.slow
async def test_an_agent_in_a_container_without_network_reaches_its_policy() -> None:
    if (why_not := why_no_docker()) is not None:
        pytest.skip(why_not)

    class Contained(Here):
        sandbox_spec: ClassVar[Any] = ag.Docker(network="loopback")
        command = ["python3", "-c", ASK + COUNT]  # noqa: RUF012

    played = await ag.rollout(Contained, TASK, Scripted([say("one"), say("two"), say("three")]))
    assert (played.error, played.reward) == (None, 1.0)


async def test_an_invalid_request_does_not_exclude_a_rollout_from_the_batch() -> None:
    code = """
ask([user("a")])
for stop in ("\\0", ["x"] * 100):
    try:
        ask([user("b")], stop=stop)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
    played = await play(code, Scripted([say("one"), say("two"), say("three")]))
    assert (played.error, played.reward, played.metrics["agent_requests_refused"]) == (None, 0.0, 2)


async def test_an_agent_may_send_large_requests_concurrently() -> None:
    code = """
answers = []
threads = [
    threading.Thread(target=lambda way=way: answers.append(ask([user(str(way) * 300000)])["content"]))
    for way in range(4)
]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(answers), {len(answer) for answer in answers})
"""
    limits = ag.Limits(context_tokens=1 << 20, turn_tokens=1 << 19)
    played = await play(code, Scripted(lambda _: say("x" * 200_000)), limits=limits)
    assert (played.error, played.stop_reason) == (None, "done")
    assert [segment.kind for segment in played.segments] == ["root", *["compaction"] * 3]
    assert played.sampled_tokens == 4 * 200_001


class Ended(Here):
    """Records how its agent ended."""

    results: ClassVar[list[ExecResult | None]] = []

    async def close(self) -> None:
        self.results.append(self.result)


async def test_an_agent_that_fails_is_scored_and_its_output_is_stored() -> None:
    class Failing(Ended):
        command = command('ask([user("go")]); print("x" * 100_000); sys.exit("out of ideas")')

    played = await ag.rollout(Failing, TASK, Scripted([say("one")]))
    assert (played.error, played.reward, played.stop_reason) == (None, 0.0, "crashed")
    result = Failing.results.pop()
    assert result is not None
    assert (result.status, result.exit_code, result.stderr.strip()) == ("error", 1, "out of ideas")
    assert (len(result.stdout), result.truncated) == (64 << 10, True)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ('sys.exit("no such file")', "Agent: the agent ended with exit code 1 and sent no request: no such file"),
        ("ask([])", "Agent: the agent got no response; its last request was refused: messages: must not be empty"),
    ],
)
async def test_an_agent_without_a_response_is_a_failure_with_a_reason(code: str, why: str) -> None:
    played = await play(code, Scripted([say("one")]))
    assert played.reward is None
    assert why in str(played.error)


async def test_an_agent_without_a_command_is_a_failure_that_names_the_field() -> None:
    played = await play("", Scripted([]), command=())
    assert "Agent.command: empty; set it, or override agent_command" in str(played.error)


async def test_an_agent_that_continues_after_its_last_turn_is_ended() -> None:
    code = """
while True:
    try:
        ask([user("go")])
    except urllib.error.HTTPError as error:
        print(json.load(error)["error"]["code"], flush=True)
        while True:
            time.sleep(1000)
"""
    played = await play(code, Scripted(lambda _: say("x")), limits=ag.Limits(turns=2), grace_s=0.0)
    assert (played.error, played.stop_reason, played.metrics["turns"]) == (None, "turns", 2)
    assert [segment.kind for segment in played.segments] == ["root", "fork"]


async def test_an_agent_may_exit_after_its_last_turn() -> None:
    code = """
try:
    ask([user("go")]), ask([user("go")])
except urllib.error.HTTPError:
    print("three")
"""
    played = await play(code, Scripted([say("x")]), limits=ag.Limits(turns=1), grace_s=1000.0)
    assert (played.error, played.stop_reason, played.reward) == (None, "turns", 1.0)


async def test_an_agent_that_gives_up_at_a_full_context_is_truncated() -> None:
    code = 'ask([user("go")]); ask([user("x" * 500)])'
    played = await play(code, Scripted(lambda _: say("x")), limits=ag.Limits(context_tokens=100))
    assert (played.error, played.stop_reason) == (None, "context")


async def test_an_engine_error_ends_the_agent_and_fails_the_rollout() -> None:
    engine = Drawing()
    engine.breaks = True
    code = """
try:
    ask([user("go")])
except urllib.error.HTTPError:
    time.sleep(1000)
"""
    played = await play(code, engine)
    assert played.failure is not None
    assert (played.failure.type, "the engine broke" in played.failure.message) == ("EngineError", True)


async def test_an_engine_error_before_the_first_response_is_retried() -> None:
    class Once(Drawing):
        async def generate(self, *args: Any, **given: Any) -> Any:
            self.breaks = not self.asked.is_set()
            return await super().generate(*args, **given)

    played = await play('ask([user("go")])', Once(), limits=ag.Limits(retries=1))
    assert (played.error, played.metrics["retries"]) == (None, 1)


async def test_a_cancelled_rollout_leaves_no_agent_process(tmp_path: Path) -> None:
    code = f"""
import subprocess
children = [subprocess.Popen(["sleep", "1000"], start_new_session=new) for new in (False, True)]
with open({str(tmp_path / "pids")!r}, "w") as file:
    file.write(" ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children))))
ask([user("go")])
"""
    engine = Drawing()
    engine.gate.clear()
    running = asyncio.create_task(play(code, engine))
    await engine.asked.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert engine.left.is_set()
    assert [pid for pid in (tmp_path / "pids").read_text().split() if is_running(int(pid))] == []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


async def test_a_time_limit_ends_the_agent_and_keeps_the_sandbox_for_the_rewards() -> None:
    engine, mark = Drawing(), secrets.token_hex(8)  # An unsafe sandbox also sees the agents of other tests.
    engine.gate.clear()
    env_class: type[Here] = type("Marked", (Here,), {"command": [*command(COUNT), mark]})
    async with Here.sandbox_spec.open(1) as pool, pool.lease() as sandbox:
        env = env_class(TASK)
        env.sandbox = sandbox
        playing = asyncio.create_task(env.play(Played(engine).policy, TASK.prompt))
        await engine.asked.wait()
        running = f"ps -ef | grep -c '[{mark[0]}]{mark[1:]}'"
        assert int((await sandbox.exec(running)).stdout) > 0
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert env.result is not None
        assert (env.result.status, engine.left.is_set()) == ("timeout", True)
        assert (await sandbox.exec(f"echo $((1 + 1)); {running}")).stdout == "2\n0\n"


class Short(Here):
    """Gives each rollout a different reward."""

    limits = ag.Limits(turn_tokens=24, context_tokens=1024)
    scored = itertools.count(1)

    @ag.reward
    def place(self) -> float:
        return float(next(self.scored))


async def test_an_agent_of_a_real_model_gives_samples_of_the_sampled_tokens() -> None:
    async with ag.TransformersEngine("tiny") as engine:
        groups = await run_groups(Short, [TASK], engine, n=2)
    assert [rollout.error for rollout in groups.rollouts] == [None, None]
    sampled = sum(rollout.sampled_tokens for rollout in groups.rollouts)
    assert build_samples(groups.groups).trained_tokens == sampled > 0


@pytest.mark.slow
async def test_an_env_with_an_agent_keeps_the_contract_of_envs() -> None:
    await check_env(Here, TASK, oracle=[say("one"), say("two"), say("three")])


async def test_each_concurrent_rollout_has_a_separate_key() -> None:
    class Keyed(Here):
        command = command('ask([user("go")]); print(os.environ["OPENAI_API_KEY"], os.environ["ANTHROPIC_API_KEY"])')
        keys: ClassVar[list[str]] = []

        async def close(self) -> None:
            self.keys.extend((self.answer or "").split())

    groups = await run_groups(Keyed, [TASK], Drawing(), n=2)
    assert [rollout.error for rollout in groups.rollouts] == [None, None]
    assert (len(Keyed.keys), len(set(Keyed.keys))) == (4, 2)


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"command": 3}, "Wrong.command: must be"),
        ({"command": "x", "grace_s": "soon"}, "Wrong.grace_s: must be"),
        ({"command": "x", "context": ag.Window()}, "Wrong.context: the agent manages its own context"),
        (
            {"command": "x", "sandbox_spec": ag.Bubblewrap()},
            'Wrong.sandbox_spec: .* give the sandbox network="loopback"',
        ),
    ],
)
def test_an_invalid_class_is_refused_when_it_is_created(declared: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        type("Wrong", (ag.AgentEnv,), declared)


def test_tools_and_rewards_with_reserved_names_are_refused() -> None:
    with pytest.raises(ValueError, match="the agent brings its own tools and can't use 'look'"):

        class Tooled(Here):
            @ag.tool
            def look(self) -> str:
                """Look."""
                return ""

    with pytest.raises(ValueError, match="reward 'result' of Taken: agentgym's own classes use 'result'"):

        class Taken(Here):
            @ag.reward
            def result(self) -> float:  # type: ignore[override]
                return 0.0


@pytest.mark.skipif(why_no_bubblewrap() is not None, reason=f"no bubblewrap: {why_no_bubblewrap()}")
async def test_a_sandbox_without_a_loopback_fails_with_the_setting_to_change() -> None:
    class Chosen(Here):
        sandbox_spec: ClassVar[Any] = None

        @classmethod
        def sandbox_for(cls, task: ag.Task) -> Any:
            return ag.Bubblewrap()

    played = await ag.rollout(Chosen, TASK, Scripted([]))
    assert 'give the sandbox network="loopback"' in str(played.error)
