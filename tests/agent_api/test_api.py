"""A rollout's API over HTTP: requests that are read, requests that are refused, and clients that hang up."""

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

import agentgym as ag
from agentgym.agent_api import anthropic_messages, chat_completions, relay_link
from agentgym.agent_api.api import MAX_WARNED, AgentApi
from agentgym.agent_api.http import HttpAnswer, HttpRequest
from agentgym.agent_api.requests import RefusedError
from agentgym.engines.scripted import Scripted, call, raw, say
from agentgym.errors import EngineError
from tests.agent_api.drawing import KEY, LOOK, Drawing, Played, serving

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
GO = {"model": "any", "messages": [{"role": "user", "content": "go"}]}
GO_ANTHROPIC = {**GO, "max_tokens": 100}


async def post(api: AgentApi, path: str, said: Any, key: str = KEY, method: str = "POST") -> HttpAnswer:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    return await api.handle(HttpRequest(method=method, path=path, headers={"x-api-key": key}, body=body))


def body(answer: HttpAnswer) -> dict[str, Any]:
    assert isinstance(answer.body, bytes)
    read: dict[str, Any] = json.loads(answer.body)
    return read


def api_of(*replies: Any, **limits: Any) -> AgentApi:
    return AgentApi(Played(Scripted(replies), ag.Limits(**limits)).policy, KEY, "T")


