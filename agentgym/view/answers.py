"""Responses of the server: JSON that every browser can parse, and errors as one sentence."""

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from agentgym.types.json_values import whole_characters


class Refused(Exception):
    """A request that can't be fulfilled; the page shows the message."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


def as_json(value: object) -> bytes:
    """Encode a value as UTF-8 JSON, except bytes, which are already JSON.

    NaN and infinities become null, and lone surrogates become U+FFFD.
    """
    if isinstance(value, bytes):
        return value
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a metric that is not finite
        text = json.dumps(finite(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return whole_characters(text).encode()


def finite(value: Any) -> Any:
    """Return the value with None in place of each number that JSON can't represent."""
    if isinstance(value, Mapping):
        return {str(name): finite(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def answer(value: object, status: int = 200) -> Response:
    """Return a JSON response that the browser doesn't cache."""
    return Response(as_json(value), status, media_type="application/json", headers={"Cache-Control": "no-store"})


def refusal(error: Refused) -> Response:
    """Return the response for a refused request, with its message."""
    return answer({"error": str(error)}, error.status)
