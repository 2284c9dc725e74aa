"""Environments of OpenEnv servers as tool envs; each rollout is one session of the server."""

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, ClassVar

from pydantic import Field, JsonValue

from agentgym.environments.parameters import Parameter
from agentgym.environments.rewards import reward
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import EnvError, ToolError
from agentgym.errors.extras import needs_extra
from agentgym.errors.tracebacks import describe
from agentgym.tools.dynamic import DynamicTool
from agentgym.tools.tool import Stop
from agentgym.types.messages import Message, joined
from agentgym.types.task import Task

ACT = "act"
"""Name of the tool that takes a step, for environments that have no tools."""
_OURS = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""Error codes of the server for errors that the model's action may cause."""


class OpenEnvTask(Task):
    """One start of an OpenEnv environment, with the arguments of its `reset`, such as a seed."""

    reset: dict[str, JsonValue] = Field(default_factory=dict)


class OpenEnvToolEnv(ToolEnv[OpenEnvTask]):
    """An env backed by an environment of an OpenEnv server; the reward is the sum of the server's rewards.

    If the environment lists MCP tools, the model gets these. Otherwise it gets the single tool `act`, whose arguments
    are the fields of the environment's action. The first observation is appended to the task's prompt, and the
    rollout ends with the server's `done`. A subclass may override `describe` to change how observations read.
    """

    url = Parameter("", doc="the address of the OpenEnv server, such as http://127.0.0.1:8000")
    timeout_s: ClassVar[float] = 60.0
    """Maximum seconds that the server may take for one response."""

    def __init__(self, task: OpenEnvTask) -> None:
        super().__init__(task)
        with needs_extra():
            from openenv.core import GenericEnvClient
        if not self.url:
            raise ValueError("url: empty; set the server's address, as in `OpenEnvToolEnv.configured(url=...)`")
        self.client = GenericEnvClient(base_url=self.url, message_timeout_s=self.timeout_s)
        self.total = 0.0
        self._first = ""

    def describe(self, observation: Any) -> str:
        """Return an observation as the model reads it: text unchanged, anything else as JSON."""
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)

    async def setup(self) -> None:
        await self.client.connect()
        answer = await self.client.reset(**self.task.reset)
        self._first = self._seen(answer)

    async def extra_tools(self) -> Sequence[DynamicTool]:
        action = await asyncio.to_thread(_action_schema, self.url)
        if "tool_name" in action["properties"]:
            listed = (await self.client.step({"type": "list_tools"})).observation["tools"]
            return [
                self._tool(
                    made["name"], made.get("description") or "", made["input_schema"], partial(_call, made["name"])
                )
                for made in listed
            ]
        properties = {name: field for name, field in action["properties"].items() if name != "metadata"}
        description = action.get("description") or "Take one step."
        return [self._tool(ACT, description, {**action, "properties": properties}, dict)]

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        messages, info = await super().reset(seed=seed, options=options)
        # Appended to the last message, because many templates reject two user messages in a row.
        messages[-1]["content"] = joined([messages[-1]["content"], self._first], "\n\n")
        return messages, info

    def _tool(self, name: str, description: str, parameters: Any, action: Any) -> DynamicTool:
        async def called(**arguments: Any) -> str | Stop:
            return await self._step(action(**arguments))

        return DynamicTool(name, description, parameters, called, timeout_s=self.timeout_s + 10)

    async def _step(self, action: dict[str, Any]) -> str | Stop:
        try:
            answer = await self.client.step(action)
        except Exception as error:
            # Input that the server couldn't use is the model's error.
            if isinstance(error, RuntimeError) and any(f"(code: {code})" in str(error) for code in _OURS):
                raise ToolError(str(error).removeprefix("Server error: ")) from error
            raise EnvError(f"the OpenEnv server {self.url}: {describe(error)}") from error
        self.total += float(answer.reward or 0.0)
        seen = self._seen(answer)
        return Stop("done", seen) if answer.done else seen

    def _seen(self, answer: Any) -> str:
        # Later versions of the server also send this field; if empty, it tells the model nothing.
        observation = {name: field for name, field in answer.observation.items() if name != "metadata" or field}
        if observation.get("error") and "tool_name" in observation:
            raise ToolError(observation["error"]["message"])
        return self.describe(observation["result"] if "tool_name" in observation else observation)

    @reward
    def openenv_return(self) -> float:
        """Return the sum of the server's rewards."""
        return self.total

    async def close(self) -> None:
        await self.client.close()


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


@cache
def _action_schema(url: str) -> dict[str, Any]:
    """Return the JSON schema of the environment's action."""
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=60) as answer:
        schema: dict[str, Any] = json.load(answer)["action"]
    return {"properties": {}, **schema}
