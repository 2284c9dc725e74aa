"""One SGLang server: its endpoints, and what it answers as checked values."""

import asyncio
import base64
import json
import pickle
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from agentgym.errors import EngineError, WireError
from agentgym.rollouts.http import Answer, JsonClient, encoded
from agentgym.rollouts.sglang_process import ServerProcess
from agentgym.rollouts.sglang_prompt import Prompt
from agentgym.types import Adapter, Completion, Floats, Sampling, Version

_CONTROL_S = 60.0
"""For a request that samples nothing."""
_LOAD_S = 600.0
"""For loading or unloading an adapter: unloading waits for the requests that use it."""
_SCORED_AT_ONCE = 64


class Policy(NamedTuple):
    """What new tokens are sampled from: the base, with an adapter on it where `lora` names one."""

    lora: str | None
    version: int
    adapter: Adapter | None = None


class ServerFacts(NamedTuple):
    """What a server said about itself."""

    context_tokens: int
    """Most ids of one request, prompt and completion together."""
    model: str
    seeded: bool
    """Whether draws depend on the seed and the request alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One stretch of ids to sample."""

    prompt: Prompt
    rid: str
    max_tokens: int
    sampling: Sampling
    seed: int
    stop_ids: tuple[int, ...]
    policy: Policy

    def body(self) -> bytes:
        """The body of POST /generate; whatever would change the distribution is said, not left to defaults."""
        lora = "null" if self.policy.lora is None else f'"{self.policy.lora}"'
        return (
            f'{{"input_ids":[{self.prompt.text}],"return_logprob":true,"rid":"{self.rid}","lora_path":{lora},'
            f'"sampling_params":{{{_written(self.sampling, self.stop_ids)},'
            f'"max_new_tokens":{self.max_tokens},"sampling_seed":{self.seed % (1 << 63)}}}}}'
        ).encode()


class Unavailable(EngineError):
    """This server cannot answer now; another one might."""


