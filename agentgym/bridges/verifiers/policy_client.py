"""The client of a verifiers environment, which answers with the policy in this process."""

import json
from functools import cache
from typing import Any

from agentgym.agent_api.api import AgentApi
from agentgym.agent_api.http import HttpRequest
from agentgym.agent_api.requests import LimitError
from agentgym.errors.extras import needs_extra

KEY = "in-process"
_HEADERS = {"authorization": f"Bearer {KEY}"}


@cache
def client_class() -> Any:
    """Return a verifiers client class that queries an AgentApi, created here because it needs the verifiers import."""
    with needs_extra():
        import verifiers
        from openai.types.chat import ChatCompletion
        from verifiers.clients import OpenAIChatCompletionsClient

    class PolicyClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
        """Queries the policy instead of an endpoint.

        `state` is the verifiers state of the rollout that this client serves, or None before the first request.
        """

        def __init__(self, api: AgentApi) -> None:
            super().__init__(api)
            self.state: Any = None

        async def get_native_response(
            self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, *, state: Any = None, **others: Any
        ) -> Any:
            self.state = self.state or state
            settings = {**sampling_args}
            extra = settings.pop("extra_body", None) or {}
            body = {"model": model, "messages": prompt, "tools": tools or [], **settings, **extra}
            answer = await self.client.handle(
                HttpRequest(
                    method="POST", path="/v1/chat/completions", headers=_HEADERS, body=json.dumps(body).encode()
                )
            )
            if answer.status == 200:
                return ChatCompletion.model_validate_json(answer.body)
            if isinstance(self.client.refusal, LimitError):
                # verifiers ends and scores the rollout on this error; any other error would lose the rollout.
                raise verifiers.OverlongPromptError(str(self.client.refusal))
            raise verifiers.ModelError(answer.body.decode())

        async def raise_from_native_response(self, response: Any) -> None:
            """Accept an empty turn, which is the policy's choice and not an error."""

        async def from_native_response(self, response: Any) -> Any:
            read = await super().from_native_response(response)
            if read.message.content is None and not read.message.tool_calls:
                read.message.content = ""
            return read

    return PolicyClient
