"""Envs served as MCP servers, driven by the `mcp` package's own client and by ag.MCP."""

import asyncio
import base64
import json
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

import agentgym as ag
from agentgym.cli import main as cli
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import SandboxError
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.tools import DynamicTool
from envs.chase.env import Chase, ChaseTask
from tests.types.messages.pictures import GIF, PART, PNG, SHOWN, text_part

pytest.importorskip("mcp", reason="needs the extra agentgym-kit[mcp]")

from mcp import Client
from mcp.shared.exceptions import MCPError

from agentgym.bridges.mcp_server import OUTCOME, PATH, TASK, open_episode, serve_http

STARS = ChaseTask(
    id="t",
    prompt=(ag.Message(role="user", content="Start at key 31. What is the value?"),),
    store={"31": "see 52", "52": "value 17"},
    value=17,
)


class Judged(ag.ToolEnv[ag.Task]):
    """Rewards what a judge says."""

    @ag.reward
    async def judged(self) -> float:
        return float(await self.model("judge").ask(f"How good is {self.answer}?"))


class Offline(Judged):
    fallback_models: ClassVar = {"judge": Scripted([say("0.5")])}


async def test_an_episode_is_judged_by_the_fallback_model_or_fails_with_a_reason() -> None:
    task = ag.Task(id="t", prompt="Say a word.")
    async with open_episode(Offline, task) as episode, Client(episode.server) as client:
        await client.call_tool("answer", {"text": "noon"})
        assert episode.outcome is not None
        assert episode.outcome["rewards"] == {"judged": 0.5}
    async with open_episode(Judged, task) as episode, Client(episode.server) as client:
        failed = await client.call_tool("answer", {"text": "noon"})
        assert failed.is_error
        assert "there is no model 'judge'" in failed.content[0].text
        assert episode.outcome is not None
        assert episode.outcome["reward"] is None


@pytest.mark.parametrize("arguments", [{"text": 42}, {"text": 10**5000}, {"text": "noon", "more": [float("nan")]}])
async def test_arguments_that_no_model_writes_are_an_error_and_the_episode_continues(arguments: dict[str, Any]) -> None:
    task = ag.Task(id="t", prompt="Say a word.")
    async with open_episode(Offline, task) as episode:
        asked: Any = type("Asked", (), {"name": "answer", "arguments": arguments})
        refused = await episode._call_tool(None, asked)
        assert (refused.is_error, episode.outcome) == (True, None)
        assert refused.content[0].text.startswith(("text: must be text, got int", "arguments: must not contain NaN"))
        async with Client(episode.server) as client:
            await client.call_tool("answer", {"text": "noon"})
        assert episode.outcome is not None
        assert episode.outcome["reward"] == 0.5


class Camera(ag.ToolEnv[ag.Task]):
    """Returns pictures."""

    @ag.tool
    async def photo(self) -> list[str | ag.Image]:
        """Take a photo."""
        return ["a desk", ag.Image(PNG), ag.Image(GIF)]

    @ag.reward
    def right(self) -> float:
        return 1.0


async def test_a_tools_picture_is_an_image_in_its_result() -> None:
    task = ag.Task(id="t", prompt=["Photograph this:", ag.Image(PNG)])
    async with open_episode(Camera, task) as episode, Client(episode.server) as client:
        assert episode.server.instructions == f"Photograph this:\n{SHOWN}"
        assert await read(client, TASK) == [{"role": "user", "content": [text_part("Photograph this:"), PART]}]
        taken = await client.call_tool("photo", {})
        assert not taken.is_error
        text, png, gif = taken.content
        assert (text.type, text.text) == ("text", "a desk")
        assert (png.type, png.mime_type, base64.b64decode(png.data)) == ("image", "image/png", PNG)
        assert (gif.type, gif.mime_type, base64.b64decode(gif.data)) == ("image", "image/gif", GIF)


class Desk(ag.ToolEnv[ag.Task]):
    """Adds numbers; rewards the last sum if the answer names it."""

    limits = ag.Limits(turns=4)
    system = "You add."
    log: ClassVar[list[object]] = []

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=split, prompt="Add 2 and 3.")]

    @classmethod
    @asynccontextmanager
    async def open_resources(cls) -> AsyncIterator[str]:
        cls.log.append("opened")
        yield "shared"
        cls.log.append("closed for all")

    def __init__(self, task: ag.Task) -> None:
        super().__init__(task)
        self.sum = 0
        self.hangs = asyncio.Event()

    async def setup(self) -> None:
        self.log.append(asyncio.current_task())

    @ag.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.log.append(asyncio.current_task())
        self.sum = a + b
        return self.sum

    @ag.tool
    def done(self) -> ag.Stop:
        """End it."""
        return ag.Stop("enough", "good bye")

    @ag.tool
    async def lose(self) -> str:
        """Lose the sandbox."""
        raise SandboxError("the sandbox is gone")

    @ag.reward
    def right(self) -> float:
        return float(self.sum) if self.answer in (None, str(self.sum)) else 0.0

    async def close(self) -> None:
        self.log.append(asyncio.current_task())