@pytest.mark.parametrize("key", ["", "another"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/models"])
async def test_requests_without_the_rollouts_key_are_refused(path: str, key: str) -> None:
    answer = await post(api_of(say("one")), path, GO_ANTHROPIC, key=key)
    said = body(answer)["error"]
    assert (answer.status, said["type"]) == (401, "authentication_error")
    assert "is not this rollout's" in said["message"]


REFUSED_CHATS: dict[str, Mapping[str, Any]] = {
    "model: required": {"model": None},
    "messages: required": {"messages": None},
    "messages: must be a list, got 'go'": {"messages": "go"},
    "messages: must not be empty": {"messages": []},
    "messages[0]: must be an object, got 1": {"messages": [1]},
    "messages[0].role: must be one of system, developer, user": {"messages": [{"role": "function", "content": ""}]},
    "messages[0].tool_call_id: required": {"messages": [{"role": "tool", "content": ""}]},
    "messages[0].content[0].type: must be text (the policy reads only text)": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    },
    "the last one must not be from the assistant": {"messages": [{"role": "assistant", "content": "I"}]},
    "tools[0].type: must be function": {"tools": [{"type": "web_search"}]},
    "tools[0].function.name: required": {"tools": [{"type": "function", "function": {}}]},
    "n: must be 1": {"n": 2},
    "response_format.type: must be text": {"response_format": {"type": "json_object"}},
    "functions: must be given as `tools`": {"functions": [{"name": "look"}]},
    "logprobs: must be false": {"logprobs": True},
    "max_tokens: must be a whole number of at least 1, got 0": {"max_tokens": 0},
    "stop: must be text, or a list of texts": {"stop": [1]},
    "stream: must be true or false": {"stream": "yes"},
}


@pytest.mark.parametrize("why", REFUSED_CHATS)
async def test_a_malformed_chat_gets_an_openai_error_that_names_the_field(why: str) -> None:
    answer = await post(api_of(say("one")), CHAT, {**GO, **REFUSED_CHATS[why]})
    said = body(answer)
    assert (answer.status, answer.headers["x-should-retry"]) == (400, "false")
    assert set(said) == {"error"}
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert why in said["error"]["message"]
    assert said["error"]["type"] == "invalid_request_error"


REFUSED_MESSAGES: dict[str, Mapping[str, Any]] = {
    "max_tokens: required": {"max_tokens": None},
    "max_tokens: must be a whole number, got 'many'": {"max_tokens": "many"},
    "messages[0].role: must be user or assistant": {"messages": [{"role": "system", "content": ""}]},
    "messages[0].content: required": {"messages": [{"role": "user"}]},
    "messages[0].content[0].type: must be text": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "messages[0].content[0].tool_use_id: required": {
        "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]
    },
    "tools[0].input_schema: required": {"tools": [{"name": "look"}]},
    "tools[0].type: must be custom": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "system[0].text: required": {"system": [{"type": "text"}]},
}


@pytest.mark.parametrize("why", REFUSED_MESSAGES)
async def test_a_malformed_message_gets_an_anthropic_error_that_names_the_field(why: str) -> None:
    answer = await post(api_of(say("one")), MESSAGES, {**GO_ANTHROPIC, **REFUSED_MESSAGES[why]})
    said = body(answer)
    assert (answer.status, said["type"], said["error"]["type"]) == (400, "error", "invalid_request_error")
    assert why in said["error"]["message"]


ODD: list[Any] = [None, True, 0, -1, 1.5, "", "x", "\ud800", [], {}, ["a"], {"a": 1}, [{}], [[]], [{"type": "text"}]]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_no_request_from_the_sandbox_fails_the_rollout(path: str) -> None:
    draw = random.Random(0).choice
    api = api_of(*[say("one")] * 500, turns=500)
    for _ in range(500):
        call = {"id": draw(ODD), "type": "function", "function": {"name": draw(ODD), "arguments": draw(ODD)}}
        block = {
            "type": draw(["text", "tool_use", "tool_result"]),
            "text": draw(ODD),
            "id": draw(ODD),
            "input": draw(ODD),
        }
        said = {"role": draw(["user", "assistant", "tool", draw(ODD)]), "content": draw([draw(ODD), [block]])}
        said |= {} if draw([True, False]) else {"tool_calls": draw([draw(ODD), [call]]), "tool_call_id": draw(ODD)}
        name = draw(["model", "max_tokens", "tools", "stop", "stop_sequences", "system", "stream", "tool_choice"])
        await post(api, path, {**GO_ANTHROPIC, "messages": [said, *GO["messages"]], name: draw(ODD)})
        assert not api.failed.done(), api.failed.result()
    assert api.answered + api.refused > 0


@pytest.mark.parametrize("nested", ["[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500, "NaN", '"\\ud800"'])
async def test_a_body_that_no_template_can_render_is_refused(nested: str) -> None:
    said = '{"model": "m", "messages": [{"role": "user", "content": "go"}], "extra": ' + nested + "}"
    answer = await post(api_of(say("one")), CHAT, said.encode())
    assert answer.status == 400
    assert "the body must not contain NaN, Infinity, a lone surrogate" in body(answer)["error"]["message"]


async def test_invented_settings_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    api = AgentApi(Played(Scripted([say("one")])).policy, KEY, "Inventive")
    await post(api, CHAT, {**GO, **{f"setting{number}": 1 for number in range(1000)}})
    assert api.answered == 1
    assert len(caplog.records) == MAX_WARNED


async def test_connections_of_a_sandbox_and_their_buffers_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(_: HttpRequest) -> HttpAnswer:
        return await asyncio.Future()

    monkeypatch.setattr(relay_link, "MAX_OPEN", 3)
    monkeypatch.setattr(relay_link, "MAX_HELD", 1000)
    link = relay_link.RelayLink(None, never)  # type: ignore[arg-type]
    for number in range(10):
        link.take(number, b"POST /v1/messages")
    assert link.open == 3
    link.take(0, b" " * 1000)
    assert link.open == 2
    assert [record.getMessage() for record in caplog.records] == [
        "an agent's connection is cut off, because there are too many connections or unanswered bytes: "
        "3 connections, 51 bytes"
    ]
    await link.close()


async def test_invalid_json_other_paths_and_other_methods_are_errors() -> None:
    api = api_of(say("one"))
    assert "the body is not JSON" in body(await post(api, CHAT, b"{"))["error"]["message"]
    assert "must be a JSON object, got list" in body(await post(api, CHAT, [GO]))["error"]["message"]
    unknown, get = await post(api, "/v1/completions", {}), await post(api, CHAT, b"", method="GET")
    assert (unknown.status, get.status) == (404, 405)
    assert "no such path: /v1/completions; the paths are /v1/chat/completions" in body(unknown)["error"]["message"]
    assert api.refused == 4


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/", "/v1/responses/resp_1/cancel"])
async def test_the_responses_api_is_refused_and_names_the_setting_for_chat_completions(path: str) -> None:
    api = api_of(say("one"))
    answer = await post(api, path, {"model": "any", "input": "go"})
    said = body(answer)["error"]
    assert (answer.status, answer.headers["x-should-retry"], said["code"]) == (404, "false", "not_found")
    for word in ("Responses API is not supported", "POST /v1/chat/completions", "use_responses_api=False"):
        assert word in said["message"]
    assert not api.failed.done()
    assert "no such path" in body(await post(api, "/v1/responsesX", {}))["error"]["message"]


async def test_models_are_listed_as_in_both_apis() -> None:
    listed = body(await post(api_of(), "/v1/models", b"", method="GET"))
    assert [(model["id"], model["object"], model["type"]) for model in listed["data"]] == [("policy", "model", "model")]
    assert body(await post(api_of(), "/v1/models/policy", b"", method="GET")) == listed["data"][0]


async def test_a_limit_is_an_error_that_clients_do_not_retry_and_ends_the_rollout() -> None:
    api = api_of(say("one"), turns=1)
    assert (await post(api, CHAT, GO)).status == 200
    openai, anthropic = await post(api, CHAT, GO), await post(api, MESSAGES, GO_ANTHROPIC)
    assert [(a.status, body(a)["error"]["type"]) for a in (openai, anthropic)] == [(403, "permission_error")] * 2
    assert body(openai)["error"]["code"] == "turns"
    assert openai.headers["x-should-retry"] == "false"
    assert api.over.result() == "turns"


async def test_a_too_long_conversation_gets_the_error_at_which_agents_compact() -> None:
    api = api_of(say("one"), context_tokens=8)
    openai, anthropic = await post(api, CHAT, GO), await post(api, MESSAGES, GO_ANTHROPIC)
    assert body(openai)["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in body(openai)["error"]["message"]
    assert body(anthropic)["error"]["message"].startswith("prompt is too long")
    assert not api.over.done()


async def test_an_engine_error_is_in_the_rollout_and_its_details_not_in_the_response() -> None:
    engine = Drawing()
    engine.breaks = True
    api = AgentApi(Played(engine).policy, KEY, "T")
    answer = await post(api, CHAT, GO)
    assert (answer.status, body(answer)["error"]["message"]) == (500, "the rollout has failed")
    assert isinstance(api.failed.result(), EngineError)


async def test_an_ignored_setting_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    api = AgentApi(Played(Scripted([say("one"), say("two")])).policy, KEY, "AnEnv")
    for _ in range(2):
        await post(api, CHAT, {**GO, "temperature": 0.3, "tool_choice": "required"})
    assert [record.getMessage() for record in caplog.records] == [
        "AnEnv: its agent sends 'temperature', which is ignored: the run's own sampling settings apply",
        "AnEnv: its agent sends 'tool_choice', which is ignored: the run's own sampling settings apply",
    ]


async def test_a_stop_text_ends_the_turn_and_is_not_in_the_response() -> None:
    class Stopping(Scripted):
        async def generate(self, *args: Any, **given: Any) -> Any:
            from dataclasses import replace

            assert given["sampling"].stop == ("Observation:",)
            made = await super().generate(*args, **given)
            return replace(made, finish_reason="stop_text")

    rollout = Played(Stopping([raw("Act: look\nObservation:"), raw("Done\nObservation:")], end=""))
    api = AgentApi(rollout.policy, KEY, "T")
    first = body(await post(api, CHAT, {**GO, "stop": "Observation:"}))["choices"][0]
    assert (first["finish_reason"], first["message"]["content"]) == ("stop", "Act: look\n")
    said = [*GO["messages"], first["message"], {"role": "user", "content": "nothing"}]
    second = body(await post(api, MESSAGES, {**GO_ANTHROPIC, "messages": said, "stop_sequences": ["Observation:"]}))
    assert (second["stop_reason"], second["stop_sequence"]) == ("stop_sequence", "Observation:")
    assert rollout.shape == [("root", None, 2)]


async def test_both_apis_parse_a_conversation_alike() -> None:
    chat = chat_completions.read(
        {
            "model": "m",
            "tools": [LOOK],
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
                {"role": "user", "content": "go"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
                    ],
                },
                {"role": "tool", "content": "nothing", "tool_call_id": "c1"},
                {"role": "user", "content": "on"},
            ],
        }
    )
    function = LOOK["function"]
    assert isinstance(function, dict)
    messages = anthropic_messages.read(
        {
            "model": "m",
            "max_tokens": 9,
            "system": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief.", "cache_control": {}}],
            "tools": [{"name": "look", "input_schema": function["parameters"]}],
            "messages": [
                {"role": "user", "content": "go"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "nothing"}]},
                        {"type": "text", "text": "on"},
                    ],
                },
            ],
        }
    )
    assert chat.messages == messages.messages
    assert chat.tools == messages.tools
    assert [message.get("name") for message in chat.messages] == [None, None, None, "look", None]


