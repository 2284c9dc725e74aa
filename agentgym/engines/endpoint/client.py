"""Requests to a chat endpoint, with limited concurrency and retries."""

import asyncio
import random
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from agentgym.engines.endpoint.answers import SHOWN, Answer, GarbageError, read_answer
from agentgym.errors import EngineError
from agentgym.machine.time_limits import off_the_clock

_AGAIN = frozenset({408, 409, 425, 429})
"""HTTP statuses below 500 after which a retry may succeed."""
_OF_REASONING = re.compile(r"reasoning_content|['\"`]reasoning['\"`]")
"""Matches the name of a field with the reasoning of an earlier turn in an error response."""
_NEVER = frozenset({"insufficient_quota", "billing_hard_limit_reached"})
"""Error codes in a response after which a retry can't succeed, whatever its HTTP status."""


class Refusal(Exception):
    """Raised if a request failed. It may be retried if `again` is true."""

    def __init__(self, said: str, *, again: bool, wait_s: float | None = None) -> None:
        super().__init__(said)
        self.again, self.wait_s = again, wait_s


class ChatClient:
    """Sends requests to one endpoint. At most `concurrency` requests are in flight, while the others wait."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        concurrency: int,
        timeout_s: float,
        retries: int,
        first_wait_s: float,
        longest_wait_s: float,
    ) -> None:
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=timeout_s)
        self._url, self._timeout_s, self._retries = url, timeout_s, retries
        self._first_wait_s, self._longest_wait_s = first_wait_s, longest_wait_s
        self._slots = asyncio.Semaphore(concurrency)
        self.sent_again = 0
        """Number of requests that were retries."""

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()

    async def models(self) -> list[str]:
        """Return the names of the models that the endpoint serves.

        Raises:
            EngineError: If the endpoint can't be reached, or doesn't list its models.
        """
        from openai import APIConnectionError, OpenAIError

        try:
            return [model.id async for model in self._client.models.list()]
        except APIConnectionError as error:
            why = error.__cause__ or error
            raise EngineError(f"endpoint {self._url}: cannot connect ({why}); is it running?") from error
        except OpenAIError as error:
            raise EngineError(
                f"endpoint {self._url}: cannot list its models ({error}); set `model` to the one to use"
            ) from error

    async def ask(self, request: Mapping[str, Any]) -> tuple[Answer, int]:
        """Send a request, with retries, until there is a response.

        Waiting for a free slot or for a retry doesn't count against the rollout's time limits.

        Returns:
            The response, and the number of retries.

        Raises:
            EngineError: If the endpoint refuses the request, or the last retry fails.
        """
        for retry in range(self._retries + 1):
            try:
                return await self._in_turn(request), retry
            except Refusal as refusal:
                wait_s = self._wait_s(refusal, retry)
                if wait_s is None:
                    said = f"{refusal}{self._too_long(refusal)}" + (f", after {retry + 1} requests" if retry else "")
                    failed = EngineError(f"endpoint {self._url}: {said}")
                    failed.sent_again = retry
                    raise failed from refusal.__cause__
            self.sent_again += 1
            with off_the_clock():
                await asyncio.sleep(wait_s)
        raise AssertionError("the last retry returns or raises")

    def _wait_s(self, refusal: Refusal, retry: int) -> float | None:
        """Return the seconds to wait before the next retry, or None if the request isn't retried again.

        `retry` is the number of retries so far.
        """
        if not refusal.again or retry == self._retries or self._too_long(refusal):
            return None
        if refusal.wait_s is not None:
            return refusal.wait_s
        longest_s: float = min(self._longest_wait_s, self._first_wait_s * 2.0 ** min(retry, 64))
        return longest_s * random.uniform(0.5, 1.0)

    def _too_long(self, refusal: Refusal) -> str:
        """Return the end of an error message if a retry would have to wait for too long, otherwise ""."""
        if not refusal.again or refusal.wait_s is None or refusal.wait_s <= self._longest_wait_s:
            return ""
        return f"; not sent again: it asks for {refusal.wait_s:g} s, but longest_wait_s is {self._longest_wait_s:g}"

    async def _in_turn(self, request: Mapping[str, Any]) -> Answer:
        with off_the_clock():
            await self._slots.acquire()
        try:
            return await self._once(request)
        finally:
            self._slots.release()

    async def _once(self, request: Mapping[str, Any]) -> Answer:
        import openai

        known = {"model", "messages", "tools", "temperature", "max_tokens", "seed", "top_p", "stop"}
        own = {name: value for name, value in request.items() if name in known}
        more = {name: value for name, value in request.items() if name not in known}
        try:
            async with asyncio.timeout(self._timeout_s):
                got = await self._client.chat.completions.with_raw_response.create(**own, extra_body=more or None)
            return read_answer(got.content)
        except (TimeoutError, openai.APITimeoutError) as error:
            raise Refusal(f"no response within {self._timeout_s:g} s (timeout_s)", again=True) from error
        except openai.APIStatusError as error:
            raise _refusal_of(error) from error
        except openai.OpenAIError as error:
            why = " ".join(filter(None, [str(error), str(error.__cause__ or "")]))
            raise Refusal(why, again=isinstance(error, openai.APIConnectionError)) from error
        except GarbageError as error:
            raise Refusal(str(error), again=True) from error


def _refusal_of(error: Any) -> Refusal:
    """Convert an error response to a Refusal, which says why, whether a retry may succeed, and how long to wait."""
    status: int = error.status_code
    code = getattr(error, "code", None)
    again = (status in _AGAIN or status >= 500) and code not in _NEVER
    said = f"status {status}: {' '.join(error.response.text.split())[:SHOWN]}"
    if status == 404:
        said += "; does the URL end with the API's path, such as /v1, and does the endpoint serve this model?"
    if status in (400, 422) and _OF_REASONING.search(error.response.text):
        said += (
            "; set send_reasoning to True if the endpoint requires the reasoning of earlier turns, or to False if it "
            "refuses it"
        )
    return Refusal(said, again=again, wait_s=retry_after_s(error.response.headers))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait according to the Retry-After-Ms or Retry-After header, or None if neither is valid."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        written = headers.get(name, "")
        try:
            seconds = float(written) / unit
        except ValueError:
            continue
        return max(0.0, seconds) if seconds == seconds else None
    try:
        return max(0.0, parsedate_to_datetime(headers.get("retry-after", "")).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
