"""`ag.Endpoint`: any OpenAI-compatible chat endpoint as an engine for evaluation."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self
from urllib.parse import urlsplit

from agentgym.chat.formats import HERMES
from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.config_fields import Above0, Count, Name, Names, NotNegative, Positive, config
from agentgym.engines.endpoint.answers import completion_of, reasoning_field
from agentgym.engines.endpoint.requests import api_messages, prompt_messages, sampling_fields
from agentgym.engines.messages import NO_POLICY, MessageCompletion, Usage
from agentgym.errors import EngineError
from agentgym.errors.extras import needs_extra
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling
from agentgym.types.messages import Message
from agentgym.types.tool_names import SentNames
from agentgym.types.weights import Adapter

if TYPE_CHECKING:
    from agentgym.engines.endpoint.client import ChatClient

_EVALUATION = "an endpoint returns neither token ids nor log-probabilities, so it is only for evaluation"
_SHOWN = 100
"""Maximum length, in characters, of a setting's value that a model name shows. A longer value is replaced by its
digest.
"""


@config(frozen=True, eq=False)
class Endpoint:
    """A chat endpoint with OpenAI's API, for evaluation; training rejects it. Use it inside `async with`.

    ::

        async with ag.Endpoint("http://localhost:8000/v1", model="Qwen/Qwen3-0.6B") as engine:
            print(await ag.evaluate("my_env:Pointers", engine, n=64))

    Raises:
        ValueError: If the URL isn't a valid http or https URL with a host.
    """

    url: Name
    """The API's URL, including its path: https://api.openai.com/v1."""
    model: Name | None = field(default=None, kw_only=True)
    """The model's name at the endpoint. None: the only model that the endpoint serves."""
    api_key_env: Name | None = field(default=None, kw_only=True)
    """The environment variable that holds the API key; None if the endpoint needs no key."""
    tools: Literal["api", "prompt"] = field(default="api", kw_only=True)
    """How tools are described to the model: by the endpoint's tools API, or in the prompt, in the Hermes format."""
    concurrency: Positive = field(default=32, kw_only=True)
    """Maximum number of requests in flight. Waiting for a free slot doesn't count against the rollout's time limits."""
    timeout_s: Above0 = field(default=300.0, kw_only=True)
    """Timeout of one request, in seconds."""
    retries: Count = field(default=6, kw_only=True)
    """Maximum number of retries of a request, after status 408, 409, 425, 429 or 5xx, an invalid response, a timeout or
    a lost connection.
    """
    first_wait_s: Above0 = field(default=0.5, kw_only=True)
    """Seconds before the first retry, doubled for each further retry. The actual wait is a random time between half of
    the resulting time and all of it.
    """
    longest_wait_s: Above0 = field(default=60.0, kw_only=True)
    """Longest wait before a retry, in seconds. If the endpoint's Retry-After is longer, the request isn't retried."""
    context_tokens: Positive = field(default=131_072, kw_only=True)
    """Maximum number of tokens in one conversation. The env's own limit is often lower."""
    send_reasoning: bool = field(default=False, kw_only=True)
    """Whether to send back the reasoning of earlier turns, which some models require. Each turn then has the field,
    even if it is empty.
    """
    leave_out: Names = field(default=(), kw_only=True)
    """Request fields to leave out because the endpoint rejects them, such as "temperature" or "seed". Fields that the
    endpoint sent with a message or a call, and rejects if they are sent back, can also be listed.
    """
    extra_body: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Extra fields of each request, such as {"reasoning_effort": "low"}. They override fields with the same name."""
    prompt_price: NotNegative = field(default=0.0, kw_only=True)
    """Price of a million prompt tokens."""
    cached_price: NotNegative | None = field(default=None, kw_only=True)
    """Price of a million cached prompt tokens. None: the same as for other prompt tokens."""
    completion_price: NotNegative = field(default=0.0, kw_only=True)
    """Price of a million sampled tokens, including reasoning."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url: must begin with http:// or https://, got {self.url!r}")
        if (why := _why_no_url(self.url)) is not None:
            raise ValueError(f"url: {why}, got {self.url!r}")
        object.__setattr__(self, "_opened", _Opened())

    async def __aenter__(self) -> Self:
        with needs_extra():
            import openai  # noqa: F401
        from agentgym.engines.endpoint.client import ChatClient

        self._state.client = ChatClient(
            self.url,
            self._api_key(),
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
            retries=self.retries,
            first_wait_s=self.first_wait_s,
            longest_wait_s=self.longest_wait_s,
        )
        if self.model is None:
            self._state.model = await self._only_model(self._state.client)
        return self

    async def __aexit__(self, *_: object) -> None:
        client, self._state.client = self._state.client, None
        if client is not None:
            await client.close()

    async def _only_model(self, client: "ChatClient") -> str:
        try:
            names = await client.models()
            if len(names) != 1:
                listed = ", ".join(names[:10]) or "none"
                raise ValueError(f"model: {self.url} serves {listed}; set `model` to the one to use")
        except BaseException:
            await client.close()
            raise
        return names[0]

    def _api_key(self) -> str:
        if self.api_key_env is None:
            return "none"  # The openai package requires a key even if the endpoint doesn't.
        if not (key := os.environ.get(self.api_key_env, "").strip()):
            raise ValueError(f"api_key_env: the environment variable {self.api_key_env} is not set; set it to the key")
        return key

    @property
    def _state(self) -> "_Opened":
        state: _Opened = self.__dict__["_opened"]
        return state

    @property
    def model_name(self) -> str:
        """Identifies what is evaluated, for stored results and caches.

        It consists of the URL, the model's name if it is known, and each non-default setting that affects the output.
        The settings distinguish this endpoint from other endpoints with the same model.
        """
        return self._named(self.model or self._state.model)

    @property
    def name_as_given(self) -> str:
        """The `model_name` from the settings alone, without the name of a model that the endpoint reported."""
        return self._named(self.model)

    def _named(self, model: str | None) -> str:
        changed = [
            of for of in fields(self) if of.name not in _NOT_IN_ANSWERS and getattr(self, of.name) != _default(of)
        ]
        return " ".join(filter(None, [self.url, model, *(_setting(of.name, getattr(self, of.name)) for of in changed)]))

    async def fingerprint(self) -> dict[str, str]:
        """Return the served model's name under the key "served".

        The result is {} if the name is neither configured nor known from the endpoint yet.
        """
        served = self.model or self._state.model
        return {"served": served} if served else {}

    def unopened(self) -> "Endpoint":
        """Return a closed endpoint with the same settings, which can be sent to another process."""
        return replace(self, model=self.model or self._state.model)

    @property
    def usage(self) -> Usage:
        """Tokens and cost of all responses so far, including those of failed rollouts."""
        return self._state.usage

    @property
    def sent_again(self) -> int:
        """Number of retries since the engine was opened."""
        return 0 if self._state.client is None else self._state.client.sent_again

    @property
    def call_example(self) -> str:
        """A call as the model writes it, for the messages about malformed calls."""
        return HERMES.example if self.tools == "prompt" else _API_CALL

    async def generate_message(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        *,
        session: str,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> MessageCompletion:
        """Request one assistant message.

        Args:
            messages: The conversation so far.
            tools: JSON descriptions of the tools that the model may call.
            session: Name of the conversation, which is ignored.
            max_tokens: Maximum number of tokens in the reply.
            sampling: Sampling parameters.
            seed: Seed of the sampling.

        Returns:
            The reply. Its usage has the token counts that the endpoint reported, and the cost at the configured
            prices.

        Raises:
            EngineError: If the engine isn't open, the endpoint refuses the request, or all retries fail.
        """
        client = self._state.client
        if client is None:
            raise EngineError("the endpoint is not open: use it inside `async with`")
        names = SentNames(tools)
        sampled = sampling_fields(sampling, max_tokens=max_tokens, seed=seed)
        request = self._request(messages, tools, names, sampled)
        answer, retries = await client.ask(request)
        self._state.reasoning_field = reasoning_field(answer) or self._state.reasoning_field
        try:
            made = completion_of(answer, tools, in_prompt=self.tools == "prompt", names=names)
        except EngineError as error:
            error.sent_again = retries
            raise
        usage = replace(made.usage, cost=self._cost(made.usage), sent_again=retries)
        self._state.usage += usage
        return replace(made, usage=usage)

    def _request(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],
        names: SentNames,
        sampled: Mapping[str, Any],
    ) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self.model or self._state.model}
        field = self._state.reasoning_field if self.send_reasoning else None
        if self.tools == "prompt":
            request["messages"] = prompt_messages(messages, tools, reasoning=field, leave_out=self.leave_out)
        else:
            request["messages"] = api_messages(messages, names=names, reasoning=field, leave_out=self.leave_out)
            request |= {"tools": names.tools(tools)} if tools else {}
        request |= {name: value for name, value in sampled.items() if name not in self.leave_out}
        return request | dict(self.extra_body)

    def _cost(self, usage: Usage) -> float:
        cached_price = self.prompt_price if self.cached_price is None else self.cached_price
        priced = (usage.prompt_tokens - usage.cached_tokens) * self.prompt_price + usage.cached_tokens * cached_price
        priced += usage.completion_tokens * self.completion_price
        return 0.0 if usage.uncounted_requests else priced / 1_000_000

    @property
    def version(self) -> int:
        """Always `NO_POLICY`, because no trained policy samples the turns."""
        return NO_POLICY

    async def release(self, session: str) -> None:
        """Do nothing, because an endpoint has no sessions.

        Args:
            session: Ignored.
        """

    # Methods that only engines with token ids support

    @property
    def tokenizer(self) -> ChatTokenizer:
        """Raises EngineError, because the tokenizer is only on the endpoint's side."""
        _refuse("tokenizer")

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        """Raise EngineError, because an endpoint takes messages."""
        _refuse("generate")

    async def load_adapter(self, adapter: Adapter | None, *, version: int) -> None:
        """Raise EngineError, because an endpoint can't be trained."""
        _refuse("load_adapter")

    async def score(self, token_ids: Sequence[int], *, sampling: Sampling) -> Floats:
        """Raise EngineError, because an endpoint returns no log-probabilities."""
        _refuse("score")