async def test_tool_choice_none_hides_the_tools() -> None:
    assert chat_completions.read({**GO, "tools": [LOOK], "tool_choice": "none"}).tools == []
    none = {"tools": [{"name": "look", "input_schema": {}}], "tool_choice": {"type": "none"}}
    assert anthropic_messages.read({**GO_ANTHROPIC, **none}).tools == []
    with pytest.raises(RefusedError, match="tool_choice: must be an object"):
        anthropic_messages.read({**GO_ANTHROPIC, "tool_choice": "none"})


async def test_counting_tokens_of_a_conversation_takes_no_turn() -> None:
    api = api_of(call("look"))
    assert body(await post(api, f"{MESSAGES}/count_tokens", GO)) == {"input_tokens": len("user\ngo\nassistant\n") + 3}
    assert api.answered == 0


def spoken(said: Any = GO, *, head: str = "") -> bytes:
    sent = json.dumps(said).encode()
    start = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n{head}"
    return start.encode() + b"Content-Length: %d\r\n\r\n" % len(sent) + sent


async def answers(sent: list[bytes], *replies: Any) -> bytes:
    """Send these pieces and return everything that the server writes until it closes the connection."""
    async with serving(Played(Scripted(replies))) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        for piece in sent:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        said = await reader.read()
        writer.close()
        return said


