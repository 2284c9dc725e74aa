"""Tokenizers of each response format, and a tool that the calls in its tests name."""

from typing import Any

from agentgym.chat.formats import RESPONSE_FORMATS
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.types.messages import Message
from tests.support.family_tokenizers import family_tokenizer

END = "<|end of turn|>"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"at": {"type": "integer"}, "what": {"type": "string"}}},
        },
    }
]
ARGUMENTS = {"at": 3, "what": "a b"}
CALLED = [{"name": "look", "arguments": ARGUMENTS}]


def template_of(form: str, opening: str = "assistant: ") -> str:
    """Return a chat template that has the marks of the response format, for what is read rather than written."""
    opened = "{% if add_generation_prompt %}" + opening + "{% endif %}"
    marks = "".join(RESPONSE_FORMATS[form].marks)
    return "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + opened + "{# " + marks + " #}"


def tokenizer_of(form: str, opening: str = "assistant: ") -> HuggingFaceTokenizer:
    """Return a tokenizer whose chat template has the marks of the response format."""
    return family_tokenizer(template_of(form, opening), END, tools="template")


def calls(message: Message) -> list[Any]:
    """Return the functions that the message calls."""
    return [call["function"] for call in message.get("tool_calls", ())]
