"""Replies as providers write them: parts of a content, reasoning, fields beside a call, and no reply at all."""

import json
import logging
import re
from functools import partial
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.endpoint import answers as endpoint_answers
from agentgym.engines.scripted import Scripted, say
from agentgym.evals.report import score_lines
from agentgym.exports.conversations import openai_line, sft_line
from agentgym.store.reader import RolloutStore
from agentgym.tools import DynamicTool
from tests.engines.endpoint.chat_server import Answers, ChatServer, Request, Sent, called, chat_server, said

pytest.importorskip("openai", reason="needs the extra agentgym-kit[endpoint]")

HM = [{"type": "text", "text": "hm"}]
TASK = ag.Task(id="0", prompt="What does tea cost?")


class Shop(ag.ToolEnv[ag.Task]):
    """An env with reward 1 for the price that the tool returns."""

    limits = ag.Limits(turns=6, turn_tokens=64, context_tokens=4096)

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return [TASK]

    @ag.tool
    def price(self, of: str = "tea") -> str:
        """Look a price up."""
        return f"{of} costs 3"

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "3")


def endpoint(server: ChatServer, **settings: Any) -> ag.Endpoint:
    given: dict[str, Any] = {"model": "m", "first_wait_s": 0.001, "retries": 2, **settings}
    return ag.Endpoint(server.url, **given)


async def play(answers: Answers, **settings: Any) -> tuple[ag.Rollout, ChatServer]:
    async with chat_server(answers) as server, endpoint(server, **settings) as engine:
        return await ag.rollout(Shop, TASK, engine, seed=1), server


def calling(**fields: Any) -> Answers:
    """Answer with a call beside which the message has these fields, and then with the price."""

    def answers(request: Request, number: int) -> Sent:
        if number:
            return said("3")
        return changed(called("price", "{}"), **fields)

    return answers


def always(sent: Sent) -> Answers:
    return lambda request, number: sent


def changed(sent: Sent, **fields: Any) -> Sent:
    sent.body["choices"][0]["message"] |= fields
    return sent


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "thinking", "thinking": HM}, {"type": "text", "text": "3"}],
        [{"type": "thinking", "thinking": "hm", "signature": "c2ln"}, {"type": "text", "text": "3"}],
        [{"type": "reasoning", "text": "hm"}, "3"],
        [{"type": "reasoning", "reasoning": ["h", "m"]}, {"type": "output_text", "text": "3"}],
    ],
)
async def test_parts_of_text_are_the_answer_and_parts_of_reasoning_its_reasoning(content: Any) -> None:
    rollout, _ = await play(lambda request, number: said(content))
    assert (rollout.reward, rollout.messages[-1]["reasoning_content"]) == (1.0, "hm")
    assert "usage/unread_parts" not in rollout.metrics


async def test_pieces_of_one_text_are_joined_and_other_parts_are_counted_and_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = [
        {"type": "text", "text": "It costs"},
        {"type": "citation_17", "ids": [1]},
        {"type": "text", "text": " 3."},
        7,
    ]
    with caplog.at_level(logging.WARNING, "agentgym"):
        rollout, _ = await play(lambda request, number: said(parts))
    assert rollout.messages[-1]["content"] == "It costs 3."
    assert rollout.metrics["usage/unread_parts"] == 2
    assert "a part of the type 'citation_17', which is neither text nor reasoning" in caplog.text
    async with chat_server(lambda request, number: said(parts)) as server, endpoint(server) as engine:
        evaluation = await ag.evaluate(Shop, engine)
    assert f"{'':<10}2 parts of replies were neither text nor reasoning: left out" in score_lines(evaluation)


async def test_parts_with_reasoning_are_sent_back_as_they_came_if_reasoning_is_sent_back() -> None:
    parts = [{"type": "thinking", "thinking": HM, "signature": "c2ln"}, {"type": "text", "text": "I look."}]
    _, server = await play(calling(content=parts), send_reasoning=True)
    turn = server.requests[1]["messages"][1]
    assert turn["content"] == parts
    assert "reasoning_content" not in turn
    _, server = await play(calling(content=parts))
    assert server.requests[1]["messages"][1]["content"] == "I look."


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("<think>hm</think>\n\n3", "hm"),
        ("hm</think>\n\n3", "hm"),
        ("<think>\n\n</think>\n\n3", None),
    ],
)
async def test_a_thought_in_the_text_is_no_part_of_the_answer(text: str, reasoning: str | None) -> None:
    rollout, _ = await play(lambda request, number: said(text))
    assert rollout.reward == 1.0
    assert rollout.messages[-1].get("reasoning_content") == reasoning


