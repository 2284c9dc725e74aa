"""Unmodified clients from PyPI: the responses that they get are trained exactly as they were sampled."""

import asyncio
import base64
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from tests.agent_api.drawing import KEY, LOOK, Drawing, Played, check_exact, serving
from tests.types.messages.pictures import PART, PNG, text_part

SEARCHER = {"role": "system", "content": "You search."}


class OpenAIAgent:
    """A loop over the openai client that retries, edits its history, branches, streams and asks sub-agents."""

    def __init__(self, url: str, draw: random.Random) -> None:
        openai = pytest.importorskip("openai", reason="the package openai is not installed")
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
        self.draw = draw

    async def play(self, steps: int) -> None:
        """Run this many steps, each of a randomly chosen kind."""
        messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "go"}]
        for _ in range(steps):
            kind = self.draw.choice(["on", "on", "again", "branches", "edit", "search", "forget"])
            if kind == "again":
                await self.turn(messages)
            elif kind == "branches":
                branches = [[*messages, {"role": "user", "content": way}] for way in ("left", "right")]
                messages = (await asyncio.gather(*map(self.turn, branches)))[self.draw.randint(0, 1)]
            elif kind == "edit":
                messages = [m if m["role"] != "tool" else {**m, "content": "(cut)"} for m in messages]
            elif kind == "search":
                await self.turn([SEARCHER, {"role": "user", "content": f"find {self.draw.random()}"}])
            elif kind == "forget":
                messages = [messages[0], {"role": "user", "content": f"So far: {len(messages)} messages."}]
            messages = await self.turn(messages)

    async def turn(self, messages: list[Any]) -> list[Any]:
        """Return the messages with the model's response and the resulting tool messages appended."""
        ask = self._streamed if self.draw.random() < 0.5 else self._whole
        said = await ask(messages)
        told = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in said.get("tool_calls") or ()]
        return [*messages, said, *(told or [{"role": "user", "content": "on"}])]

    async def _whole(self, messages: list[Any]) -> dict[str, Any]:
        tools: Any = [LOOK]
        made = await self.client.chat.completions.create(model="policy", messages=messages, tools=tools)
        said: dict[str, Any] = made.choices[0].message.model_dump(exclude_none=True)
        return said

    async def _streamed(self, messages: list[Any]) -> dict[str, Any]:
        tools: Any = [LOOK]
        stream = await self.client.chat.completions.create(
            model="policy", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
        )
        content, calls = "", dict[int, dict[str, Any]]()
        async for chunk in stream:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for piece in choice.delta.tool_calls or ():
                    function = {"name": piece.function.name, "arguments": ""}
                    call = calls.setdefault(piece.index, {"id": piece.id, "type": "function", "function": function})
                    call["function"]["arguments"] += piece.function.arguments
        return {"role": "assistant", "content": content, **({"tool_calls": list(calls.values())} if calls else {})}


async def conversations(count: int) -> None:
    """Run this many of the agent's conversations, each with a separate rollout."""
    pytest.importorskip("openai", reason="the package openai is not installed")
    engine, rollouts = Drawing(), []
    for number in range(count):
        played = Played(engine, rollout_id=f"t/{number}")
        async with serving(played) as url:
            agent = OpenAIAgent(url, random.Random(number))
            await agent.play(8)
            await agent.client.close()
        rollouts.append(played.rollout())
    kinds = {segment.kind for rollout in rollouts for segment in rollout.segments}
    assert kinds == {"root", "fork", "rerender", "subagent", "compaction"}
    assert check_exact(engine, rollouts) > 100 * count


async def test_conversations_of_an_openai_client_are_trained_once_as_sampled() -> None:
    await conversations(6)


@pytest.mark.slow
@pytest.mark.proof
async def test_200_conversations_of_an_openai_client_are_trained_once_as_sampled() -> None:
    await conversations(200)


