"""Tools as text, for models whose chat template or API shows none: the Hermes format in the prompt.

The tools are listed at the end of the system message, calls are JSON within <tool_call> tags in the assistant's
content, and results stand within <tool_response> tags in a user message.
"""

import json
from collections.abc import Sequence
from typing import Any

from agentgym.types.messages import Function, Message, joined

_LISTED = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

"""
_HERMES = """\
For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""
"""Many models were trained on this wording of the Hermes format."""
_OWN = "To call a function, write the call in exactly this form:\n"


def with_tools(
    messages: Sequence[Message], tools: Sequence[dict[str, Any]], example: str | None = None
) -> list[Message]:
    """Return the messages with the tools listed at the end of the system message, which is created if there is none.

    Args:
        messages: The conversation.
        tools: The schemas of the tools. If there are none, nothing is added.
        example: A call as the model should write it. None describes the Hermes format.
    """
    if not tools:
        return list(messages)
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = _LISTED.replace("{tools}", listed) + (_HERMES if example is None else _OWN + example)
    if messages and messages[0]["role"] == "system":
        first = messages[0] | Message(role="system", content=joined([messages[0]["content"], told], "\n\n"))
        return [first, *messages[1:]]
    return [Message(role="system", content=told), *messages]


def calls_as_text(message: Message) -> Message:
    """Return a message whose calls are part of its content.

    If a call is malformed, the content already has the calls as the model wrote them, unless it is empty.
    """
    if "tool_calls" not in message:
        return message
    written = [_written(function) for function in (call["function"] for call in message["tool_calls"])]
    malformed = any(isinstance(call["function"]["arguments"], str) for call in message["tool_calls"])
    content = message["content"]
    if not malformed or not content:
        content = "\n".join([*filter(None, [content]), *written])
    said = message.copy()
    del said["tool_calls"]
    return said | Message(role=message["role"], content=content)


def _written(function: Function) -> str:
    if not function["name"] and isinstance(function["arguments"], str):
        return function["arguments"]  # the model's whole text
    return f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"


def results_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each turn's tool results as one user message."""
    made: list[Message] = []
    result_before = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            content = message["content"]
            told = joined(["<tool_response>", content, "</tool_response>"], "\n")
            if isinstance(content, str):
                told = f"<tool_response>\n{content}\n</tool_response>"
            if result_before:
                told = joined([made.pop()["content"], told], "\n")
            message = Message(role="user", content=told)
        made.append(message)
        result_before = is_result
    return made
