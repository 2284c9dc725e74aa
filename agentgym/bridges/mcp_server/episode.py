"""One episode of an env as an MCP server."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.shared.exceptions import MCPError

from agentgym.agent_api.env import AgentEnv
from agentgym.bridges.episode_player import EpisodePlayer
from agentgym.bridges.loop_thread import LoopThread
from agentgym.environments.env import Env
from agentgym.environments.mixture import member_of
from agentgym.environments.registry import find_env
from agentgym.environments.task_rows import as_task
from agentgym.errors.tracebacks import describe
from agentgym.sandboxes.protocol import SandboxPool, SandboxSpec
from agentgym.types.json_values import UNSOUND, is_sound
from agentgym.types.messages import Function, Message, ToolCall, image_of, is_image, parts_of, text_of
from agentgym.types.task import Task

OUTCOME = "agentgym://outcome"
"""The resource with the episode's result as JSON, which is `null` until the episode ends."""
TASK = "agentgym://task"
"""The resource with the episode's first messages as JSON."""
_OUTCOME = "The episode's reward, rewards by name, stop reason and metrics; null until the episode has ended."
_RESOURCES = {TASK: "The episode's first messages.", OUTCOME: _OUTCOME}


class EpisodeServer:
    """One episode of an env, and the MCP server of its tools: `server`, which the package `mcp` runs.

    In addition to the env's tools, there is a tool for text, `answer`: it passes to the env the text that a model would
    write without a tool call, which ends most episodes. The server's instructions are the episode's first messages,
    which are also the resource `agentgym://task`. When the episode has ended, `agentgym://outcome` contains the reward,
    and every further call returns an error. The env's limits on turns and seconds apply. The env's fallback models
    serve its model roles; if one is missing, or if the env requests a sub-agent, the episode fails with a message that
    says so.
    """

    def __init__(
        self, player: EpisodePlayer, thread: LoopThread, messages: list[Message], tools: Any, answer: str
    ) -> None:
        self._player, self._thread, self._answer = player, thread, answer
        self.messages = messages
        self._earned = 0.0
        self.outcome: dict[str, Any] | None = None
        """The episode's result, or None until its end."""
        if answer in (names := [tool["function"]["name"] for tool in tools]):
            raise ValueError(f"answer: {answer!r} is a tool of the env; choose another name")
        self._names = {*names, answer}
        functions = [*(tool["function"] for tool in tools), _answer_tool(answer)]
        self._tools = [
            types.Tool(name=tool["name"], description=tool.get("description"), input_schema=tool["parameters"])
            for tool in functions
        ]
        self.server: Any = Server(
            player.cls.__name__,
            instructions="\n\n".join(text_of(message["content"]) for message in messages),
            on_list_tools=self._list_tools,
            on_call_tool=self._call_tool,
            on_list_resources=self._list_resources,
            on_read_resource=self._read_resource,
        )

    async def _list_tools(self, context: Any, asked: Any) -> Any:
        return types.ListToolsResult(tools=self._tools)

    async def _list_resources(self, context: Any, asked: Any) -> Any:
        made = [
            types.Resource(name=uri.rpartition("/")[2], uri=uri, description=said, mime_type="application/json")
            for uri, said in _RESOURCES.items()
        ]
        return types.ListResourcesResult(resources=made)

    async def _read_resource(self, context: Any, asked: Any) -> Any:
        if asked.uri not in _RESOURCES:
            raise MCPError(
                types.INVALID_PARAMS, f"no resource {asked.uri!r}; the resources are {', '.join(_RESOURCES)}"
            )
        text = json.dumps(self.outcome if asked.uri == OUTCOME else self.messages, ensure_ascii=False)
        held = types.TextResourceContents(uri=asked.uri, mime_type="application/json", text=text)
        return types.ReadResourceResult(contents=[held])

    async def _call_tool(self, context: Any, asked: Any) -> Any:
        if asked.name not in self._names:
            raise MCPError(
                types.INVALID_PARAMS, f"no tool {asked.name!r}; the tools are {', '.join(sorted(self._names))}"
            )
        said, wrong = await self._thread.wait_for(lambda: self._step(asked.name, asked.arguments or {}))
        blocks = [_block(part) for content in said for part in parts_of(content) or [{"type": "text", "text": ""}]]
        return types.CallToolResult(content=blocks, is_error=wrong)

    async def _step(self, name: str, arguments: dict[str, Any]) -> tuple[list[Any], bool]:
        """Take one turn, and return the contents of the env's response and whether the call failed."""
        env = self._player.env
        if why_not := self._why_not(name, arguments):
            return [why_not], True
        if self.outcome is not None or env is None:
            return [f"the episode has ended; {OUTCOME} contains its outcome"], True
        failed = env.metrics.get("tool_errors", 0.0)
        try:
            messages, reward, terminated, truncated, info = await self._player.step(self._turn(name, arguments))
        except Exception as error:
            self.outcome = {"reward": None, "error": describe(error)}
            return [f"the episode has failed: {describe(error)}"], True
        self._earned += float(reward)
        if terminated or truncated:
            counted = {key: info[key] for key in ("rewards", "stop_reason", "metrics")}
            self.outcome = {"reward": self._earned, **counted}
        wrong = env.metrics.get("tool_errors", 0.0) > failed
        said = [message["content"] for message in messages]
        return [c.removeprefix("error: ") if wrong and isinstance(c, str) else c for c in said], wrong

    def _why_not(self, name: str, arguments: dict[str, Any]) -> str:
        """Return why a call can't be a turn (a model couldn't have written its arguments), or "" if it can."""
        if not is_sound(arguments):
            return f"arguments: {UNSOUND}"
        if name == self._answer and not isinstance(arguments.get("text", ""), str):
            return f"text: must be text, got {type(arguments['text']).__name__}"
        return ""

    def _turn(self, name: str, arguments: dict[str, Any]) -> Message:
        if name == self._answer:
            return Message(role="assistant", content=arguments.get("text", ""))
        called = ToolCall(type="function", function=Function(name=name, arguments=arguments))
        return Message(role="assistant", content="", tool_calls=[called])


