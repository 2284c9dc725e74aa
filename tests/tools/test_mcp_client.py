"""Tools of real MCP servers, over stdin and stdout and over HTTP: listed, called, lost, and closed at the end."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.errors import EnvError
from agentgym.testing import Scripted, Seeing, call, calls, say
from agentgym.tools import DynamicTool
from tests.types.messages.pictures import PNG

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="needs the package mcp")

SCRIPT = Path(__file__).parent / "mcp_script.py"
COMMAND = [sys.executable, str(SCRIPT)]
MUTE = [sys.executable, "-c", "import sys; sys.stdin.read()"]
TASK = ag.Task.model_validate({"id": "t", "prompt": "Go."})


class Desk(ag.ToolEnv[ag.Task]):
    """Has a session per rollout, or the one in `shared`; `waits` is set while the tool `wait` runs."""

    limits = ag.Limits(turns=4, seconds=3600)
    shared: ag.MCP | None = None
    settings: dict[str, Any]
    wait_s = 3600.0
    waits = asyncio.Event()

    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.server = self.shared or ag.MCP(
            **{"command": COMMAND, "timeout_s": 3600, "open_timeout_s": 3600, **self.settings}
        )
        last.append(self)

    async def extra_tools(self) -> Sequence[DynamicTool]:
        return [self.noted(tool) if tool.name == "wait" else tool for tool in await self.server.open()]

    def noted(self, tool: DynamicTool) -> DynamicTool:
        async def wait() -> Any:
            self.waits.set()
            return await tool.call()

        return replace(tool, call=wait, timeout_s=self.wait_s)

    async def close(self) -> None:
        if self.shared is None:
            await self.server.close()

    @ag.reward
    def right(self) -> float:
        return 1.0


last: list[Desk] = []


def desk(shared: ag.MCP | None = None, wait_s: float = 3600.0, **settings: Any) -> type[Desk]:
    parts = {"shared": shared, "settings": settings, "wait_s": wait_s, "waits": asyncio.Event()}
    return type("Desk", (Desk,), parts)


def told(rollout: ag.Rollout, turn: int = 0) -> list[str]:
    return [message["content"] for message in rollout.segments[0].turns[turn].env_messages]


async def played(env: type[Desk], *script: Any) -> ag.Rollout:
    return await ag.rollout(env, TASK, Scripted([*script, say("done")]))


@pytest.fixture
def http_server() -> Iterator[str]:
    with subprocess.Popen([*COMMAND, "http"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp"
        process.kill()


async def test_a_servers_tools_are_called_in_the_rollouts_session(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESK_SECRET", "of this process")
    sound = calls(("add", {"a": 2, "b": 3}), ("note", {"text": "x"}), ("note", {"text": "y"}), ("picture", {}))
    seen = calls(
        ("surroundings", {"name": "DESK_SECRET"}),
        ("surroundings", {"name": "DESK"}),
        ("name", {"self": "a", "tool": "b", "arguments": "c"}),
    )
    wrong = calls(("add", {"a": "two"}), ("fail", {"why": "no ink"}), ("wait", {}), ("add", {"a": 1, "b": 1}))
    rollout = await played(desk(env={"DESK": "oak"}, wait_s=0.05), sound, seen, wrong)
    assert rollout.error is None
    assert told(rollout, 0)[:3] == ["5", "x", "x y"]
    assert told(rollout, 0)[3].startswith("[image/png, not shown: data: starts with b'pixels', so it isn't")
    assert told(rollout, 1) == ["not set", "oak", "a b c"]
    assert told(rollout, 2) == [
        "error: wrong arguments for tool 'add': a: 'two' is not of type 'integer'; "
        "arguments: 'b' is a required property",
        "error: Error executing tool fail: no ink",
        "error: tool 'wait' timed out after 0.05 s",
        "2",
    ]
    assert (rollout.metrics["malformed_calls"], rollout.metrics["tool_errors/fail"]) == (1, 1)
    assert last[-1].tool_failures == {"wait": 1}


async def test_a_servers_tools_have_their_own_names_or_names_that_a_tool_may_have(
    no_leaks: None, caplog: pytest.LogCaptureFixture
) -> None:
    script = calls(("note", {"text": "x"}), ("count.all/notes", {}), ("read_first_note", {}))
    with caplog.at_level(logging.WARNING, "agentgym"):
        rollout = await played(desk(command=[*COMMAND, "named"]), script)  # warned about once per server, so it is new
    assert told(rollout) == ["x", "1", "x"]
    assert "no tool may be called 'read first note', so the model reads the name 'read_first_note'" in caplog.text


async def test_images_in_results_are_shown_to_a_vision_model(no_leaks: None) -> None:
    seeing = Seeing(Scripted([calls(("photo", {}), ("picture", {}), ("note", {"text": "x"})), say("done")]))
    rollout = await ag.rollout(desk(), TASK, seeing)
    assert rollout.error is None
    photo, torn, note = told(rollout)
    assert photo == [{"type": "text", "text": "a desk"}, ag.Image(PNG).part]  # type: ignore[comparison-overlap]
    assert torn.startswith("[image/png, not shown: data: starts with b'pixels'")
    assert note == "x"


async def test_images_in_results_are_named_if_disabled_and_refused_by_a_text_model() -> None:
    named = await played(desk(images=False), call("photo"))
    assert told(named) == ["a desk\n[image/png, not shown]"]
    refused = await played(desk(), call("photo"))
    assert "contains an image, but this engine supports only text" in str(refused.error)
    with pytest.raises(ValueError, match=r"^images: must be True or False, got 'no'"):
        ag.MCP(command=COMMAND, images="no")  # type: ignore[arg-type]


async def test_a_pattern_with_look_ahead_is_left_to_the_server_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = calls(("lock", {"word": "oak7"}), ("lock", {"word": "oak"}), ("lock", {"word": "oak7", "times": "x"}))
    for _ in range(2):
        rollout = await played(desk(command=[*COMMAND, "unsaid"]), tries)  # warned about once per name, so it is new
        assert rollout.error is None
        sound, refused, wrong = told(rollout)
        assert (sound, refused) == ("locked", "error: Error executing tool lock: oak has no digit")
        assert wrong.startswith("error: wrong arguments for tool 'lock': times: 'x' is not of type 'integer'")
    assert [line for line in caplog.messages if "pattern" in line] == [
        f"the MCP server {sys.executable} {SCRIPT} unsaid: tool 'lock': the pattern of word can't be matched in linear "
        "time; it is checked only by the server, not here"
    ]
    (shown,) = [tool for tool in last[-1].tools if tool["function"]["name"] == "lock"]
    assert shown["function"]["parameters"]["properties"]["word"]["pattern"] == r"^(?=.*\d)\w+$"


async def test_over_http_all_rollouts_share_a_session_and_its_end_is_a_failed_call(http_server: str) -> None:
    async with ag.MCP(
        url=http_server, headers={"X-Desk": "1"}, prefix="desk_", timeout_s=3600, open_timeout_s=3600
    ) as shared:
        env = desk(shared)
        rollouts = await asyncio.gather(*(played(env, call("desk_note", text="x")) for _ in range(3)))
        assert sorted(told(rollout)[0] for rollout in rollouts) == ["x", "x x", "x x x"]
        ending = await played(env, call("desk_die"), call("desk_add", a=1, b=1))
    assert told(ending)[0].startswith("error: tool 'desk_die' failed: ServerEnded: the MCP server http://127.0.0.1:")
    assert ending.failure is not None


async def test_a_server_that_dies_fails_the_call_then_the_rollout_and_is_then_reopened(
    no_leaks: None,
) -> None:
    server = ag.MCP(command=COMMAND, names=["note", "add", "die"], parallel=True, timeout_s=3600, open_timeout_s=3600)
    env = desk(server)
    rollout = await played(env, call("die"), call("add", a=1, b=1))
    assert told(rollout)[0].startswith("error: tool 'die' failed: ServerEnded: the MCP server ")
    assert last[-1].tool_failures == {"die": 1}
    assert rollout.failure is not None
    assert (rollout.failure.type, rollout.reward) == ("EnvError", None)
    assert rollout.failure.message.endswith("mcp_script.py has ended")
    assert told(await played(env, calls(("add", {"a": 1, "b": 1}), ("note", {"text": "x"})))) == ["2", "x"]
    tools = {tool.name: tool for tool in await server.open()}
    assert list(tools) == ["add", "note", "die"]
    assert (tools["add"].description, tools["add"].parallel) == ("Add two numbers.", True)
    server.names = ["subtract"]
    with pytest.raises(
        EnvError, match=r"names: 'subtract' is not a tool of .* its tools are add, note, count.all/notes,"
    ):
        await server.open()
    await server.close()
    with pytest.raises(EnvError, match=r"mcp_script\.py has been closed"):
        await tools["add"].call(a=1, b=2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": ["no-such-program"]}, "the MCP server no-such-program did not open: FileNotFoundError"),
        ({"command": [sys.executable, "-c", ""]}, "did not open: MCPError"),
        ({"command": MUTE, "open_timeout_s": 0.2}, "did not open: no tool list after 0.2 s"),
    ],
)
async def test_a_server_that_fails_to_open_fails_the_rollout(
    settings: dict[str, Any], said: str, no_leaks: None
) -> None:
    rollout = await played(desk(**settings), call("add", a=1, b=1))
    assert (rollout.reward, rollout.metrics["turns"]) == (None, 0)
    assert rollout.failure is not None
    assert said in rollout.failure.message


async def test_a_cancelled_rollout_ends_its_server(no_leaks: None) -> None:
    env = desk()
    running = asyncio.create_task(played(env, call("wait")))
    await env.waits.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_session_that_is_closed_while_opening_ends_its_server(no_leaks: None) -> None:
    server = ag.MCP(command=MUTE)
    opening = asyncio.create_task(server.open())
    await asyncio.sleep(0)
    await server.close()
    with pytest.raises(EnvError, match="was closed before it had opened"):
        await opening


def test_an_unclosed_session_ends_with_its_event_loop(no_leaks: None) -> None:
    server = ag.MCP(command=COMMAND, timeout_s=3600, open_timeout_s=3600)
    assert told(asyncio.run(played(desk(server), call("note", text="x")))) == ["x"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "command, url: pass exactly one of them"),
        ({"command": ["x"], "url": "http://x"}, "command, url: pass exactly one of them"),
        ({"command": "uvx server"}, "command: must be a list"),
        ({"command": []}, "command: must be a list"),
        ({"url": "localhost:8000"}, "url: must begin with http"),
        ({"url": "http://x", "env": {}}, "env: only applies to a command"),
        ({"command": ["x"], "headers": {}}, "headers: only apply to a url"),
        ({"command": ["x"], "timeout_s": 0}, "timeout_s: must be positive"),
        ({"command": ["x"], "open_timeout_s": -1}, "open_timeout_s: must be positive"),
    ],
)
def test_conflicting_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="^" + said):
        ag.MCP(**given)


def test_names_must_be_a_list() -> None:
    with pytest.raises(TypeError, match="names: must be a list of names"):
        ag.MCP(command=["x"], names="add")


def test_the_repr_contains_no_secret_of_the_url() -> None:
    assert repr(ag.MCP(url="https://user:key@host:99/mcp?token=1")) == "<MCP https://host:99/mcp>"