class Server:
    """One server's endpoints.

    Raises ConnectionError where the server is not reached, Unavailable where it answers that it cannot serve now,
    EngineError for every other refusal and for an answer that breaks its format.
    """

    def __init__(self, url: str, process: ServerProcess | None = None) -> None:
        self.client, self.process = JsonClient(url), process
        self.alive = True

    def __repr__(self) -> str:
        return self.client.url

    async def facts(self) -> ServerFacts:
        """What the server says of itself."""
        info = await self._get("/server_info")
        try:
            # A prompt must be shorter than this limit, so a whole request of one id less always fits.
            context = int(info["max_req_input_len"]) - 1
            return ServerFacts(context, str(info["model_path"]), bool(info.get("enable_deterministic_inference")))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self}/server_info: {type(error).__name__}: {error}") from None

    async def ready(self, timeout_s: float) -> bool:
        """Whether it takes requests now; a paused server does not."""
        try:
            return (await self.client.get("/ready", timeout_s=timeout_s)).status == 200
        except (ConnectionError, WireError):
            return False

    async def answers(self, timeout_s: float) -> bool:
        """Whether anybody answers at all."""
        try:
            await self.client.get("/ready", timeout_s=timeout_s)
        except (ConnectionError, WireError):
            return False
        return True

    async def generate(self, ask: Ask) -> Completion:
        """What it sampled; an aborted request answers with what it had."""
        body = await self._post("/generate", ask.body(), None)
        return completion_of(body, ask.policy.version)

    async def score(self, token_ids: Sequence[int], sampling: Sampling, policy: Policy) -> Floats:
        """Log-probability of each id but the first, as `generate` would report it."""
        if sampling.temperature in (0.0, 1.0):
            return await self._score_prompt(token_ids, policy)
        # A prompt's log-probabilities are never scaled by the temperature; a sampled position's are.
        starts = range(1, len(token_ids), _SCORED_AT_ONCE)
        parts = [await self._score_draws(token_ids, start, sampling, policy) for start in starts]
        return np.concatenate(parts)

    async def _score_prompt(self, token_ids: Sequence[int], policy: Policy) -> Floats:
        payload = {
            "input_ids": list(token_ids),
            "sampling_params": _sampling(Sampling()) | {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": policy.lora,
        }
        body = await self._post("/generate", payload, None)
        rows = _field(body, "meta_info", "input_token_logprobs")
        return _scores([row[:2] for row in rows[1:]], token_ids[1:])

    async def _score_draws(self, token_ids: Sequence[int], start: int, sampling: Sampling, policy: Policy) -> Floats:
        """Of the ids from `start` on: one draw behind each prefix, asked for the id that follows."""
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
            raise EngineError(f"{self}: answered a batch of {len(ends)} with {str(bodies)[:200]}")
        rows = [_field(body, "meta_info", "output_token_ids_logprobs") for body in bodies]
        return _scores([row[0][0][:2] for row in rows], [token_ids[end] for end in ends])

    async def abort(self, rid: str) -> None:
        """End one request, if it is there."""
        await self._post("/abort_request", {"rid": rid})

    async def pause(self) -> None:
        """Sample nothing more; running requests keep their place and their KV, further ones wait."""
        await self._post("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._post("/continue_generation", {})

    async def load(self, policy: Policy, folder: Path | None) -> None:
        """Take a policy's adapter, from `folder` or in the request; ValueError where it does not fit."""
        if policy.lora is None or policy.adapter is None:
            return
        if folder is not None:
            body: dict[str, Any] = {"lora_name": policy.lora, "lora_path": str(folder)}
            answer = await self._try("/load_lora_adapter", body, _LOAD_S)
        else:
            body = {
                "lora_name": policy.lora,
                "config_dict": dict(policy.adapter.config),
                "serialized_named_tensors": [_packed(policy.adapter.tensors)],
            }
            answer = await self._try("/load_lora_adapter_from_tensors", body, _LOAD_S)
        if answer.status != 200:
            raise ValueError(f"adapter: {self} refused it: {_reason(answer)}")

    async def unload(self, lora: str) -> None:
        """Forget an adapter when the last request that uses it has ended."""
        await self._post("/unload_lora_adapter", {"lora_name": lora}, _LOAD_S)

    async def close(self) -> None:
        """Close every connection; what waits for an answer ends with ConnectionError."""
        self.client.close()
        await asyncio.sleep(0)  # for the transports to let go of their sockets

    async def _get(self, path: str) -> Any:
        return self._checked(path, await self._wired(self.client.get(path, timeout_s=_CONTROL_S)))

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
        if answer.status >= 500:
            raise Unavailable(f"{self}{path}: {answer.status}: {_reason(answer)}")
        if answer.status != 200:
            raise EngineError(f"{self}{path}: {answer.status}: {_reason(answer)}")
        return answer.body


@lru_cache
def _written(sampling: Sampling, stop_ids: tuple[int, ...]) -> str:
    """The settings that a run's requests share, as the inside of a JSON object."""
    return encoded(_sampling(sampling) | {"stop_token_ids": stop_ids})[1:-1]


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Every setting that bends the distribution: a server may have other defaults of the model's author."""
    plain = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    return plain | {"temperature": sampling.temperature, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def _packed(tensors: Mapping[str, Any]) -> str:
    """The tensors as a server unpickles them; it dies of anything but torch's, which never leave here."""
    for name, tensor in tensors.items():
        if not type(tensor).__module__.startswith("torch"):
            raise ValueError(f"adapter: {name} is a {type(tensor).__name__}, and a server takes torch tensors")
    return base64.b64encode(pickle.dumps(dict(tensors))).decode()


def completion_of(body: Any, version: int) -> Completion:
    """The answer of POST /generate as a Completion; EngineError where it is not what it should be, never a repair.

    Log-probabilities come as `[value, id, text]`, one for each of `output_ids`, the stop id included.
    """
    ids = _field(body, "output_ids")
    rows = _field(body, "meta_info", "output_token_logprobs", default=[])
    reason = _field(body, "meta_info", "finish_reason", "type")
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"the server ended a request by {reason!r}")
    try:
        values, named = [float(row[0]) for row in rows], [int(row[1]) for row in rows]
    except (TypeError, ValueError, IndexError, KeyError):
        raise EngineError(f"the server's log-probabilities are no rows of value and id: {str(rows)[:200]}") from None
    if named != ids:
        raise EngineError(f"the server sampled {len(ids)} ids and sent the log-probabilities of {len(rows)} other ones")
    try:
        return Completion(
            token_ids=np.array(named, np.int64),
            logprobs=np.array(values, np.float32),
            finish_reason=cast('Literal["stop", "length", "abort"]', reason),
            versions=_versions(body["meta_info"], version),
        )
    except ValueError as error:
        raise EngineError(f"the server's answer: {error}") from error


def _versions(meta: Mapping[str, Any], version: int) -> tuple[Version, ...]:
    """The policy version of each span; `version` where the server's own weights have no number for a name.

    A server whose base weights are pushed in flight reports `[{"version": "7", "start": 0, "end": 3}, ..]`.
    """
    spans = [span for span in meta.get("weight_versions") or () if span["end"] > span["start"]]
    named = [Version(int(s["start"]), int(s["version"]) if s["version"].isdecimal() else version) for s in spans]
    changes = [now for i, now in enumerate(named) if i == 0 or named[i - 1].version != now.version]
    return tuple(changes) or (Version(0, version),)


def _field(body: Any, *path: str, default: Any = None) -> Any:
    """A nested field of an answer; EngineError that names it where it is missing."""
    for name in path:
        body = body.get(name) if isinstance(body, dict) else None
    if body is None and default is None:
        raise EngineError(f"the server's answer has no {'.'.join(path)}")
    return default if body is None else body


def _scores(rows: Sequence[Sequence[Any]], token_ids: Sequence[int]) -> Floats:
    if [row[1] for row in rows] != list(token_ids):
        raise EngineError("the server scored other ids than it was asked to")
    return np.array([row[0] for row in rows], np.float32)


def _reason(answer: Answer) -> str:
    """What the server says went wrong: `error` is a text in some answers, and holds a message in others."""
    body = answer.body
    said = body.get("error", body.get("error_message", body)) if isinstance(body, dict) else body
    said = said.get("message", said) if isinstance(said, dict) else said
    return said if isinstance(said, str) else json.dumps(said)[:500]
