"""Hostile requests to an agent's API: code in the sandbox can neither fail the rollout nor block the event loop."""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import agentgym as ag
from agentgym.agent_api import http_connection, relay_link
from agentgym.agent_api.api import AgentApi
from agentgym.agent_api.fields import MAX_VALUES, values_at_most
from agentgym.agent_api.http import HttpAnswer, HttpRequest
from agentgym.agent_api.http_connection import HttpConnection
from agentgym.agent_api.relay import HEAD
from agentgym.agent_api.requests import RefusedError
from agentgym.engines.scripted import ByteTokenizer, Scripted, say
from agentgym.rollouts import prompted
from agentgym.types.messages import Message
from tests.agent_api.drawing import KEY, Drawing, Played, check_exact

CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "go"}
GO = {"model": "m", "messages": [USER], "max_tokens": 100}


def api_of(engine: Any = None, **limits: Any) -> AgentApi:
    settled = ag.Limits(**{"turns": 1000, "context_tokens": 1 << 20, **limits})
    return AgentApi(Played(engine or Scripted(lambda _: say("one")), settled).policy, KEY, "T")


async def post(api: AgentApi, path: str, said: Any) -> tuple[int, Any]:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    answer = await api.handle(HttpRequest(method="POST", path=path, headers={"x-api-key": KEY}, body=body))
    assert isinstance(answer.body, bytes)
    return answer.status, json.loads(answer.body)


@pytest.mark.parametrize(("path", "field"), [(CHAT, "stop"), (MESSAGES, "stop_sequences")])
@pytest.mark.parametrize(
    ("value", "why"),
    [
        (["a\0b"], "must not contain a NUL character"),
        (["x"] * 17, "must contain at most 16 texts of 256 characters"),
        (["x" * 257], "must contain at most 16 texts of 256 characters"),
    ],
)
async def test_stop_texts_that_no_engine_accepts_are_refused_by_field(
    path: str, field: str, value: Any, why: str
) -> None:
    api = api_of()
    status, said = await post(api, path, {**GO, field: value})
    assert (status, said["error"]["message"].startswith(f"{field}: {why}")) == (400, True), said
    assert (await post(api, path, {**GO, field: ["x"] * 16}))[0] == 200


async def test_at_most_16_stop_texts_including_those_of_the_run() -> None:
    api = api_of()
    rollout: Any = api._policy
    rollout.state.sampling = ag.Sampling(stop=("END", "STOP"))
    status, said = await post(api, CHAT, {**GO, "stop": [str(n) for n in range(15)]})
    assert (status, said["error"]["param"]) == (400, "stop")
    assert "at most 14 texts besides those of the run's sampling" in said["error"]["message"]
    assert (await post(api, CHAT, {**GO, "stop": [*(str(n) for n in range(14)), "END"]}))[0] == 200


WORDS = st.sampled_from(
    ["", "go", "a\0b", "\ud800", "é🙂", "<|im_end|>", "text", "user", "assistant", "tool", "x" * 300]
)
NUMBERS = st.sampled_from([0, -1, 1.5, True, 1e308, -(2**63), 10**4299])
HOSTILE = st.recursive(
    st.none() | WORDS | NUMBERS,
    lambda deeper: (
        st.lists(deeper, max_size=2) | st.dictionaries(WORDS | st.sampled_from(["type", "role"]), deeper, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    [
        *("model", "messages", "max_tokens", "max_completion_tokens", "stop", "stop_sequences", "stream", "tools"),
        *("tool_choice", "system", "temperature", "top_p", "n", "response_format", "stream_options", "logprobs"),
    ]
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
    optional=dict.fromkeys(("text", "id", "name", "input", "content", "tool_use_id", "source"), HOSTILE),
)
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": WORDS, "arguments": HOSTILE})}, optional={"id": HOSTILE}
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]) | HOSTILE,
        "content": HOSTILE | st.lists(BLOCK, max_size=2),
    },
    optional={"tool_calls": HOSTILE | st.lists(CALL, max_size=2), "tool_call_id": HOSTILE, "name": HOSTILE},
)
SCHEMA = (
    st.fixed_dictionaries({"type": HOSTILE}, optional={"properties": HOSTILE, "pattern": st.just("(a+)+$")}) | HOSTILE
)
TOOL = st.fixed_dictionaries({"name": st.just("look"), "input_schema": SCHEMA}) | st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": st.just("look"), "parameters": SCHEMA})}
)
CALLS = Scripted(lambda _: Message(role="assistant", content="", tool_calls=[
    {"type": "function", "function": {"name": "look", "arguments": {"at": "x", "b": ["y"], "c": 10**40}}}
]))  # fmt: skip
"""A policy that calls the tool with text and lists, which parsers convert according to the tool's schema."""