async def test_the_openai_client_does_not_retry_a_refused_request() -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    played = Played(Scripted([say("one")]), ag.Limits(turns=1))
    go: Any = [{"role": "user", "content": "go"}]
    async with serving(played) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        made = await client.chat.completions.create(model="policy", messages=go)
        assert (made.choices[0].message.content, made.choices[0].finish_reason) == ("one", "stop")
        assert made.usage.completion_tokens == len("one") + 1
        with pytest.raises(openai.PermissionDeniedError, match="all 1 turns"):
            await client.chat.completions.create(model="policy", messages=go)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=go, n=2)
        assert refused.value.param == "n"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="another").chat.completions.create(model="policy", messages=go)


async def test_an_image_from_a_client_is_refused_by_field_and_the_rollout_continues() -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    played = Played(Scripted([say("one")]))
    shown: Any = [{"role": "user", "content": [text_part("What is it?"), PART]}]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [block]}
    told = r"must be text \(the policy reads only text\), got 'image"
    async with (
        serving(played) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as other,
    ):
        with pytest.raises(openai.BadRequestError, match=rf"messages\[0\]\.content\[1\]\.type: {told}") as refused:
            await client.chat.completions.create(model="policy", messages=shown)
        assert refused.value.param == "messages[0].content[1].type"
        for content, place in (([block], "content[0]"), ([result], "content[0].content[0]")):
            asked: Any = [{"role": "user", "content": content}]
            with pytest.raises(anthropic.BadRequestError, match=rf"messages\[0\]\.{re.escape(place)}\.type: {told}"):
                await other.messages.create(model="policy", max_tokens=9, messages=asked)
        made = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go"}])
    assert made.choices[0].message.content == "one"


async def test_usage_of_a_stream_is_sent_if_requested() -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    go: Any = [{"role": "user", "content": "go"}]
    played = Played(Scripted([say("one"), say("two")]))
    async with serving(played) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        for options in ({}, {"stream_options": {"include_usage": True}}):
            stream = await client.chat.completions.create(model="policy", messages=go, stream=True, **options)
            usages = [chunk.usage async for chunk in stream if chunk.usage]
            assert [usage.completion_tokens for usage in usages] == ([4] if options else [])


async def anthropic_turn(client: Any, messages: Sequence[Any], *, stream: bool) -> list[Any]:
    tools = [{"name": "look", "input_schema": LOOK["function"]["parameters"]}]  # type: ignore[index]
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 1000, "messages": messages, "tools": tools}
    if stream:
        async with client.messages.stream(**asked) as events:
            made = await events.get_final_message()
    else:
        made = await client.messages.create(**asked)
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": "nothing"}
        for block in made.content
        if block.type == "tool_use"
    ]
    assert made.stop_reason == ("tool_use" if results else "end_turn")
    return [*messages, {"role": "assistant", "content": made.content}, {"role": "user", "content": results or "on"}]


async def test_a_streaming_anthropic_client_with_tools_continues_in_one_segment() -> None:
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    engine = Drawing()
    played = Played(engine)
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with serving(played) as url, anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client:
        for turn in range(8):
            messages = await anthropic_turn(client, messages, stream=bool(turn % 2))
        assert played.shape == [("root", None, 8)]
        asked = json.dumps([m["content"] for m in messages], default=lambda block: block.model_dump())
        assert "tool_use" in asked
        again = await anthropic_turn(client, messages[:-2], stream=False)
        await anthropic_turn(client, again, stream=True)
        with pytest.raises(anthropic.BadRequestError, match="messages: must not be empty"):
            await client.messages.create(model="policy", max_tokens=9, messages=[])
        counted = await client.messages.count_tokens(model="policy", messages=[{"role": "user", "content": "go"}])
        assert counted.input_tokens > 0
    assert played.shape == [("root", None, 8), ("fork", 0, 2)]
    check_exact(engine, [played.rollout()])


async def test_one_rollout_may_get_requests_from_both_clients() -> None:
    openai = pytest.importorskip("openai", reason="the package openai is not installed")
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    go: Any = [{"role": "user", "content": "go"}]
    played = Played(Scripted([say("one"), say("two")]))
    async with serving(played) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            made = await client.chat.completions.create(model="policy", messages=go)
        told = [*go, {"role": "assistant", "content": made.choices[0].message.content}, *go]
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client:
            await client.messages.create(model="policy", max_tokens=9, messages=told)
    assert played.shape == [("root", None, 2)]