@pytest.fixture(autouse=True)
def empty_log() -> None:
    Desk.log.clear()


def text(result: Any) -> str:
    return "|".join(block.text for block in result.content)


async def read(client: Any, uri: str = OUTCOME) -> Any:
    return json.loads((await client.read_resource(uri)).contents[0].text)


TASK_OF_DESK = ag.Task(id="t", prompt="Add 2 and 3.")


async def test_a_client_can_run_an_episode_from_task_to_reward(no_leaks: None) -> None:
    async with open_episode(Desk, TASK_OF_DESK) as made, Client(made.server) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert list(listed) == ["add", "done", "lose", "answer"]
        assert listed["add"].description == "Add two numbers."
        assert listed["add"].input_schema["required"] == ["a", "b"]
        assert made.server.instructions == "You add.\n\nAdd 2 and 3."
        assert [message["content"] for message in await read(client, TASK)] == ["You add.", "Add 2 and 3."]
        assert [str(found.uri) for found in (await client.list_resources()).resources] == [TASK, OUTCOME]
        assert text(await client.call_tool("add", {"a": 2, "b": 3})) == "5"
        assert await read(client) is None
        assert text(await client.call_tool("answer", {"text": "5"})) == ""
        outcome = await read(client)
        assert (outcome["reward"], outcome["rewards"], outcome["stop_reason"]) == (5.0, {"right": 5.0}, "answer")
        assert outcome["metrics"]["tool_calls"] == 1
        late = await client.call_tool("add", {"a": 1, "b": 1})
        assert (late.is_error, text(late)) == (True, f"the episode has ended; {OUTCOME} contains its outcome")


async def test_the_env_runs_in_one_task_and_is_closed_after_the_client_has_left() -> None:
    async with open_episode(Desk, TASK_OF_DESK) as made, Client(made.server) as client:
        await asyncio.gather(*(client.call_tool("add", {"a": number, "b": 1}) for number in range(3)))
        assert Desk.log[0] == "opened"
    assert Desk.log[-1] == "closed for all"
    assert len(Desk.log) == 7
    assert len(set(Desk.log[1:-1])) == 1


async def test_the_clients_mistakes_are_errors_that_it_can_read() -> None:
    async with open_episode(Desk, TASK_OF_DESK) as made, Client(made.server) as client:
        wrong = await client.call_tool("add", {"a": "x", "b": 1})
        assert wrong.is_error
        assert text(wrong).startswith("wrong arguments for tool 'add': a")
        with pytest.raises(MCPError, match="no tool 'sub'; the tools are add, answer, done, lose"):
            await client.call_tool("sub", {})
        with pytest.raises(MCPError, match=r"no resource 'agentgym://x'; the resources are"):
            await client.read_resource("agentgym://x")


async def test_a_stopping_tool_or_a_limit_ends_the_episode() -> None:
    async with open_episode(Desk, TASK_OF_DESK) as made, Client(made.server) as client:
        await client.call_tool("add", {"a": 2, "b": 2})
        assert text(await client.call_tool("done", {})) == "good bye"
        assert made.outcome is not None
        assert (made.outcome["reward"], made.outcome["stop_reason"]) == (4.0, "enough")
    async with open_episode(Desk, TASK_OF_DESK) as made, Client(made.server) as client:
        for number in range(4):
            await client.call_tool("add", {"a": number, "b": 0})
        assert (await read(client))["stop_reason"] == "turns"


async def test_an_episode_that_fails_has_no_reward() -> None:
    async with open_episode(Desk, TASK_OF_DESK) as made, Client(made.server) as client:
        failed = await client.call_tool("lose", {})
        assert (failed.is_error, text(failed)) == (True, "the episode has failed: SandboxError: the sandbox is gone")
        assert await read(client) == {"reward": None, "error": "SandboxError: the sandbox is gone"}