async def test_a_thought_that_is_never_closed_leaves_no_answer() -> None:
    rollout, _ = await play(lambda request, number: said("<think>It may be\n3"))
    assert (rollout.reward, rollout.messages[-1]["content"]) == (0.0, "")
    assert rollout.messages[-1]["reasoning_content"] == "It may be\n3"


async def test_a_text_about_thinking_is_whole_if_the_endpoint_itself_separates_the_reasoning() -> None:
    text = "Write </think> to end a thought."
    rollout, _ = await play(lambda request, number: said(text, reasoning_content="hm"))
    assert rollout.messages[-1]["content"] == text


DRAFT = '<think>I could call <tool_call>{"name": "price", "arguments": {"of": "gin"}}</tool_call>.'


@pytest.mark.parametrize("tools", ["api", "prompt"])
async def test_a_call_that_is_only_drafted_in_a_thought_is_not_made(tools: str) -> None:
    for text in (f"{DRAFT}</think>\n3", f"{DRAFT[7:]}</think>3"):
        rollout, _ = await play(always(said(text)), tools=tools)
        assert (rollout.reward, rollout.metrics["tool_calls"]) == (1.0, 0.0)
    rollout, _ = await play(lambda request, number: said(DRAFT), tools=tools)
    assert rollout.metrics["tool_calls"] == 0.0


async def test_a_call_behind_a_drafted_one_is_made() -> None:
    real = '<tool_call>{"name": "price", "arguments": {"of": "tea"}}</tool_call>'
    rollout, _ = await play(lambda request, number: said("3" if number else f"{DRAFT}</think>\n{real}"), tools="prompt")
    assert (rollout.reward, rollout.metrics["tool_calls"]) == (1.0, 1.0)


SIGNED = {"extra_content": {"google": {"thought_signature": "c2ln"}}}


async def test_what_an_endpoint_sent_beside_a_call_is_sent_back_with_it(tmp_path: Any) -> None:
    def answers(request: Request, number: int) -> Sent:
        if number:
            return said("3")
        sent = called("price", "{}")
        (call,) = sent.body["choices"][0]["message"]["tool_calls"]
        call |= {**SIGNED, "index": 0, "empty": None}
        call["function"]["provider_specific_fields"] = {"thought_signature": "b2xk"}
        return changed(sent, reasoning_details=[{"type": "reasoning.encrypted", "data": "\ud83d"}], annotations=[])

    async with chat_server(answers) as server, endpoint(server) as engine:
        evaluation = await ag.evaluate(Shop, engine, output_dir=tmp_path)
    turn = server.requests[1]["messages"][1]
    (call,) = turn["tool_calls"]
    assert call == {
        "id": "call_1",
        "type": "function",
        "function": {"name": "price", "arguments": "{}", "provider_specific_fields": {"thought_signature": "b2xk"}},
        **SIGNED,
    }
    assert turn["reasoning_details"] == [{"type": "reasoning.encrypted", "data": "\ufffd"}]
    assert "annotations" not in turn
    (rollout,) = evaluation.rollouts
    with RolloutStore(tmp_path) as store:
        (stored,) = [found.rollout for found in store.find()]
    assert stored.messages == rollout.messages
    assert stored.messages[0]["tool_calls"][0]["extra"]["extra_content"] == SIGNED["extra_content"]
    assert ag.Task(id="1", prompt=stored.messages).prompt[0] == stored.messages[0]


async def test_a_field_that_the_endpoint_refuses_to_get_back_can_be_left_out() -> None:
    _, server = await play(calling(audit={"id": 1}, cache={"id": 2}), leave_out=("audit", "seed"))
    assert {"audit", "cache"} & server.requests[1]["messages"][1].keys() == {"cache"}


async def test_what_came_beside_a_call_is_not_exported_for_training() -> None:
    rollout, _ = await play(calling(audit={"id": 1}))
    (segment,) = rollout.segments
    assert "extra" in segment.turns[0].message
    assert "audit" not in json.dumps([sft_line(segment), openai_line(segment)])


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("thought", ["hm", "", None])
async def test_with_send_reasoning_each_turn_has_the_field_in_which_the_endpoint_sends_reasoning(
    field: str, thought: str | None
) -> None:
    def answers(request: Request, number: int) -> Sent:
        if number == 2:
            return said("3")
        return changed(called("price", "{}"), **{field: "first" if number == 0 else thought})

    _, server = await play(answers, send_reasoning=True)
    turns = [message for message in server.requests[2]["messages"] if message["role"] == "assistant"]
    assert [turn[field] for turn in turns] == ["first", thought or ""]


