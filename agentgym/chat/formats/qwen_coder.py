"""The format of Qwen3-Coder and Qwen3.5: <function=name> and <parameter=key> tags.

Values are text, cast by the tool's schema.
"""

from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.chat.formats.tagged import Tags, read_tagged
from agentgym.chat.reasoning import TAGGED_CALL

_TAGS = Tags(
    # Models leave out the line with <tool_call> now and then.
    call=r"(?:<tool_call>\s*+|^[ \t]*+|(?<=</function>)|(?<=</tool_call>))<function=(?P<name>[^>\n]+)>",
    argument=r"<parameter=(?P<key>[^>\n]+)>",
    argument_mark="<parameter=",
    value_end="</parameter>",
    call_end=r"</function>(?:\s*+</tool_call>)?|</tool_call>",
    trims=True,
)


def _read(text: str, tools: Tools) -> Reading:
    return read_tagged(text, tools, _TAGS)


QWEN_CODER = ResponseFormat(
    name="qwen_coder",
    marks=("<function=", "<parameter="),
    example="<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>",
    call_marks=(TAGGED_CALL, ("<function=", "</function>")),
    read=_read,
)
