"""Validates an SGLang server's responses and converts them to typed values.

An invalid response raises an error, and is never repaired.
"""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from agentgym.engines.sglang.http import Answer
from agentgym.errors import EngineError
from agentgym.errors.tracebacks import describe
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, FinishReason, Version

_BROKEN = (AttributeError, LookupError, TypeError, ValueError, OverflowError)
"""Errors that Python raises if a value read from a response has an unexpected type or form."""
_SAID = 400
"""Number of characters of a server's text that an error quotes."""


class ServerFacts(NamedTuple):
    """The settings that a server reports."""

    context_tokens: int
    """Maximum number of ids in one request, prompt and completion together."""
    model: str
    seeded: bool
    """Whether a request and its seed fully determine its samples, as with deterministic inference."""
    weight_version: str | None
    """The server's name for the weights that it started with."""
    tp: int = 1
    """Number of processes over which the weights are split (tensor parallelism)."""
    dtype: str = ""
    """The dtype of the weights, such as float32; empty if the server doesn't report it."""
    version: tuple[int, ...] = ()
    """The server's version, such as (0, 5, 23); empty if it doesn't report one."""
    lora: bool = False
    """Whether the server accepts adapters. Such a server doesn't accept pushed weights, because it names its weights
    differently.
    """


def server_facts(info: Any, server: str) -> ServerFacts:
    """Return the settings that a server reports in its response to GET /server_info.

    Raises:
        EngineError: If it isn't an SGLang server's response.
    """
    try:
        # The server requires prompts to be shorter than this limit. A whole request with one id less always fits.
        return ServerFacts(
            context_tokens=int(info["max_req_input_len"]) - 1,
            model=str(info["model_path"]),
            seeded=bool(info.get("enable_deterministic_inference")),
            weight_version=info.get("weight_version"),
            tp=int(info.get("tp_size") or 1),
            dtype=str(info.get("dtype") or "").removeprefix("torch."),
            version=_version(info.get("version")),
            lora=bool(info.get("enable_lora")),
        )
    except _BROKEN as error:
        why = f"{type(error).__name__}: {error}"
        raise EngineError(f"{server}/server_info: not an SGLang server's response: {why}") from None


def _version(said: Any) -> tuple[int, ...]:
    """Return the numbers that a version such as "0.5.17.post1" starts with."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(said))
    return tuple(map(int, found.groups())) if found else ()


def completion_of(body: Any, version: int, *, named: bool = True, ours: str | None = None) -> Completion:
    """Convert the response of POST /generate to a Completion.

    Log-probabilities have the form `[value, id, text]`, one for each of `output_ids`, including the stop id.

    Args:
        body: The decoded response.
        version: The completion's policy version, if the response doesn't say another.
        named: Whether to read policy versions from the names that the server reports for its weights. Even then, a
            name that isn't a number, or that is `ours`, is ignored.
        ours: The server's name for the weights that it started with.

    Raises:
        EngineError: If the response has another format.
    """
    ids, meta = field_of(body, "output_ids"), field_of(body, "meta_info")
    reason = field_of(body, "meta_info", "finish_reason", "type")
    if reason not in ("stop", "length", "abort"):
        raise EngineError(f"the server ended a request with finish reason {reason!r}")
    if reason == "stop" and isinstance(meta["finish_reason"].get("matched"), str):
        reason = "stop_text"
    rows = meta.get("output_token_logprobs") or []
    try:
        values, sampled = array("f", [row[0] for row in rows]), [row[1] for row in rows]
    except _BROKEN:
        raise EngineError(
            f"the server's log-probabilities: expected a value and an id in each, got {str(rows)[:200]}"
        ) from None
    if sampled != ids or type(ids) is not list:
        raise EngineError(
            f"the server's {len(rows)} log-probabilities are not those of the {_count(ids)} ids that it sampled"
        )
    try:
        return Completion(
            token_ids=np.frombuffer(array("q", ids).tobytes(), np.int64),
            logprobs=np.frombuffer(values.tobytes(), np.float32),
            finish_reason=cast("FinishReason", reason),
            versions=_versions(meta, version, ours) if named else _all_of(version),
        )
    except _BROKEN as error:
        raise EngineError(f"the server's response is invalid: {describe(error)}") from error


def _count(ids: Any) -> object:
    return len(ids) if isinstance(ids, list) else repr(ids)[:80]


def _versions(meta: Mapping[str, Any], version: int, ours: str | None) -> tuple[Version, ...]:
    """Return the policy version of each span of ids, from the names that the server reports for its weights.

    A name that isn't a number, or that is `ours`, stands for `version`. If weights are pushed to the server during a
    request, it reports several spans: `[{"version": "7", "start": 0, "end": 3}, ..]`.
    """
    spans: Sequence[Any] = meta.get("weight_versions") or ()
    if len(spans) == 1 and (spans[0]["version"] == ours or _is_unnumbered(spans[0])):
        return _all_of(version)
    spans = [span for span in spans if span["end"] > span["start"]]
    named = [
        Version(int(s["start"]), int(s["version"]) if s["version"].isdecimal() and s["version"] != ours else version)
        for s in spans
    ]
    changes = [now for i, now in enumerate(named) if i == 0 or named[i - 1].version != now.version]
    return tuple(changes) or _all_of(version)


def _is_unnumbered(span: Mapping[str, Any]) -> bool:
    """Return whether a span starts at the first id and the name of its weights isn't a number."""
    return not span["version"].isdecimal() and span["start"] == 0