async def test_an_endpoint_that_never_sent_reasoning_gets_an_empty_field() -> None:
    _, server = await play(calling(), send_reasoning=True)
    assert server.requests[1]["messages"][1]["reasoning_content"] == ""


@pytest.mark.parametrize(
    ("status", "told", "hinted"),
    [
        (400, "thinking is enabled but reasoning_content is missing in assistant tool call message at index 1", True),
        (400, f"{'x' * 300} property 'reasoning' is unsupported", True),
        (422, 'body.messages.2.assistant: extra inputs are not permitted, input: {"reasoning_content": "hm"}', True),
        (400, "unsupported parameter: 'reasoning_effort'", False),
        (401, "reasoning_content needs another key", False),
    ],
)
async def test_a_refusal_that_names_the_reasoning_says_which_setting_sends_it(
    status: int, told: str, hinted: bool
) -> None:
    rollout, _ = await play(lambda request, number: Sent({"error": {"message": told}}, status))
    assert ("set send_reasoning to True if" in str(rollout.error)) is hinted


@pytest.mark.parametrize("send_reasoning", [True, False])
async def test_with_tools_in_the_prompt_reasoning_and_unknown_fields_go_back_too(send_reasoning: bool) -> None:
    def answers(request: Request, number: int) -> Sent:
        text = '<tool_call>{"name": "price", "arguments": {}}</tool_call>'
        return said("3") if number else said(text, reasoning_content="hm", reasoning_details=["x"], audit=1)

    _, server = await play(answers, tools="prompt", send_reasoning=send_reasoning, leave_out=("audit",))
    turn = server.requests[1]["messages"][-2]
    assert turn.get("reasoning_content") == ("hm" if send_reasoning else None)
    assert turn["content"] == '<tool_call>\n{"name": "price", "arguments": {}}\n</tool_call>'
    assert turn["reasoning_details"] == ["x"]
    assert "audit" not in turn


EMPTY = {"prompt_tokens": 10, "completion_tokens": 0}


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize("usage", [EMPTY, {"prompt_tokens": 10, "total_tokens": 10}])
async def test_a_reply_without_text_calls_and_tokens_is_sent_again(content: Any, usage: Any) -> None:
    rollout, server = await play(lambda request, number: said("3") if number else said(content, usage=usage))
    assert (rollout.reward, rollout.metrics["usage/sent_again"], len(server.requests)) == (1.0, 1.0, 2)
    rollout, server = await play(lambda request, number: said(content, usage=usage))
    assert rollout.reward is None
    assert "the response is empty: it has no text, no call and no tokens" in str(rollout.error)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "reply",
    [
        said("", usage={"prompt_tokens": 10, "completion_tokens": 1}),
        said("3", usage=EMPTY),
        said("", usage=EMPTY, reasoning_content="hm"),
        said("", usage=EMPTY, reason="length"),
    ],
)
async def test_a_reply_that_has_something_or_was_cut_is_not_sent_again(reply: Sent) -> None:
    rollout, server = await play(lambda request, number: reply)
    assert rollout.reward is not None
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "reason", ["malformed_function_call", "function_call_filter: MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL"]
)
@pytest.mark.parametrize("content", [None, "price(of=tea"])
async def test_a_call_that_the_endpoint_could_not_read_is_malformed_and_told_to_the_model(
    reason: str, content: str | None
) -> None:
    def answers(request: Request, number: int) -> Sent:
        return said("3") if number else said(content, reason=reason, usage=EMPTY)

    rollout, server = await play(answers)
    assert (rollout.reward, rollout.metrics["malformed_calls"]) == (1.0, 1.0)
    _, turn, told = server.requests[1]["messages"]
    assert turn == {"role": "assistant", "content": content or "[a call that could not be read]"}
    assert told["role"] == "user"
    assert told["content"] == (
        "error: the tool call cannot be read; write each call like this:\n"
        'a call of the function NAME, with {"KEY": "VALUE"} as its arguments'
    )


@pytest.mark.parametrize("reason", ["length", "max_tokens", "MAX_TOKENS", "model_length"])
async def test_a_reply_that_a_limit_cut_off_ends_the_rollout_with_length(reason: str) -> None:
    rollout, _ = await play(lambda request, number: said("3 or", reason=reason))
    assert rollout.stop_reason == "length"


@pytest.mark.parametrize("reason", ["content_filter", "SAFETY", "content_filter: RECITATION"])
async def test_a_reply_that_was_filtered_fails_the_rollout_at_once(reason: str) -> None:
    rollout, server = await play(lambda request, number: said("", reason=reason, usage=EMPTY))
    assert f"the endpoint stopped the reply with finish_reason {reason!r}" in str(rollout.error)
    assert len(server.requests) == 1