@pytest.mark.parametrize("path", [CHAT, MESSAGES, COUNT])
@given(
    messages=st.lists(MESSAGE, max_size=3),
    tools=st.lists(TOOL, max_size=2),
    fields=st.dictionaries(FIELDS, HOSTILE, max_size=2),
)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_post_of_an_agent_gets_a_response_or_is_refused(
    path: str, messages: Any, tools: Any, fields: Any
) -> None:
    async def asked() -> None:
        api = api_of(CALLS)
        status, said = await post(api, path, {**GO, "messages": [*messages, USER], "tools": tools, **fields})
        assert not api.failed.done(), api.failed.result()
        assert (status == 200) == ("error" not in said), said
        assert status in (200, 400), said

    asyncio.run(asked())


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe{\x00}\x00",
        b'{"model": "m", "messages": ' + b"[" * 100_000,
        b'{"model": "m", "model": "n", "messages": [], "messages": 1}',
        b'{"model": "m", "max_tokens": ' + b"9" * 5000 + b', "messages": []}',
        b'{"model": "m", "max_tokens": 1e999, "messages": [{"role": "user", "content": "go"}]}',
        b'{"model": "m", "max_tokens": -Infinity, "messages": [{"role": "user", "content": "go"}]}',
        json.dumps({**GO, "model": "m" * 257}).encode(),
        json.dumps({**GO, "messages": [USER] * 10_001}).encode(),
        json.dumps({**GO, "tools": [{}] * 1001}).encode(),
        json.dumps({**GO, "tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}).encode(),
    ],
)
async def test_an_invalid_body_is_refused(path: str, body: bytes) -> None:
    api = api_of()
    status, said = await post(api, path, body)
    assert (status, api.failed.done(), api.refused) == (400, False, 1), said


async def test_template_tokenizer_and_parser_errors_reach_the_agent_and_fail_no_rollout() -> None:
    class Strict(ByteTokenizer):
        def render(self, messages: Any, tools: Any, *, generation: bool) -> str:
            if any("odd" in message["content"] for message in messages):
                raise ZeroDivisionError("odd")
            return super().render(messages, tools, generation=generation)

        def encode(self, text: str) -> list[int]:
            if "huge" in text:
                raise MemoryError
            return super().encode(text)

    api = api_of(Scripted([say("one"), say("two")], tokenizer=Strict()))
    for text in ("odd", "huge"):
        status, said = await post(api, CHAT, {**GO, "messages": [{"role": "user", "content": text}]})
        assert (status, said["error"]["param"], api.failed.done()) == (400, "messages", False)
    assert (await post(api, CHAT, GO))[0] == 200
    answered = [USER, {"role": "assistant", "content": "one"}, {"role": "user", "content": "odd"}]
    assert (await post(api, CHAT, {**GO, "messages": answered}))[0] == 400
    assert (await post(api, CHAT, {**GO, "messages": [*answered[:2], USER]}))[0] == 200


async def test_a_conversation_that_cannot_fit_is_refused_before_it_is_rendered() -> None:
    class Unused(ByteTokenizer):
        def render(self, messages: Any, tools: Any, *, generation: bool) -> str:
            raise AssertionError("the conversation was rendered")

    api = api_of(Scripted([], tokenizer=Unused()), context_tokens=100)
    for messages in ([{"role": "user", "content": "x" * 6401}], [USER] * 101):
        status, said = await post(api, CHAT, {**GO, "messages": messages})
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")


def test_values_inside_strings_of_a_body_are_not_counted() -> None:
    commas = json.dumps({"text": 'a "quoted", \\ word\\\\", [' * 40_000, "more": [[], {}, 1]}).encode()
    assert len(commas) > MAX_VALUES
    assert 3 <= values_at_most(commas) < 10
    assert values_at_most(b"[" + b"[]," * MAX_VALUES + b"1]") > MAX_VALUES
    assert values_at_most(b"[" + b'"",' * 3 * MAX_VALUES + b"1]") > MAX_VALUES


async def test_a_body_with_too_many_values_is_refused_before_it_is_parsed() -> None:
    status, said = await post(api_of(), CHAT, b'{"a": [' + b"[]," * MAX_VALUES + b"1]}")
    assert (status, said["error"]["message"]) == (413, f"the body contains more than {MAX_VALUES} values")