def _block(part: Any) -> Any:
    """Return a part of a message's content as a content block of an MCP result."""
    if not is_image(part):
        return types.TextContent(type="text", text=part["text"])
    image = image_of(part)
    data = base64.b64encode(image.data).decode("ascii")
    return types.ImageContent(type="image", data=data, mime_type=image.mime_type)


def _answer_tool(name: str) -> dict[str, Any]:
    said = {"type": "string", "description": "The text to send."}
    parameters = {"type": "object", "properties": {"text": said}, "required": ["text"]}
    description = "Send text to whoever gave you the task, such as your answer. It may end the task."
    return {"name": name, "description": description, "parameters": parameters}


@asynccontextmanager
async def open_episode(
    env: str | type[Env[Any]],
    task: Task | dict[str, Any],
    *,
    seed: int = 0,
    spec: SandboxSpec | None = None,
    sandboxes: SandboxPool | None = None,
    answer: str = "answer",
) -> AsyncIterator[EpisodeServer]:
    """Open an episode of the task as an MCP server; when the block ends, its env is closed and its sandbox returned.

    Args:
        env: The env, as a class or a name.
        task: The task, or its fields.
        seed: The env's seed.
        spec: A sandbox that replaces the one the env declares; None uses the env's.
        sandboxes: An open pool of sandboxes; None opens a new one.
        answer: Name of the tool for text.

    Yields:
        The server of the episode.

    Raises:
        ValueError: If the env is an ag.AgentEnv, which runs its own agent program, or a tool is already named
            `answer`.
    """
    cls = find_env(env)
    made: Task = as_task(cls, task)
    if issubclass(member_of(cls, made), AgentEnv):
        raise ValueError(f"env: {cls.__name__} is an ag.AgentEnv, whose agent brings its own tools; serve another env")
    thread, player = LoopThread(), EpisodePlayer(cls, spec, sandboxes)
    try:
        messages, info = await thread.wait_for(lambda: player.reset(made, seed=seed, options=None))
        yield EpisodeServer(player, thread, messages, info["tools"], answer)
    finally:
        try:
            await thread.wait_for(player.close)
        finally:
            thread.close()