async def test_requests_may_arrive_byte_by_byte_and_share_a_connection() -> None:
    whole_request = spoken() + spoken(head="Connection: close\r\n")
    said = await answers([whole_request[i : i + 1] for i in range(len(whole_request))], say("one"), say("two"))
    assert said.count(b"HTTP/1.1 200 OK") == 2
    assert b'"content": "one"' in said
    assert b'"content": "two"' in said


async def test_a_body_may_be_chunked() -> None:
    sent = json.dumps(GO).encode()
    start = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    start += "Transfer-Encoding: chunked\r\n\r\n"
    pieces = [b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in (sent[:9], sent[9:])]
    said = await answers([start.encode(), *pieces, b"0\r\nA: trailer\r\n", b"\r\n"], say("one"))
    assert b"HTTP/1.1 200 OK" in said


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/2\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", b"505"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * (65 << 10), b"431"),
    ],
)
async def test_an_invalid_request_is_refused_and_the_connection_closes(sent: bytes, status: bytes) -> None:
    assert (await answers([sent])).startswith(b"HTTP/1.1 " + status)


async def test_a_client_that_hangs_up_cancels_its_request() -> None:
    engine = Drawing()
    engine.gate.clear()
    rollout = Played(engine)
    async with serving(rollout) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(spoken())
        await engine.asked.wait()
        assert rollout.state.turns == 1
        writer.close()
        await engine.left.wait()
    assert (engine.drawn, rollout.state.turns) == ([], 0)
