"""Chat tokenizers: messages to token ids and back."""

import logging
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from agentgym.chat.encoding import Decoder, SpecialTokenSplitter
from agentgym.chat.end_marks import missing_stop_marks
from agentgym.chat.formats import HERMES, ResponseFormat, response_format_of
from agentgym.chat.formats.calls import raw_call
from agentgym.chat.parsing import message_of
from agentgym.chat.reasoning import THINK, begins_inside, split_reasoning
from agentgym.chat.special_tokens import BREAK, BrokenMarkEncoder, SpecialTokens
from agentgym.chat.template import Renders, literals, sought_words, template_text, template_variables, warn_of_unused
from agentgym.chat.template_deltas import PLAIN
from agentgym.chat.template_input import EXAMPLE, TemplateInput, ToolsIn
from agentgym.chat.template_probes import ASK, UNUSUAL, TemplateFacts, shows_tools, template_facts
from agentgym.errors.extras import needs_extra
from agentgym.hub import WANTED, find_model, loading
from agentgym.types.json_values import whole_characters
from agentgym.types.messages import Message

_LOG = logging.getLogger(__name__)


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
        tools: What describes the tools to the model: the chat template, or text in the system prompt. auto uses the
            template if it shows tools and the format of its calls is known, otherwise the prompt.
        stop_ids: Ids that end a turn in addition to the tokenizer's own.

    Raises:
        ValueError: If the tokenizer has no chat template, if the template shows no text of a user's message, or if a
            variable is one that the chat sets itself.
    """

    def __init__(
        self,
        tokenizer: Any,
        response_template: dict[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: ToolsIn = "auto",
        stop_ids: Iterable[int] = (),
    ) -> None:
        if not tokenizer.chat_template:
            raise ValueError(
                "tokenizer: has no chat_template; give one (chat_template, --chat-template FILE.jinja), or use the "
                "model's chat version"
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
        self.stop_ids = _as_set(tokenizer.eos_token_id) | frozenset(stop_ids)
        """The ids that end a turn: those of the model's files, and those with which the chat template ends a turn."""
        self.special_token_ids = {token.content: i for i, token in self.backend.get_added_tokens_decoder().items()}
        """The id of each special token, by its text."""
        self.splits_at_special_tokens = self._pieces.pattern is not None
        self._decoder = Decoder(self.backend)
        self._input: TemplateInput | None = None
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
        self.tools: ToolsIn = tools
        """The setting that says what describes the tools to the model."""
        self.template_input = self._template_input()
        """How conversations are converted for the template."""
        self._input = None if self.template_input.changes_nothing else self.template_input
        self.stop_ids |= self._missing_stop_ids()
        self._warn_of_date()

    @property
    def call_example(self) -> str:
        """A call as the model writes it; "" if its format isn't one of `agentgym.chat.formats`."""
        if self.template_input.calls_as_text:
            return HERMES.example
        return self.response_format.example if self.response_format else ""

    def _special_tokens(self) -> SpecialTokens:
        """Return the tokenizer's special tokens: all added tokens.

        Those that are marked as special, or that the template writes around a user message, delimit turns.
        """
        added = self.backend.get_added_tokens_decoder().values()
        frame = self.render([ASK], [], generation=False)  # Some templates reject an empty content.
        turns = [token.content for token in added if token.special or token.content in frame]
        return SpecialTokens([token.content for token in added], turns)

    def _opening(self) -> str:
        """Return the text with which the template opens an assistant turn after a user message."""
        closed = self.render([ASK], [], generation=False)
        return self.render([ASK], [], generation=True).removeprefix(closed)

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

    @property
    def tools_shown_by(self) -> Literal["template", "prompt"] | None:
        """What shows the tools to the model: the chat template, text in the system prompt, or nothing."""
        if self.template_input.lists_tools:
            return "prompt"
        return "template" if self.template_input.facts.tools else None

    @property
    def reads_calls(self) -> bool:
        """Whether the format of the calls that the chat template writes is known."""
        return self.response_format is not None or self.response_template is not None

    def _template_input(self) -> TemplateInput:
        """Find out what the template shows, and choose the form of tools, calls and results.

        Raises:
            ValueError: If it shows no text of a user's message.
        """
        usable = self.reads_calls and shows_tools(self._probed)
        lists_tools = self.tools == "prompt" or (self.tools == "auto" and not usable)
        facts = template_facts(self._probed, tools=not lists_tools)
        if not facts.user:
            raise ValueError(
                "chat_template: shows no text of a user's message; pass a template for messages whose content is text"
            )
        if not lists_tools:
            return TemplateInput(facts, lists_tools=False, calls_as_text=False)
        example = self._written_call(facts)
        if example is None:
            return TemplateInput(facts, lists_tools=True, calls_as_text=True)
        example = self.special_tokens.text(example, "system")
        return TemplateInput(facts, lists_tools=True, calls_as_text=False, example=example)

    def _probed(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        return self._applied(messages, tools, generation=True)

    def _missing_stop_ids(self) -> frozenset[int]:
        """Return the ids with which the template ends a turn although they are no stop ids, and log a warning."""
        added = {token.content: token.special for token in self.backend.get_added_tokens_decoder().values()}
        missing = missing_stop_marks(
            lambda messages: self._applied(messages, [], generation=False),
            None if self.template_input.calls_as_text else self.template_input.facts.arguments,
            added,
            [mark for mark, token_id in self.special_token_ids.items() if token_id in self.stop_ids],
        )
        if missing:
            _LOG.warning(
                "stop tokens: the chat template ends a turn with %s, which is no stop token in the model's files; it "
                "stops turns here, and other servers need it as an eos_token_id in generation_config.json",
                " or ".join(missing),
            )
        return frozenset(self.special_token_ids[mark] for mark in missing)

    def _warn_of_date(self) -> None:
        """Log a warning if the chat template writes the current date, which makes prompts depend on the day."""
        without_date = {**self.variables, "strftime_now": ""}  # A text can't be called for the date.
        try:
            self.tokenizer.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True, **without_date)
        except Exception:  # jinja's own or Python's error for the call.
            _LOG.warning(
                "chat_template: writes the current date into each prompt, so the same seed gives other rollouts on "
                "another day; to prevent this, set the template's variable for the date, such as date_string, in "
                "chat_template_kwargs, or pass a template without the date (--chat-template)"
            )

    def _written_call(self, facts: TemplateFacts) -> str | None:
        """Return how the template writes a call; None if a call in that form isn't parsed back."""
        if facts.arguments is None or not self.reads_calls:
            return None
        shown = TemplateInput(facts, lists_tools=False, calls_as_text=False)
        ask = Message(role="user", content="?")
        try:
            said = self._applied([ask, Message(role="assistant", content=UNUSUAL)], [], generation=False)
            body = self._applied(shown.messages([ask, EXAMPLE], []), [], generation=False)
        except Exception:  # Templates can raise anything.
            return None
        begun = said.partition(UNUSUAL)[0]
        if not body.startswith(begun):
            return None
        body = body.removeprefix(begun)
        for end in (text for text, i in self.special_token_ids.items() if i in self.stop_ids):
            body = body.partition(end)[0].strip()
        calls = self._parsed(body, self.response_format, [], inside=False).get("tool_calls", ())
        return body if [call["function"] for call in calls] == [EXAMPLE["tool_calls"][0]["function"]] else None

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        shown, offered = self.special_tokens.guarded(messages), self.special_tokens.guarded_tools(tools)
        if self._input is None:
            return self._applied(shown, offered, generation=generation)
        return self._applied(self._input.messages(shown, offered), self._input.tools(offered), generation=generation)

    def _applied(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        """Return the text that the chat template makes of these messages and tools."""
        text: str = self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
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
        how = self.response_format
        # A model that was told to write calls in the Hermes format may also write them in its own format.
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
    if len(tokenizer.get_vocab()) <= len(tokenizer.added_tokens_decoder):  # transformers makes one up from the config
        raise ValueError(f"model: {model} has no tokenizer.json; add the model's tokenizer files; or {WANTED}")
    if template is not None:
        tokenizer.chat_template = template_text(template)
    try:
        return HuggingFaceTokenizer(
            tokenizer, chat_template_kwargs=template_kwargs, tools=tools, stop_ids=_generation_stop_ids(found)
        )
    except TemplateError as error:
        line = f" in line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ValueError(f"chat_template: cannot be rendered{line}: {error}; fix it or pass another one") from error


_HERMES_CALL = re.compile(r"<tool_call>\s*+\{")


def _generation_stop_ids(model: Path | str) -> frozenset[int]:
    """Return the stop ids in the model's generation config; none if it has no such file."""
    from transformers import GenerationConfig

    try:
        return _as_set(GenerationConfig.from_pretrained(model).eos_token_id)
    except (OSError, ValueError):
        return frozenset()


def _as_set(ids: int | list[int] | None) -> frozenset[int]:
    return frozenset() if ids is None else frozenset([ids]) if isinstance(ids, int) else frozenset(ids)
