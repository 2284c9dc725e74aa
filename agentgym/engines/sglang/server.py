"""One SGLang server: sends requests to its endpoints and validates the responses."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from agentgym.engines.sglang.answers import (
    ServerFacts,
    completion_of,
    field_of,
    first_of,
    reason_of,
    scores_of,
    server_facts,
)
from agentgym.engines.sglang.http import Answer, JsonClient, encoded
from agentgym.engines.sglang.launching.process import ServerProcess, readiness
from agentgym.engines.sglang.policies.payloads import Payload, PolicyVersion, Receiver
from agentgym.engines.sglang.prompts import Prompt
from agentgym.errors import EngineError, WireError
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling

_CONTROL_S = 60.0
"""Timeout, in seconds, of a request that samples nothing."""
_LOAD_S = 600.0
"""Timeout, in seconds, of a request that loads or unloads an adapter, pushes weights, or releases or reclaims memory.
Before a server unloads an adapter, it waits for the last request that uses the adapter.
"""
_SCORED_AT_ONCE = 64
"""Maximum number of ids that one request scores by sampling, once for each id."""
_IDLE_S = 0.05
"""Seconds between two checks of whether a server is idle."""
_AGAIN_S = 0.5
"""Seconds between two checks of whether a server samples."""
SPLIT_ADAPTERS = (0, 5, 17)
"""The first version of SGLang in which each process of a server gets its own copy of an adapter."""
_COME_BACK = (429, 502, 503, 504)
"""HTTP statuses after which the same request may succeed later. A server or a gateway in front of it returns them."""


class Ask(NamedTuple):
    """One request to sample ids."""

    prompt: Prompt
    rid: str
    max_tokens: int
    sampling: Sampling
    seed: int
    stop_ids: tuple[int, ...]
    policy: PolicyVersion

    def body(self) -> tuple[bytes | bytearray, ...]:
        """Return the parts of the body of POST /generate.

        The body has all settings that change the distribution that is sampled from.
        """
        lora = "null" if self.policy.lora is None else f'"{self.policy.lora}"'
        settings = (
            f'],"return_logprob":true,"rid":"{self.rid}","lora_path":{lora},'
            f'"sampling_params":{{{_written(self.sampling, self.stop_ids)},'
            f'"max_new_tokens":{self.max_tokens},"sampling_seed":{self.seed % (1 << 63)}}}}}'
        )
        return b'{"input_ids":[', self.prompt.text, settings.encode()


class Unavailable(EngineError):
    """Raised if a server fails to respond to a request. Another server may succeed."""


class NoServer(EngineError):
    """Raised if no server is left to try: each is lost, or has already failed the request."""


class Busy(Unavailable):
    """Raised if a server reports that it can't serve a request now. It may serve it later."""


