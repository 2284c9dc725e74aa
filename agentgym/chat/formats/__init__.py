"""The response formats of the common model families: how their models write reasoning and tool calls.

A tokenizer's own `response_template` takes precedence, and is read by transformers' `parse_response`. Otherwise, the
chat template is recognized by the delimiters that it writes, and its format's own parser reads the replies.
"""

from collections.abc import Mapping

from agentgym.chat.formats.deepseek import DEEPSEEK, DEEPSEEK_V3
from agentgym.chat.formats.dsml import DSML, DSML_V4
from agentgym.chat.formats.gemma import GEMMA
from agentgym.chat.formats.glm import GLM
from agentgym.chat.formats.harmony import HARMONY
from agentgym.chat.formats.hermes import HERMES
from agentgym.chat.formats.kimi import KIMI
from agentgym.chat.formats.llama import LLAMA
from agentgym.chat.formats.llama4 import LLAMA4
from agentgym.chat.formats.minimax import MINIMAX_M2, MINIMAX_M3
from agentgym.chat.formats.mistral import MISTRAL, MISTRAL_LIST
from agentgym.chat.formats.phi import FUNCTOOLS
from agentgym.chat.formats.pythonic import LFM2
from agentgym.chat.formats.qwen_coder import QWEN_CODER
from agentgym.chat.formats.response_format import ResponseFormat

__all__ = ["HERMES", "RESPONSE_FORMATS", "ResponseFormat", "response_format_of"]

_FORMATS = (
    HARMONY,
    QWEN_CODER,
    MINIMAX_M3,
    MINIMAX_M2,
    DSML,
    DSML_V4,
    KIMI,
    GEMMA,
    LFM2,
    LLAMA4,
    FUNCTOOLS,
    GLM,
    DEEPSEEK_V3,
    DEEPSEEK,
    MISTRAL,
    MISTRAL_LIST,
    LLAMA,
    HERMES,
)
RESPONSE_FORMATS: Mapping[str, ResponseFormat] = {one.name: one for one in _FORMATS}
"""The formats by name, those with the most specific delimiters first."""


def response_format_of(chat_template: str) -> ResponseFormat | None:
    """Return the format whose delimiters a chat template contains, or None if no format matches."""
    matching = (one for one in _FORMATS if all(mark in chat_template for mark in one.marks))
    return next(matching, None)
