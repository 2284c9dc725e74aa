"""Chat tokenizers: messages to token ids and back."""

import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from agentgym.chat.encoding import Decoder, SpecialTokenSplitter
from agentgym.chat.formats import HERMES, ResponseFormat, response_format_of
from agentgym.chat.formats.calls import raw_call
from agentgym.chat.parsing import message_of
from agentgym.chat.reasoning import THINK, begins_inside, split_reasoning
from agentgym.chat.special_tokens import BREAK, BrokenMarkEncoder, SpecialTokens
from agentgym.chat.template import Renders, literals, sought_words, template_text, template_variables, warn_of_unused
from agentgym.chat.template_deltas import PLAIN
from agentgym.chat.template_input import EXAMPLE, TemplateInput, ToolsIn
from agentgym.chat.template_probes import UNUSUAL, TemplateFacts, shows_tools, template_facts
from agentgym.errors.extras import needs_extra
from agentgym.hub import find_model, loading
from agentgym.types.json_values import whole_characters
from agentgym.types.messages import Message


class ChatTokenizer(Renders, Protocol):
    """A tokenizer with a chat template and a parser for the model's output. Tokenizers are compared by identity."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        how = self.response_format
        # A model that was told to write calls in the Hermes form may also write them in its own format.
        if tools and self.template_input.calls_as_text and (not self.reads_calls or _HERMES_CALL.search(text)):
            how = HERMES
        return self._parsed(text, how, tools, inside=self._inside)

    def _parsed(
        self, text: str, how: ResponseFormat | None, tools: Sequence[dict[str, Any]], *, inside: bool | None
    ) -> Message:
        if how is not None:
            return how.parse(text, tools, inside=inside)
        if self.response_template is not None:
            return self._by_template(text, tools)
        thought, content = split_reasoning(text, inside=inside)
        message = Message(role="assistant", content=content)
        if thought:
            message["reasoning_content"] = thought
        return message

    def _by_template(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        """Parse a text with transformers' parser and the response template."""
        try:
            parsed = self.tokenizer.parse_response(
                text, self.response_template, prefix=self._prefix, tools=[*tools] or None
            )
        except Exception:  # The model chose the text, and an agent may have chosen its tools' schemas.
            return Message(role="assistant", content=text, tool_calls=[raw_call(text)])
        return message_of(text, parsed)


def chat_tokenizer(
    model: Path | str,
    *,
    template: Path | str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: ToolsIn = "auto",
) -> HuggingFaceTokenizer:
    """Load the chat tokenizer of a model.

    Args:
        model: The model's folder or its name on the Hugging Face hub.
        template: A chat template that replaces the model's own: a file, or the template's text.
        template_kwargs: Variables of the chat template, such as {"enable_thinking": False}.
        tools: What describes the tools to the model: the chat template, or text in the system prompt. auto uses the
            template if it shows tools and the format of its calls is known, otherwise the prompt.

    Returns:
        The tokenizer.

    Raises:
        ValueError: If the template is neither a file nor a template's text, or can't be rendered; if a variable is
            one that the chat sets itself; or if the model's tokenizer can't be loaded or has no chat template.
    """
    with needs_extra():
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers import AutoTokenizer

    found = find_model(model)
    with loading(found):
        tokenizer = AutoTokenizer.from_pretrained(found)
    if template is not None:
        tokenizer.chat_template = template_text(template)
    try:
        return HuggingFaceTokenizer(tokenizer, chat_template_kwargs=template_kwargs, tools=tools)
    except TemplateError as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ValueError(f"chat_template: cannot be rendered{line}: {error}; fix it or pass another one") from error


_HERMES_CALL = re.compile(r"<tool_call>\s*+\{")


def _as_set(ids: int | list[int] | None) -> frozenset[int]:
    return frozenset() if ids is None else frozenset([ids]) if isinstance(ids, int) else frozenset(ids)