@lru_cache
def _all_of(version: int) -> tuple[Version, ...]:
    """Return the versions of a completion whose ids all have the same version. The result is cached."""
    return (Version(0, version),)


def field_of(body: Any, *path: str) -> Any:
    """Return a nested field of a response. `path` has the name of the field at each level.

    Raises:
        EngineError: If the field is missing. The message names it.
    """
    for name in path:
        body = body.get(name) if isinstance(body, dict) else None
    if body is None:
        raise EngineError(f"the server's response has no {'.'.join(path)}")
    return body


def scores_of(rows: Sequence[Any], token_ids: Sequence[int], *, of_prompt: bool = False) -> Floats:
    """Return the log-probabilities from the rows of a response, each of which is `[value, id, ..]`.

    Args:
        rows: One row for each id.
        token_ids: The ids that the rows must be for.
        of_prompt: Whether the server scored a prompt. SGLang clips the placeholder ids of images in prompts, and
            thereby reports the vocabulary's last id as 0. A row with id 0 is therefore accepted for the largest of
            `token_ids`.

    Raises:
        EngineError: If the ids are different from `token_ids`, or a value isn't finite.
    """
    try:
        scored, values = [row[1] for row in rows], np.array([float(row[0]) for row in rows], np.float32)
    except _BROKEN:
        raise EngineError(
            f"the server's log-probabilities: expected a value and an id in each, got {str(rows)[:200]}"
        ) from None
    others = [pair for pair in zip(scored, token_ids, strict=False) if pair[0] != pair[1]]
    clipped = [(0, max(token_ids, default=0))] if of_prompt else []
    if len(scored) != len(token_ids) or any(pair not in clipped for pair in others):
        raise EngineError("the server scored different ids from the requested ones")
    if not np.isfinite(values).all():
        raise EngineError("the server's log-probabilities must all be finite")
    return values


def first_of(rows: Any) -> Any:
    """Return the only row of a response to a request that scores one id at one position, or None if it is missing.

    `rows` is a list of positions, each of which is a list of rows.
    """
    try:
        return rows[0][0]
    except (TypeError, IndexError, KeyError):
        return None


def reason_of(answer: Answer) -> str:
    """Return the server's error message. In some responses `error` is a string, in others an object with a message."""
    body = answer.body
    said = body.get("error", body.get("error_message", body)) if isinstance(body, dict) else body
    said = said.get("message", said) if isinstance(said, dict) else said
    return (said if isinstance(said, str) else json.dumps(said))[:_SAID]


def require_possible(completion: Completion, server: object, max_tokens: int, vocabulary: int) -> None:
    """Raise EngineError if a server sampled more than `max_tokens` ids, or an id outside the vocabulary.

    The message names the server.
    """
    ids = completion.token_ids
    if len(ids) > max_tokens:
        raise EngineError(f"{server}: sampled {len(ids)} ids, but at most {max_tokens} were requested")
    # One comparison is enough: read as unsigned integers, negative ids are larger than any vocabulary.
    if len(ids) and np.maximum.reduce(ids.view(np.uint64)) >= vocabulary:
        raise EngineError(f"{server}: sampled an id outside the vocabulary of {vocabulary} ids")