async def test_abandoned_conversations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompted, "MAX_WAITING", 3)
    engine = Drawing()
    engine.gate.clear()
    rollout = Played(engine)
    for number in range(3):
        asked = asyncio.create_task(rollout.say(Message(role="user", content=str(number))))
        await engine.asked.wait()
        asked.cancel()
        await asyncio.wait([asked])
        engine.asked.clear()
    with pytest.raises(
        RefusedError, match="the agent has stopped waiting for the answers to 3 requests; send one of them again"
    ) as refused:
        await rollout.say(Message(role="user", content="another"))
    assert refused.value.status == 429
    engine.gate.set()
    await rollout.say(Message(role="user", content="1"))
    await rollout.say(Message(role="user", content="another"))
    assert len(rollout.state.segments) == 4


LONG = "long " * 4000


async def test_concurrent_large_requests_give_the_same_segments_as_small_ones() -> None:
    engine = Drawing(calls=False)
    rollout = Played(engine)
    api = AgentApi(rollout.policy, KEY, "T")
    first = [{"role": "user", "content": LONG}]
    status, said = await post(api, CHAT, {**GO, "messages": first})
    told = [*first, said["choices"][0]["message"], USER]
    await asyncio.gather(*(post(api, CHAT, {**GO, "messages": told}) for _ in range(3)))
    kinds = [(segment.kind, len(segment.turns)) for segment in rollout.state.segments]
    assert (status, kinds) == (200, [("root", 2), ("fork", 1), ("fork", 1)])
    check_exact(engine, [rollout.rollout()])


async def test_concurrent_large_requests_take_no_more_than_the_allowed_turns() -> None:
    api = api_of(turns=2)
    asked = [{**GO, "messages": [{"role": "user", "content": f"{LONG}{number}"}]} for number in range(5)]
    answers = await asyncio.gather(*(post(api, CHAT, each) for each in asked))
    assert sorted(status for status, _ in answers) == [200, 200, 403, 403, 403]


class Client(asyncio.Transport):
    """The client end of a connection, which records everything that the server writes."""

    def __init__(self, handle: Callable[[HttpRequest], Any]) -> None:
        super().__init__()
        self.said, self.closed, self.told = b"", False, asyncio.Event()
        self.connection = HttpConnection(handle)
        self.connection.connection_made(self)

    def write(self, data: Any) -> None:
        self.said += data
        self.told.set()

    def close(self) -> None:
        self.closed = True
        self.told.set()

    async def ask(self, data: bytes, piece: int = 1 << 16) -> bytes:
        """Send the data in pieces and return everything received once the first response bytes arrive."""
        for at in range(0, len(data), piece):
            self.connection.data_received(data[at : at + piece])
            await asyncio.sleep(0)
        await self.told.wait()
        return self.said


async def echo(request: HttpRequest) -> HttpAnswer:
    return HttpAnswer(status=200, body=f"{request.method} {request.path} {len(request.body)}".encode())


POST = b"POST /x HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        pytest.param(b"GET http://policy:80/x?y=1 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /x 0", id="an absolute target"),
        pytest.param(b"GET http://policy HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / 0", id="an absolute target, no path"),
        pytest.param(b"GET /x HTTP/1.1\nHost: x\n\n", b"GET /x 0", id="lines that end with LF alone"),
        pytest.param(b"GET /x HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", b"GET /x 0", id="a folded header"),
        pytest.param(b"GET /x HTTP/1.0\r\n\r\n", b"GET /x 0", id="HTTP/1.0"),
        pytest.param(POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nok", b"POST /x 2", id="Expect"),
        pytest.param(CHUNKED + b"2;a=b\r\nok\r\n0\r\nA: trailer\r\n\r\n", b"POST /x 2", id="chunks and a trailer"),
        pytest.param(
            CHUNKED + b"".join([b"400\r\n" + b"x" * 1024 + b"\r\n"] * 3000) + b"0\r\n\r\n", b"3072000", id="chunks"
        ),
    ],
)
async def test_requests_are_parsed_as_the_http_standard_says(sent: bytes, said: bytes) -> None:
    client = Client(echo)
    await client.ask(sent)
    while said not in client.said:
        client.told.clear()
        await client.told.wait()
    assert (b"100 Continue" in client.said) == (b"Expect" in sent)
    assert client.closed == (b"HTTP/1.0" in sent)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx", b"400", id="two lengths"),
        pytest.param(POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", b"400", id="length and chunks"),
        pytest.param(POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n", b"501", id="two codings"),
        pytest.param(POST + b"Content-Length: 8388609\r\n\r\n", b"413", id="a body over 8 MiB"),
        pytest.param(POST + b"A: b\r\n" * 101 + b"\r\n", b"431", id="101 headers"),
        pytest.param(POST + b"A: " + b"b" * 40_000 + b"\r\n\r\n", b"431", id="a long header"),
        pytest.param(POST + b"A\0: b\r\n\r\n", b"400", id="a NUL in a name"),
        pytest.param(POST + b"A : b\r\n\r\n", b"400", id="a space after a name"),
        pytest.param(CHUNKED + b"2\r\nxxx\r\n0\r\n\r\n", b"400", id="a chunk longer than it says"),
        pytest.param(CHUNKED + b"1" + b"0" * 40 + b"\r\n", b"400", id="a length of 41 digits"),
        pytest.param(CHUNKED + b"1\r\nx\r\n" * 2000 + b"0\r\n\r\n", b"400", id="chunks of one byte"),
        pytest.param(CHUNKED + b"1;" + b"x" * 40_000, b"431", id="a long chunk extension"),
        pytest.param(CHUNKED + b"0\r\n" + b"A: b\r\n" * 9000, b"431", id="long trailers"),
        pytest.param(CHUNKED + (b"100000\r\n" + b"x" * (1 << 20) + b"\r\n") * 9, b"413", id="chunks over 8 MiB"),
    ],
)
async def test_malformed_or_too_large_requests_are_refused_and_the_connection_closes(
    sent: bytes, status: bytes
) -> None:
    client = Client(echo)
    said = await client.ask(sent)
    assert said.startswith(b"HTTP/1.1 " + status), said
    assert client.closed
    assert client.connection.held <= http_connection.MAX_HEAD + http_connection.MAX_BODY + (1 << 16)