_API_CALL = 'a call of the function NAME, with {"KEY": "VALUE"} as its arguments'
"""The example of a call if the API itself reads the calls: the model must not write them as text."""
_NOT_IN_ANSWERS = frozenset(
    {"url", "model", "api_key_env", "concurrency", "timeout_s", "retries", "first_wait_s", "longest_wait_s"}
    | {"prompt_price", "cached_price", "completion_price"}
)
"""Settings that `model_name` doesn't list as `name=value`. The name begins with the URL and the model, and the other
settings don't affect the output.
"""


def _default(of: "Field[Any]") -> Any:
    return of.default if of.default_factory is MISSING else of.default_factory()


def _setting(name: str, value: Any) -> str:
    """Return `name=value`, a part of `model_name`. A long value is replaced by its digest."""
    text = json.dumps(dict(value) if isinstance(value, Mapping) else value, sort_keys=True, default=str)
    return f"{name}={text if len(text) <= _SHOWN else hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _why_no_url(url: str) -> str | None:
    """Return what is wrong with the host or port of a URL, or None if both may be valid."""
    try:
        parts = urlsplit(url)
        return None if parts.hostname and parts.port != 0 else "must name a host"
    except ValueError as error:
        return str(error)


class _Opened:
    """The mutable state of an endpoint."""

    def __init__(self) -> None:
        self.client: ChatClient | None = None
        self.model: str | None = None
        """The name of the model that the endpoint serves, as it reported it; None if it wasn't asked."""
        self.usage = Usage()
        self.reasoning_field = "reasoning_content"
        """The field in which the endpoint sends reasoning, and in which it gets it back."""


def _refuse(what: str) -> NoReturn:
    raise EngineError(f"Endpoint.{what}: {_EVALUATION}; train and score with ag.TransformersEngine or SGLang")