CALL_TEXTS = [
    '<tool_call>\n{"name": "price", "arguments": {"of": "tea"}}\n</tool_call>',
    '{"name": "price", "arguments": {"of": "tea"}}',
    "I look it up.\n<function=price><parameter=of>tea</parameter></function>",
]


@pytest.mark.parametrize("text", CALL_TEXTS)
async def test_a_call_in_the_text_of_a_reply_is_malformed_and_the_servers_parser_named(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint_answers._say_call_in_text.cache_clear()
    rollout, _ = await play(lambda request, number: said("3" if number else text))
    assert (rollout.reward, rollout.metrics["malformed_calls"]) == (1.0, 1.0)
    assert "start its server with a parser" in caplog.text


async def test_with_tools_in_the_prompt_a_call_without_its_tags_is_told() -> None:
    rollout, _ = await play(lambda request, number: said("3" if number else CALL_TEXTS[1]), tools="prompt")
    assert (rollout.reward, rollout.metrics["malformed_calls"]) == (1.0, 1.0)


async def test_a_judge_that_thinks_in_its_text_is_read_behind_the_thought() -> None:
    class Asks(ag.ToolEnv[ag.Task]):
        @ag.reward
        async def right(self) -> float:
            return float(await self.model("judge").ask("How many?"))

    answers = [
        said("<think>2? No.</think>\n3"),
        said([{"type": "thinking", "thinking": "2?"}, {"type": "text", "text": "3"}]),
    ]
    async with chat_server(lambda request, number: answers[number]) as server, endpoint(server) as judge:
        for _ in answers:
            rollout = await ag.rollout(Asks, TASK, Scripted([say("x")]), models={"judge": judge})
            assert rollout.reward == 3.0


class Files(ag.ToolEnv[ag.Task]):
    """An env with tools whose names an API refuses, and one that it takes."""

    limits = ag.Limits(turns=6)

    async def extra_tools(self) -> list[DynamicTool]:
        names = ["fs.read/file", "fs/read.file", "fs_read_file"]
        return [
            DynamicTool(name, "Read.", {"type": "object", "properties": {}}, partial(_named, name)) for name in names
        ]

    @ag.reward
    def none(self) -> float:
        return 0.0


async def _named(name: str) -> str:
    return f"this is {name}"


async def test_tools_with_names_that_the_api_refuses_are_called_under_others() -> None:
    def answers(request: Request, number: int) -> Sent:
        offered = [tool["function"]["name"] for tool in request["tools"]]
        used = [call["function"]["name"] for message in request["messages"] for call in message.get("tool_calls", ())]
        if not all(re.fullmatch("[a-zA-Z0-9_-]{1,64}", name) for name in offered + used):
            return Sent("Invalid 'tools[0].function.name'", 400)
        return called([*offered, "no such tool!", "x"][number], "{}", f"call_{number}") if number < 4 else said("done")

    async with chat_server(answers) as server, endpoint(server) as engine:
        rollout = await ag.rollout(Files, TASK, engine)
    assert rollout.error is None
    told = [message["content"] for turn in rollout.segments[0].turns for message in turn.env_messages]
    assert told[:3] == ["this is fs.read/file", "this is fs/read.file", "this is fs_read_file"]
    assert "unknown tool 'no such tool!'" in told[3]
    (segment,) = rollout.segments
    assert [tool["function"]["name"] for tool in segment.tools] == ["fs.read/file", "fs/read.file", "fs_read_file"]
    line = openai_line(segment)
    offered = [tool["function"]["name"] for tool in line["tools"]]
    assert offered == ["fs_read_file_2", "fs_read_file_3", "fs_read_file"]
    assert [call["function"]["name"] for message in line["messages"] for call in message.get("tool_calls", ())] == [
        *offered,
        "no_such_tool_",
    ]


async def test_tools_in_the_prompt_keep_their_names() -> None:
    def answers(request: Request, number: int) -> Sent:
        return said("done" if number else '<tool_call>{"name": "fs.read/file", "arguments": {}}</tool_call>')

    async with chat_server(answers) as server, endpoint(server, tools="prompt") as engine:
        rollout = await ag.rollout(Files, TASK, engine)
    assert rollout.segments[0].turns[0].env_messages[0]["content"] == "this is fs.read/file"


@pytest.mark.parametrize("depth", [150, 900])
async def test_a_field_that_is_nested_too_deep_to_be_sent_back_is_garbage(depth: int) -> None:
    body = json.dumps(said("3", notes=0).body).replace('"notes": 0', f'"notes": {"[" * depth}{"]" * depth}')
    rollout, _ = await play(lambda request, number: Sent(body), retries=0)
    assert "the response is not a chat completion" in str(rollout.error)