class Server:
    """Client of one server's endpoints.

    Methods raise ConnectionError if the server can't be reached, Busy if it reports that it can't serve now, and
    Unavailable if it fails. They raise EngineError for every other refusal, and for a response with an invalid
    format.
    """

    def __init__(self, url: str, process: ServerProcess | None = None, *, api_key: str | None = None) -> None:
        self.client, self.process, self._api_key = JsonClient(url, api_key=api_key), process, api_key
        self.alive = True
        self.paused = False
        """Whether the server was paused and hasn't been resumed since."""
        self.adapters: set[str] = set()
        """Names of the adapters that this client had the server load, and that may still be loaded."""
        self.receiver = Receiver()
        """The format of uploads to the server."""
        self._loaded: set[str] = set()
        self._weights: str | None = ""
        """Name of the weights that were pushed last; empty for the model's original ones. None if it is unknown,
        because a push failed midway or the server may have been restarted.
        """
        self._first_weights: str | None = None

    def __repr__(self) -> str:
        return self.client.url

    @property
    def ended(self) -> bool:
        """Whether this is a launched server that has ended for good, with no restarts left."""
        return self.process is not None and self.process.ended and not self.process.restarts_left

    def move(self, url: str) -> None:
        """Switch to a server at another URL, which was started to replace this one."""
        self.client.close()
        self.client = JsonClient(url, api_key=self._api_key)
        self.forget()

    def forget(self) -> None:
        """Record that the server was restarted. It then has its model's original weights and no adapters."""
        self.adapters.clear()
        self._loaded.clear()
        self._weights, self.paused = "", False

    def doubt(self) -> None:
        """Record that the server may have been restarted, because it was unreachable.

        Which policies it has is then unknown, and must be asked again.
        """
        self._loaded.clear()
        self._weights = None

    async def facts(self) -> ServerFacts:
        """Return the settings that the server reports."""
        answer = await self._wired(self.client.get("/server_info", timeout_s=_CONTROL_S))
        if answer.status == 404:
            raise EngineError(f"{self}: has no /server_info, so it is not an SGLang server; check the URL")
        info = self._checked("/server_info", answer)
        facts = server_facts(info, str(self))
        self._first_weights = facts.weight_version
        self.receiver = Receiver(facts.tp, shares_adapters=() < facts.version < SPLIT_ADAPTERS)
        return facts

    async def ready(self, timeout_s: float) -> int | None:
        """Return the HTTP status of `readiness`, or None if there is no response."""
        try:
            return await readiness(self.client, timeout_s)
        except (ConnectionError, WireError):
            return None

    async def responds(self, timeout_s: float) -> bool:
        """Return whether the server's HTTP part responds, even if it is paused or has no /ready."""
        try:
            await self.client.get("/ready", timeout_s=timeout_s)
        except (ConnectionError, WireError):
            return False
        return True

    async def samples(self, timeout_s: float) -> bool:
        """Return whether the server can sample one id within `timeout_s` seconds.

        The scheduler may hang while the HTTP part still responds. A server that doesn't have this health check counts
        as sampling.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (await self.client.get("/health_generate")).status not in (200, 404):  # noqa: ASYNC110
                    await asyncio.sleep(_AGAIN_S)
        except (TimeoutError, ConnectionError, WireError):
            return False
        return True

    async def generate(self, ask: Ask) -> Completion:
        """Return the ids that the server sampled. If the request is aborted, these are the ids before the abort."""
        try:
            answer = await self.client.post_parts("/generate", *ask.body())
        except WireError as error:
            raise EngineError(f"{self}: {error}") from error
        body = answer.body if answer.status == 200 else self._checked("/generate", answer)
        # With an adapter, the reported name of the weights is that of the base weights, not of the policy.
        named = ask.policy.lora is None
        return completion_of(body, ask.policy.version, named=named, ours=self._first_weights)

    async def score(self, token_ids: Sequence[int], sampling: Sampling, policy: PolicyVersion) -> Floats:
        """Return the log-probability of each id except the first, with the value that `generate` would report."""
        if sampling.temperature in (0.0, 1.0):
            return await self._score_prompt(token_ids, policy)
        # The server applies the temperature to the log-probabilities of sampled positions, but never to those of a
        # prompt.
        starts = range(1, len(token_ids), _SCORED_AT_ONCE)
        parts = [await self._score_draws(token_ids, start, sampling, policy) for start in starts]
        return np.concatenate(parts)

    async def _score_prompt(self, token_ids: Sequence[int], policy: PolicyVersion) -> Floats:
        payload = {
            "input_ids": list(token_ids),
            "sampling_params": _sampling(Sampling()) | {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": policy.lora,
        }
        body = await self._post("/generate", payload, None)
        rows = field_of(body, "meta_info", "input_token_logprobs")
        return scores_of(rows[1:], token_ids[1:], of_prompt=True)

    async def _score_draws(
        self, token_ids: Sequence[int], start: int, sampling: Sampling, policy: PolicyVersion
    ) -> Floats:
        """Score the ids from index `start` on, at most `_SCORED_AT_ONCE` of them.

        The server samples one id after each prefix, and also reports the log-probability of the id that follows in
        `token_ids`.
        """
        ends = range(start, min(start + _SCORED_AT_ONCE, len(token_ids)))
        payload = {
            "input_ids": [list(token_ids[:end]) for end in ends],
            "sampling_params": _sampling(sampling) | {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [[int(token_ids[end])] for end in ends],
            "lora_path": policy.lora,
        }
        bodies = await self._post("/generate", payload, None)
        if not isinstance(bodies, list) or len(bodies) != len(ends):
            raise EngineError(
                f"{self}: must return a list of {len(ends)} responses, one for each prompt, got {str(bodies)[:200]}"
            )
        rows = [field_of(body, "meta_info", "output_token_ids_logprobs") for body in bodies]
        return scores_of([first_of(row) for row in rows], [token_ids[end] for end in ends])

    async def abort(self, rid: str) -> None:
        """Abort one request. A request id that the server doesn't know is ignored."""
        await self._post("/abort_request", {"rid": rid})

    async def pause(self) -> None:
        """Stop sampling. Running requests keep their state and KV, and new requests wait."""
        self.paused = True
        await self._post("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Continue sampling after `pause`."""
        await self._post("/continue_generation", {})
        self.paused = False

    async def load(self, policy: PolicyVersion, payload: Payload | None) -> None:
        """Load a policy into the server.

        This does nothing if the server already has the policy, or if `payload` is None because it needs no upload.

        Raises:
            ValueError: If the policy doesn't fit the server's model or settings.
        """
        if payload is None or self.holds(policy):
            return
        if policy.lora is None:
            await self._load_weights(policy, payload)
            return
        # Recorded before the request: if the connection breaks, it is unknown whether the server has loaded the
        # adapter.
        self.adapters.add(policy.lora)
        for path, body in payload.requests(self.receiver):
            self._taken(await self._try(path, body, _LOAD_S))
        self._loaded.add(policy.lora)

    async def _load_weights(self, policy: PolicyVersion, payload: Payload) -> None:
        """Replace the server's weights, with one request for each bucket of tensors."""
        await self.idle()
        self._weights = None
        begun = await self._try("/begin_weight_update", {}, _LOAD_S)
        has_sessions = begun.status != 404  # before SGLang 0.5.21, every request is a whole update
        if has_sessions:
            self._taken(begun)
        try:
            requests = payload.requests(self.receiver)
            while (request := await asyncio.to_thread(next, requests, None)) is not None:  # reads and packs
                self._taken(await self._try(*request, _LOAD_S))
        finally:
            if has_sessions:
                self._taken(await self._try("/end_weight_update", {}, _LOAD_S))
        await self.idle()
        self._weights = policy.weights

    async def idle(self) -> None:
        """Wait until the server samples nothing, and clear its KV cache.

        A request that has finished may still be in the scheduler. If the server is told to release its memory then,
        it crashes.

        Raises:
            ConnectionError: If this takes too long.
        """
        try:
            async with asyncio.timeout(_CONTROL_S):
                while (await self._try("/flush_cache", {}, _CONTROL_S)).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(_IDLE_S)
        except TimeoutError:
            raise ConnectionError(f"{self}: requests are still running after {_CONTROL_S:g} s") from None

    def _taken(self, answer: Answer) -> None:
        if answer.status in _COME_BACK:
            raise Busy(f"{self}: cannot load a policy now: {answer.status}: {reason_of(answer)}")
        if answer.status != 200:
            raise ValueError(f"adapter: {self} rejected it: {reason_of(answer)}")

    def holds(self, policy: PolicyVersion) -> bool:
        """Return whether the server can sample from a policy, as far as this client knows without asking."""
        return policy.lora in self._loaded if policy.lora is not None else policy.weights == self._weights

    async def pull(self, policy: PolicyVersion) -> bool:
        """Return whether the server has a policy that another client pushed. If it does, record this."""
        if policy.lora is None:
            if policy.weights and not await self._serves(policy.version):
                return False
            self._weights = policy.weights
            return True
        models = field_of((await self._wired(self.client.get("/v1/models", timeout_s=_CONTROL_S))).body, "data")
        if not any(model.get("id") == policy.lora for model in models):
            return False
        self._loaded.add(policy.lora)
        return True

    async def _serves(self, version: int) -> bool:
        """Return whether the weights that were last pushed to the server have this version.

        A server that doesn't report a version is assumed to have it.
        """
        answer = await self._wired(self.client.get("/model_info", timeout_s=_CONTROL_S))
        said = answer.body.get("weight_version") if isinstance(answer.body, dict) else None
        return said is None or str(said) == str(version)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release the GPU memory of the parts in `tags`. Nothing can be sampled until `resume_memory`."""
        await self.idle()
        self.paused = True
        await self._post("/release_memory_occupation", {"tags": list(tags)}, _LOAD_S)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Reclaim the GPU memory of the parts in `tags`."""
        await self._post("/resume_memory_occupation", {"tags": list(tags)}, _LOAD_S)
        self.paused = False

    async def unload(self, lora: str) -> None:
        """Unload an adapter once the last request that uses it has ended."""
        self._loaded.discard(lora)
        answer = await self._try("/unload_lora_adapter", {"lora_name": lora}, _LOAD_S)
        if answer.status not in _COME_BACK:
            self.adapters.discard(lora)  # unloaded now, or never loaded
        self._checked("/unload_lora_adapter", answer)

    async def close(self) -> None:
        """Close every connection. Pending requests fail with ConnectionError."""
        self.client.close()
        await asyncio.sleep(0)  # lets the transports close their sockets

    async def _post(self, path: str, payload: Mapping[str, Any] | bytes, timeout_s: float | None = _CONTROL_S) -> Any:
        return self._checked(path, await self._try(path, payload, timeout_s))

    async def _try(self, path: str, payload: Mapping[str, Any] | bytes, timeout_s: float | None) -> Answer:
        return await self._wired(self.client.post(path, payload, timeout_s=timeout_s))

    async def _wired(self, asking: Awaitable[Answer]) -> Answer:
        try:
            return await asking
        except WireError as error:
            raise EngineError(f"{self}: {error}") from error

    def _checked(self, path: str, answer: Answer) -> Any:
        if answer.status in _COME_BACK:
            raise Busy(f"{self}{path}: {answer.status}: {reason_of(answer)}")
        if answer.status >= 500:
            raise Unavailable(f"{self}{path}: {answer.status}: {reason_of(answer)}")
        if answer.status != 200:
            raise EngineError(f"{self}{path}: {answer.status}: {reason_of(answer)}")
        return answer.body


@lru_cache
def _written(sampling: Sampling, stop_ids: tuple[int, ...]) -> str:
    """Return the settings that all requests of a run share, encoded as the inside of a JSON object."""
    part: dict[str, Any] = {"top_p": sampling.top_p, "min_p": sampling.min_p}
    if sampling.top_k is not None:
        part["top_k"] = sampling.top_k
    if sampling.stop:
        part["stop"] = sampling.stop
    return encoded(_sampling(sampling) | part | {"stop_token_ids": stop_ids})[1:-1]


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Return the settings for sampling from the model's whole distribution at the given temperature.

    These are all settings that change the distribution. None is left out, because the server may otherwise use a
    default from the model's files.
    """
    plain = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    return plain | {"temperature": sampling.temperature, "frequency_penalty": 0.0, "presence_penalty": 0.0}