async def test_a_head_request_gets_no_body_and_the_next_request_is_read() -> None:
    client = Client(echo)
    await client.ask(b"HEAD /x HTTP/1.1\r\nHost: x\r\n\r\nGET /y HTTP/1.1\r\nHost: x\r\n\r\n")
    while b"GET /y 0" not in client.said:
        client.told.clear()
        await client.told.wait()
    assert b"HEAD /x" not in client.said


async def longest_turn(work: Any) -> tuple[float, Any]:
    """Return the longest CPU time of an event loop turn while `work` ran, in seconds, and the result of `work`."""
    longest, done = 0.0, asyncio.ensure_future(work)
    while not done.done():
        began = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - began)
    return longest, done.result()


def sent(said: Any, path: str = CHAT) -> bytes:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(sent({**GO, "messages": [USER] * 9_000}), id="9,000 messages"),
        pytest.param(sent({**GO, "messages": [{"role": "user", "content": "a"}] * 30_000}), id="30,000 messages"),
        pytest.param(
            sent({**GO, "messages": [{"role": "user", "content": "a<|im_end|>" * 90_000}]}), id="1 MB of marks"
        ),
        pytest.param(sent({**GO, "messages": [{"role": "user", "content": "é" * 330_000}]}, COUNT), id="1 MB to count"),
        pytest.param(sent(b'{"model": [' + b"[]," * 330_000 + b"1]}"), id="330,000 lists"),
        pytest.param(
            sent({**GO, "tools": [{"type": "function", "function": {"name": "x" * 1000}}] * 999}), id="999 tools"
        ),
    ],
)
async def test_no_1_mb_request_blocks_the_event_loop_for_50_ms_of_cpu_time(request_: bytes) -> None:
    longest, said = await longest_turn(Client(api_of(Scripted([say("one")])).handle).ask(request_))
    assert said.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400", b"HTTP/1.1 413"))
    assert longest < 0.05


async def test_a_chunked_body_takes_time_proportional_to_its_length() -> None:
    async def seconds(chunk: bytes, count: int) -> float:
        began = time.thread_time()
        await Client(echo).ask(CHUNKED + chunk * count + b"0\r\n\r\n", 4096)
        return time.thread_time() - began

    small, large = b"1\r\nx\r\n", b"400\r\n" + b"x" * 1024 + b"\r\n"
    for chunk in (small, large):
        short, long = [min([await seconds(chunk, (kib << 10) // len(chunk)) for _ in range(3)]) for kib in (128, 1024)]
        assert long < 24 * short + 0.05


async def test_frames_of_one_byte_do_not_block_the_event_loop() -> None:
    class Frames:
        """The output of a relay that the code in the sandbox has replaced."""

        pieces = [(HEAD.pack(1, 1) + b"x") * 7000, b""]  # noqa: RUF012

        async def read(self) -> bytes:
            return self.pieces.pop(0)

    process: Any = type("Process", (), {"stdout": Frames()})
    reading, turns = asyncio.create_task(relay_link.RelayLink(process, echo).read()), 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 7000 // relay_link.FRAMES_A_TURN
