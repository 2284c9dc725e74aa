"""Chat tokenizers: messages to token ids and back."""

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agentgym.chat.encoding import Decoder, SpecialTokenSplitter
from agentgym.chat.formats import response_format_of
from agentgym.chat.formats.calls import raw_call
from agentgym.chat.parsing import message_of
from agentgym.chat.reasoning import THINK, begins_inside, split_reasoning
from agentgym.chat.special_tokens import BREAK, BrokenMarkEncoder, SpecialTokens
from agentgym.chat.template import Renders, literals, sought_words, template_text, template_variables, warn_of_unused
from agentgym.chat.template_deltas import PLAIN
from agentgym.errors.extras import needs_extra
from agentgym.hub import find_model, loading
from agentgym.types.json_values import whole_characters
from agentgym.types.messages import Message


class ChatTokenizer(Renders, Protocol):
    """A tokenizer with a chat template and a parser for the model's output. Tokenizers are compared by identity."""

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        """Parse a sampled text into an assistant message, without ever raising.

        A call that isn't valid JSON keeps the model's text as its `arguments`.

        Args:
            text: The text of a turn, without its stop token.
            tools: The schemas of the tools.
        """
        ...


class HuggingFaceTokenizer:
    """A ChatTokenizer for a fast transformers tokenizer, its chat template and its response template.

    Args:
        tokenizer: The transformers tokenizer, which must have a chat template.
        response_template: The format that replies are parsed with, for transformers' `parse_response`. None uses the
            tokenizer's own, or else the known format (`agentgym.chat.formats`) that the chat template writes. If there
            is neither, a reply has no calls.
        chat_template_kwargs: Variables of the chat template, such as {"enable_thinking": False}.

    Raises:
        ValueError: If the tokenizer has no chat template, or if a variable is one that the chat sets itself.
    """

    def __init__(
        self,
        tokenizer: Any,
        response_template: dict[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "tokenizer: has no chat_template; set tokenizer.chat_template or use the model's chat version"
            )
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self.tokenizer = tokenizer
        self.variables = template_variables(chat_template_kwargs or {})
        # We use the Rust tokenizer directly: per turn, its wrappers cost more than the tokenizer itself.
        self.backend = tokenizer.backend_tokenizer
        source = tokenizer.get_chat_template()
        warn_of_unused(self.variables, source)
        template = response_template or getattr(tokenizer, "response_template", None)
        self.response_template = None if template is None else load_response_template(template)
        self.response_format = None if template is not None else response_format_of(source)
        self._pieces, self._letters = SpecialTokenSplitter(self.backend), BrokenMarkEncoder(self.backend)
        self.stop_ids = _as_set(tokenizer.eos_token_id)
        """The ids that end a turn according to the tokenizer's files."""
        self.special_token_ids = {token.content: i for i, token in self.backend.get_added_tokens_decoder().items()}
        """The id of each special token, by its text."""
        self.splits_at_special_tokens = self._pieces.pattern is not None
        self._decoder = Decoder(self.backend)
        self.special_tokens = SpecialTokens(())
        self.special_tokens = self._special_tokens()
        self.sought = sought_words(source) | {
            special for special in self.special_tokens.every if PLAIN.fullmatch(special)
        }
        self.literals = literals(source)
        """The string literals in the chat template, and so everything that it can search for in a content."""
        self.opening = self._opening()
        self._prefix = self._read_prefix()
        marks = self.response_format.reasoning if self.response_format else (THINK,)
        self._inside = begins_inside(self.opening, source, marks)

    def _special_tokens(self) -> SpecialTokens:
        """Return the tokenizer's special tokens: all added tokens.

        Those that are marked as special, or that the template writes around a user message, delimit turns.
        """
        added = self.backend.get_added_tokens_decoder().values()
        frame = self.render([Message(role="user", content="")], [], generation=False)
        turns = [token.content for token in added if token.special or token.content in frame]
        return SpecialTokens([token.content for token in added], turns)

    def _opening(self) -> str:
        """Return the text with which the template opens an assistant turn after a user message."""
        ask = [Message(role="user", content="")]
        closed = self.render(ask, [], generation=False)
        return self.render(ask, [], generation=True).removeprefix(closed)

    def _read_prefix(self) -> str:
        """Return the part of an assistant turn's opening that the parser reads before a reply.

        Text that the parser would take for content is left out.
        """
        if self.response_template is None:
            return ""
        read = self.tokenizer.parse_response("", self.response_template, prefix=self.opening)
        anchor = self.response_template.start_anchor_re.search(self.opening)
        leaks = bool(read.get("content")) and anchor is not None
        return self.opening[: anchor.end()] if leaks else self.opening

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            self.special_tokens.guarded(messages),
            tools=self.special_tokens.guarded_tools(tools) or None,
            tokenize=False,
            add_generation_prompt=generation,
            **self.variables,
        )
        return text

    def encode(self, text: str) -> list[int]:
        return self.id_array(text).tolist()

    def id_array(self, text: str) -> "array[int]":
        """Return the ids of `encode` as an array with eight bytes per id.

        Chats call this method, and so does `encode`.
        """
        text = whole_characters(text)
        return array("q", self._letters.encode(text)) if BREAK in text else self._pieces.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids)

    def token_bytes(self, token_ids: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of each id, which may be only part of a character. Unknown ids are left out."""
        return self._decoder.pieces(token_ids)

    def parse(self, text: str, tools: Sequence[dict[str, Any]]) -> Message:
        if self.response_format is not None:
            return self.response_format.parse(text, tools, inside=self._inside)
        if self.response_template is not None:
            return self._by_template(text, tools)
        thought, content = split_reasoning(text, inside=self._inside)
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
    model: Path | str, *, template: Path | str | None = None, template_kwargs: Mapping[str, Any] | None = None
) -> HuggingFaceTokenizer:
    """Load the chat tokenizer of a model.

    Args:
        model: The model's folder or its name on the Hugging Face hub.
        template: A chat template that replaces the model's own: a file, or the template's text.
        template_kwargs: Variables of the chat template, such as {"enable_thinking": False}.

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
        return HuggingFaceTokenizer(tokenizer, chat_template_kwargs=template_kwargs)
    except TemplateError as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ValueError(f"chat_template: cannot be rendered{line}: {error}; fix it or pass another one") from error


def _as_set(ids: int | list[int] | None) -> frozenset[int]:
    return frozenset() if ids is None else frozenset([ids]) if isinstance(ids, int) else frozenset(ids)