async def test_an_env_returns_its_sandbox(no_leaks: None) -> None:
    sandboxes = FakeSandboxPool()
    async with open_episode(Chase, STARS, sandboxes=sandboxes) as made, Client(made.server) as client:
        assert text(await client.call_tool("python", {"code": "get(31)"})) == "'see 52'"
        assert len(sandboxes.leased) == 1
    assert (len(sandboxes.made), len(sandboxes.leased)) == (1, 0)


async def test_an_env_that_cannot_be_served_is_refused() -> None:
    class Agent(ag.AgentEnv[ag.Task]):
        command = "true"

    with pytest.raises(ValueError, match=r"env: Agent is an ag\.AgentEnv"):
        async with open_episode(Agent, TASK_OF_DESK):
            raise AssertionError
    with pytest.raises(ValueError, match="answer: 'add' is a tool of the env; choose another name"):
        async with open_episode(Desk, TASK_OF_DESK, answer="add"):
            raise AssertionError
    assert Desk.log[-1] == "closed for all"


async def post(url: str, headers: dict[str, str]) -> None:
    """Send a request that no MCP client sends, as an unknown program that probes the port would."""
    asked = Request(url, b"{}", {"Content-Type": "application/json", **headers}, method="POST")
    await asyncio.to_thread(lambda: urlopen(asked).close())


async def test_http_clients_need_the_token_and_share_an_episode_until_the_server_ends(
    no_leaks: None,
) -> None:
    async with open_episode(Desk, TASK_OF_DESK) as made:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}{PATH}"
        serving = asyncio.create_task(serve_http(made, listener, token="s3cret"))
        with pytest.raises(Exception, match="403"):
            await post(url, {})
        for stranger in ("", "s3cre", "s3crett", "\xe9"):
            with pytest.raises(Exception, match="403"):
                await post(f"{url}?token={quote(stranger)}", {})
            with pytest.raises(Exception, match="403"):
                await post(url, {"Authorization": f"Bearer {stranger}"})
        with pytest.raises(Exception, match="403"):
            await post(f"{url}?token=s3cret", {"Authorization": "Bearer of another"})
        with pytest.raises(Exception, match=r"40[06]"):
            await post(url, {"Authorization": "Bearer s3cret"})
        url += "?token=s3cret"
        async with Client(url) as client:
            assert text(await client.call_tool("add", {"a": 2, "b": 3})) == "5"
        async with Client(url) as client:
            await client.call_tool("answer", {"text": "5"})
            assert (await read(client))["reward"] == 5.0
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
    assert Desk.log[-1] == "closed for all"


SERVED = """
import agentgym as ag


class Noted(ag.ToolEnv[ag.Task]):
    @classmethod
    def tasks(cls, split):
        return [ag.Task(id=split, prompt="Note something.")]

    @ag.tool
    def note(self, text: str) -> str:
        "Write a note."
        print("stdout is the protocol's")
        self.text = text
        return f"noted {text}"

    @ag.reward
    def written(self) -> float:
        return float(self.text == self.answer)

    async def close(self):
        open("closed", "w").close()
"""


async def test_the_command_serves_an_env_over_stdio_until_the_client_hangs_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noted.py").write_text(SERVED)
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "agentgym", "serve", "noted.py:Noted"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}

    class Client(ag.ToolEnv[ag.Task]):
        def __init__(self, task: ag.Task) -> None:
            super().__init__(task)
            self.server = ag.MCP(command=command, env=environment, timeout_s=3600, open_timeout_s=3600)

        async def extra_tools(self) -> Sequence[DynamicTool]:
            return await self.server.open()

        async def close(self) -> None:
            await self.server.close()

        @ag.reward
        def nothing(self) -> float:
            return 0.0

    script = [call("note", text="tea"), call("answer", text="tea"), say("done")]
    rollout = await ag.rollout(Client, TASK_OF_DESK, Scripted(script))
    said = [message["content"] for message in rollout.transcript()[0].messages if message["role"] == "tool"]
    assert said == ["noted tea", ""]
    assert (tmp_path / "closed").exists()


def test_an_unavailable_port_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "served.py").write_text(SERVED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "served.py:Noted", "--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"agentgym: --port: cannot listen on 127.0.0.1:{port} (")
    assert said.endswith("); choose another port, or 0 for a free one\n")
    assert cli.main(["serve", "served.py:Noted", "--port", "99999"]) == 1
    assert capsys.readouterr().err == "agentgym: --port: must be from 0 to 65535, got 99999; 0 picks a free one\n"
