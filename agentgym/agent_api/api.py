"""The API through which an agent queries the policy: its routes, its key, and the handling of each request."""

import asyncio
import hmac
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from agentgym.agent_api import anthropic_messages, chat_completions
from agentgym.agent_api.fields import read_object
from agentgym.agent_api.http import HttpAnswer, HttpRequest
from agentgym.agent_api.large_requests import LargeRequests
from agentgym.agent_api.requests import AgentAnswer, AgentRequest, LimitError, Policy, RefusedError
from agentgym.errors.tracebacks import describe

log = logging.getLogger(__name__)

MODEL = "policy"
"""The only model name that the API lists. A request that names any other model is answered by the policy, too."""
_ROUTES = {"/v1/chat/completions": "POST", "/v1/messages": "POST", "/v1/messages/count_tokens": "POST"}
_RESPONSES = "/v1/responses"
_NO_RESPONSES = (
    "OpenAI's Responses API is not supported; set the agent to chat completions (POST /v1/chat/completions): "
    'use_responses_api=False in LangChain, set_default_openai_api("chat_completions") in the OpenAI Agents SDK, '
    'wire_api = "chat" in a Codex that still has it'
)
_MODEL = {
    "id": MODEL,
    "object": "model",
    "type": "model",
    "created": 0,
    "created_at": "1970-01-01T00:00:00Z",
    "owned_by": "agentgym",
    "display_name": MODEL,
}
"""The description of the model in the responses of /v1/models, with the fields of both APIs."""
MAX_WARNED = 20
"""Maximum number of ignored settings to warn about per env. There must be a limit, because the code in the sandbox
chooses the settings' names.
"""
_warned: dict[str, set[str]] = {}
_BYTES = 4
"""Estimated bytes of a response per sampled id, to decide whether to build the response in a thread."""


class AgentApi:
    """The API of one rollout. Its key gives access to that rollout's policy only.

    The API supports OpenAI's chat completions and Anthropic's messages. It tells clients not to retry a refused
    request.
    """

    def __init__(self, policy: Policy, key: str, name: str) -> None:
        self._policy, self._key, self._name = policy, key, name
        self.answered = self.refused = 0
        self.refusal: RefusedError | None = None
        """The error with which the last request was refused, or None if that request was answered."""
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = loop.create_future()
        """Name of the limit that ended the rollout, such as "turns". It is set when a request is refused because of the
        limit.
        """
        self.failed: asyncio.Future[BaseException] = loop.create_future()
        """The first error that isn't a RefusedError, such as an EngineError of the policy. It makes the rollout fail.
        """
        self._large = LargeRequests()

    async def handle(self, request: HttpRequest) -> HttpAnswer:
        """Respond to a request. Every error becomes a response in the format of the request's API."""
        path = request.path.rstrip("/")
        speaks_anthropic = path.startswith("/v1/messages") or "anthropic-version" in request.headers
        api = anthropic_messages if speaks_anthropic else chat_completions
        try:
            self._check_key(request.headers)
            return await self._answer(request, path, api)
        except RefusedError as error:
            self._note(error)
            return _refused(error, api)
        except Exception as error:
            if not self.failed.done():
                self.failed.set_result(error)
            return _refused(RefusedError("the rollout has failed", status=500, kind="failed"), api)

    async def _answer(self, request: HttpRequest, path: str, api: ModuleType) -> HttpAnswer:
        if request.method == "GET" and path in ("/v1/models", f"/v1/models/{MODEL}"):
            return _json(200, _MODEL if path.endswith(MODEL) else _models())
        if path == _RESPONSES or path.startswith(f"{_RESPONSES}/"):
            raise RefusedError(_NO_RESPONSES, status=404, kind="not_found")
        if path not in _ROUTES:
            known = ", ".join([*_ROUTES, "/v1/models"])
            raise RefusedError(f"no such path: {request.path}; the paths are {known}", status=404, kind="not_found")
        if request.method != _ROUTES[path]:
            raise RefusedError(f"{request.method}: use POST for {path}", status=405)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RefusedError("content-encoding: must be identity", status=415)
        counts = path.endswith("/count_tokens")
        asked = await self._large.work(len(request.body), lambda: _read(api, request.body, counts))
        if counts:
            return _json(200, {"input_tokens": await self._policy.count(asked)})
        for setting in asked.not_followed:
            _warn_of(self._name, setting)
        answer = await self._policy.answer(asked)
        self.answered += 1
        self.refusal = None
        return await self._large.work(_BYTES * answer.sampled_tokens, lambda: _written(api, asked, answer))

    def _check_key(self, headers: Mapping[str, str]) -> None:
        kind, _, token = headers.get("authorization", "").partition(" ")
        given = headers.get("x-api-key") or (token.strip() if kind.lower() == "bearer" else "")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise RefusedError(
                "the API key is not this rollout's; use the one in OPENAI_API_KEY or ANTHROPIC_API_KEY",
                status=401,
                kind="invalid_api_key",
            )

    def _note(self, error: RefusedError) -> None:
        self.refused += 1
        self.refusal = error
        if isinstance(error, LimitError) and error.is_final and not self.over.done():
            self.over.set_result(error.reason)


def _read(api: ModuleType, body: bytes, counts: bool) -> AgentRequest:
    """Parse a request's body. The code in the sandbox wrote it, so any error in parsing it becomes a RefusedError.

    Args:
        api: The module of the API that the request uses.
        body: The body.
        counts: Whether the request only asks for the number of tokens of its prompt.
    """
    try:
        said = read_object(body)
        read: AgentRequest = api.read(said, counts=True) if counts else api.read(said)
        return replace(read, size=len(body))
    except RefusedError:
        raise
    except Exception as error:
        log.warning("an agent's request cannot be read", exc_info=error)
        raise RefusedError(f"the request cannot be read: {describe(error)}") from error


def _written(api: ModuleType, asked: AgentRequest, answer: AgentAnswer) -> HttpAnswer:
    """Build the response. An error here becomes a RefusedError, because it comes from what the policy wrote.

    The agent gets the error as its response, and the rollout continues.
    """
    try:
        if not asked.stream:
            return _json(200, api.written(asked, answer))
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        return HttpAnswer(status=200, body=api.events(asked, answer), headers=headers)
    except Exception as error:
        log.warning("a response to an agent cannot be written", exc_info=error)
        raise RefusedError(
            f"the response cannot be written: {describe(error)}", status=500, kind="unwritten"
        ) from error


def _models() -> dict[str, Any]:
    return {"object": "list", "data": [_MODEL], "has_more": False, "first_id": MODEL, "last_id": MODEL}


def _refused(error: RefusedError, api: ModuleType) -> HttpAnswer:
    return _json(error.status, api.error(error), {"x-should-retry": "false"})


def _json(status: int, said: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> HttpAnswer:
    body = json.dumps(said, ensure_ascii=False).encode("utf-8", "backslashreplace")
    return HttpAnswer(status=status, body=body, headers={"content-type": "application/json", **(headers or {})})


def _warn_of(name: str, setting: str) -> None:
    """Warn that a setting is ignored: once per env and setting, and for at most MAX_WARNED settings per env."""
    warned = _warned.setdefault(name, set())
    if setting in warned or len(warned) == MAX_WARNED:
        return
    warned.add(setting)
    log.warning("%s: its agent sends %.80r, which is ignored: the run's own sampling settings apply", name, setting)
