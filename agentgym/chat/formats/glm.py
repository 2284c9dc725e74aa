"""The format of GLM 4.5 and later: the name, then <arg_key> and <arg_value> pairs, cast by the tool's schema."""

from agentgym.chat.formats.response_format import Reading, ResponseFormat, Tools
from agentgym.chat.formats.tagged import Tags, read_tagged
from agentgym.chat.reasoning import TAGGED_CALL

_TAGS = Tags(
    call=r"<tool_call>\s*+(?P<name>[^\s<{\[(]++)(?=\s*+(?:<arg_key>|</tool_call>|\Z))",
    argument=r"<arg_key>(?P<key>[^<]++)</arg_key>\s*+<arg_value>",
    argument_mark="<arg_key>",
    value_end="</arg_value>",
    call_end="</tool_call>",
)


def _read(text: str, tools: Tools) -> Reading:
    return read_tagged(text, tools, _TAGS)


GLM = ResponseFormat(
    name="glm",
    marks=("<arg_key>", "<tool_call>"),
    example="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
    call_marks=(TAGGED_CALL,),
    read=_read,
)
