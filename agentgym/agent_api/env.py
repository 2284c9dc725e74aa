"""Envs whose agent is a separate program. The env starts the program and serves the policy to it as a model."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from agentgym.agent_api.api import AgentApi
from agentgym.agent_api.requests import LimitError, Policy
from agentgym.environments.env import TaskT
from agentgym.environments.rewards import rewards_of
from agentgym.environments.tool_env import ToolEnv
from agentgym.errors import EnvError
from agentgym.sandboxes.protocol import ExecResult
from agentgym.sandboxes.protocol.programs import SandboxProcess, SandboxStream
from agentgym.tools.declarations import check_free, check_made, check_number
from agentgym.tools.tool import class_tools
from agentgym.types.messages import Message, first_image
from agentgym.types.rollout import StopReason

OUTPUT_KEPT = 64 << 10
"""Number of bytes that are kept from the end of the agent's standard output, and of its standard error."""
CRASHED = "crashed"
"""Stop reason of a rollout whose agent ended with a nonzero exit code."""


class AgentEnv(ToolEnv[TaskT]):
    """An env whose agent is a program that runs in its sandbox and queries the policy over OpenAI's or Anthropic's API.

    The program gets the API's address and the rollout's key in OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL
    and ANTHROPIC_API_KEY, and the task's prompt on its standard input. Every turn that the policy generates for it is
    trained with the reward of the `@ag.reward` methods, which are called when the program has ended.

    The sandbox needs a loopback (`network="loopback"` or `ag.Allow(...)`). `ag.Process(unsafe=True)` runs the program
    as your user on this machine.
    """

    command: ClassVar[str | Sequence[str]] = ()
    """The command that starts the agent: a shell command line, or a program and its arguments."""
    grace_s: ClassVar[float] = 10.0
    """Seconds that the agent has to end by itself after a request was refused because `turns` or `tokens` are used up.
    Then it is killed.
    """

    _counts = ("agent_requests", "agent_requests_refused")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__name__
        check_made(cls.command, str | Sequence, f"{name}.command", "text, or a list of words")
        check_number(f"{name}.grace_s", cls.grace_s)
        made: type = cls
        if tools := class_tools(made):
            raise ValueError(f"{name}: the agent brings its own tools and can't use {next(iter(tools))!r}; remove it")
        for reward in rewards_of(made):
            check_free(reward, frozenset({*dir(AgentEnv), "result"}), f"reward {reward!r} of {name}", "")
        if cls.context is not None:
            raise ValueError(f"{name}.context: the agent manages its own context; remove `context` from the class")
        if getattr(cls.sandbox_spec, "network", None) == "none":
            raise ValueError(
                f'{name}.sandbox_spec: the agent reaches its API over a loopback; give the sandbox network="loopback"'
            )

    def __init__(self, task: TaskT) -> None:
        super().__init__(task)
        self.result: ExecResult | None = None
        """How the agent ended, with the last 64 KiB of its standard output and of its standard error. None until it has
        ended.
        """

    def agent_command(self) -> str | Sequence[str]:
        """Return the command that starts the agent. Override this if the command depends on the task."""
        return self.command

    def agent_variables(self) -> Mapping[str, str]:
        """Return environment variables for the agent in addition to those of the API. By default, there are none."""
        return {}

    async def play(self, policy: Policy, prompt: Sequence[Message]) -> str:
        """Run the agent to its end, and return why the rollout stopped.

        Args:
            policy: The policy that answers the agent's requests.
            prompt: The task's prompt, which the agent gets as text on its standard input.

        Returns:
            The stop reason: a limit's name, "done", or "crashed".

        Raises:
            EnvError: If the agent ended without getting a response, the command is empty, or the prompt contains an
                image.
        """
        name, key = type(self).__name__, secrets.token_urlsafe(24)
        if (image := first_image(prompt)) is not None:
            raise EnvError(
                f"{name}: {image}: an agent gets its prompt as text; put the image into a file in its sandbox"
            )
        if not (command := self.agent_command()):
            raise EnvError(f"{name}.command: empty; set it, or override agent_command")
        from agentgym.agent_api.relay_link import listening  # imported late, so that h11 is loaded only to run an env

        api = AgentApi(policy, key, name)
        try:
            async with listening(self.sandbox, api.handle) as port:
                variables = {**_addresses(port, key), **self.agent_variables()}
                async with self.sandbox.start(command, env=variables) as process:
                    run = AgentRun(process, "\n\n".join(message["content"] for message in prompt))
                    try:
                        await run.end(api, self.grace_s)
                    finally:
                        self.result = run.result()
                        self.answer = self.result.stdout.strip()
        finally:
            self.metrics |= {"agent_requests": float(api.answered), "agent_requests_refused": float(api.refused)}
        if api.failed.done():
            raise api.failed.result()
        if not api.answered:
            raise EnvError(f"{name}: {_why_no_request(api, self.result)}")
        return _stop_reason(api, self.result)


def _addresses(port: int, key: str) -> dict[str, str]:
    """Return the environment variables from which clients take an API's address and key."""
    url = f"http://127.0.0.1:{port}"
    openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key}
    return openai | {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}


def _why_no_request(api: AgentApi, result: ExecResult) -> str:
    if api.refusal is not None:
        return f"the agent got no response; its last request was refused: {api.refusal}"
    said = result.text(500)
    return f"the agent ended with exit code {result.exit_code} and sent no request{f': {said}' if said else ''}"


def _stop_reason(api: AgentApi, result: ExecResult) -> str:
    if api.over.done():
        return api.over.result()
    if isinstance(api.refusal, LimitError):
        return api.refusal.reason
    return StopReason.DONE if result.ok else CRASHED


class AgentRun:
    """A running agent, with the asyncio tasks that write the prompt to its input and read its outputs."""

    def __init__(self, process: SandboxProcess, prompt: str) -> None:
        self._process, self._loop = process, asyncio.get_running_loop()
        self._start = self._loop.time()
        self._out, self._err = bytearray(), bytearray()
        self._cut = False
        self._tasks = [
            asyncio.create_task(self._give(prompt)),
            asyncio.create_task(self._read(process.stdout, self._out)),
            asyncio.create_task(self._read(process.stderr, self._err)),
        ]

    async def end(self, api: AgentApi, grace_s: float) -> None:
        """Wait for the agent to end.

        It is killed at once if the rollout fails. If a limit ends the rollout, the agent is killed after `grace_s`
        seconds.
        """
        exited: asyncio.Future[Any] = asyncio.create_task(self._process.wait())
        failed: asyncio.Future[Any] = api.failed
        over: asyncio.Future[Any] = api.over
        try:
            await asyncio.wait([exited, failed, over], return_when=asyncio.FIRST_COMPLETED)
            if not failed.done():
                await asyncio.wait([exited, failed], timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                await self._process.kill()
            await exited
            await asyncio.gather(*self._tasks)
        finally:
            for task in (exited, *self._tasks):
                task.cancel()

    def result(self) -> ExecResult:
        """Return how the agent ended. The status is "timeout" if it is still running and is being terminated."""
        code = self._process.exit_code
        status = "timeout" if code is None else "killed" if code < 0 else "ok" if code == 0 else "error"
        return ExecResult(
            status=status,  # type: ignore[arg-type]
            exit_code=-9 if code is None else code,
            stdout=self._out.decode("utf-8", "replace"),
            stderr=self._err.decode("utf-8", "replace"),
            truncated=self._cut,
            seconds=self._loop.time() - self._start,
        )

    async def _give(self, prompt: str) -> None:
        with suppress(BrokenPipeError):  # An agent need not read its input.
            await self._process.write(prompt)
            await self._process.close_stdin()

    async def _read(self, stream: SandboxStream, kept: bytearray) -> None:
        async for piece in stream:
            kept += piece
            if len(kept) > OUTPUT_KEPT:
                self._cut = True
                del kept[:-OUTPUT_KEPT]
