"""Facts about a chat template, found once: words it searches for, chats it rejects, and text it writes after a turn."""

import logging
import re
from array import array
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from agentgym.chat.fitting import wants_calls
from agentgym.chat.special_tokens import SpecialTokens
from agentgym.chat.template_deltas import TemplateDeltaCache, after_nth
from agentgym.types.messages import Message

_LOG = logging.getLogger(__name__)
_ASK = Message(role="user", content="?")
_OPENINGS = 64
"""Maximum number of cached first prompts per tokenizer."""
_SHOWN = "Qzx0xzQ"
"""A content that doesn't occur in any template."""
_WORDS = "Qzx1xzQ"
"""The same for an assistant's turn."""


class Renders(Protocol):
    """The methods of a ChatTokenizer that a Template calls."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation: bool) -> str:
        """Return the chat as text.

        Every special token in a message's content is broken (`SpecialTokens.guarded`), so that `encode` gives it the
        ids of its characters.

        Args:
            messages: The messages of the chat.
            tools: The schemas of the tools.
            generation: Whether the text ends with the opening of an assistant turn.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text, with nothing added.

        A whole special token becomes its own id, a broken one the ids of its characters. A lone surrogate, which
        UTF-8 can't encode, is encoded as U+FFFD.

        Args:
            text: Text that `render` returned, or a part of it.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, including special tokens."""
        ...


class Opening(NamedTuple):
    """A cached first prompt: its text, the messages in the form that the template accepted, and its ids."""

    text: str
    shown: Sequence[Message]
    ids: "array[int]"


class Template:
    """Facts about one tokenizer's template, found by rendering test chats, and texts cached from earlier renders.

    It lives as long as its tokenizer, so it must not refer to the tokenizer.
    """

    def __init__(self, tokenizer: Renders) -> None:
        self.sought: re.Pattern[str] | None = any_of(getattr(tokenizer, "sought", ()))
        """A pattern of the words that change the template's output. It is made from the tokenizer's attribute `sought`.
        """
        self.alone: bool = getattr(tokenizer, "splits_at_special_tokens", False)
        """Whether text after a special token has the same ids as when encoded alone.

        A tokenizer declares this in `splits_at_special_tokens`.
        """
        literals: Collection[str] | None = getattr(tokenizer, "literals", None)
        self._literals = any_of(literals or ())
        self._special_tokens: SpecialTokens | None = (
            None if literals is None else getattr(tokenizer, "special_tokens", None)
        )
        self.asked = "\0"
        """The rendered text of a chat with a single question. Before it is known, a character with which no rendered
        text starts.
        """
        self.deltas = TemplateDeltaCache(self.passes)
        self.openings: dict[Hashable, Opening] = {}
        """Cached first prompts, keyed by everything that they depend on, because all rollouts of a group start with the
        same prompt.
        """
        self._makes_arrays = _makes_arrays(type(tokenizer))
        self._wants_calls: bool | None = None
        self._ends: dict[tuple[str, str, bool, bool], bool] = {}
        self._moves: dict[tuple[str, bool, bool], bool] = {}
        self._texts: dict[int, str] = {}

    def encode(self, tokenizer: Renders, text: str) -> "array[int]":
        """Return the ids of a rendered text. If the tokenizer has an `id_array` method, no list is created."""
        if self._makes_arrays:
            made: array[int] = tokenizer.id_array(text)  # type: ignore[attr-defined]
            return made
        return array("q", [*tokenizer.encode(text)])

    def remember(self, key: Hashable, opening: Opening) -> None:
        """Store a first prompt. If there are too many, clear the cache first."""
        if len(self.openings) >= _OPENINGS:
            self.openings.clear()
        self.openings[key] = opening

    def passes(self, message: Message) -> bool:
        """Return whether a message's content contains nothing that the template could search for.

        It must contain no special token and no text from the template's own source. The result is False if the
        tokenizer doesn't declare these (`special_tokens`, `literals`).
        """
        text = message["content"]
        if self._special_tokens is None or (self._literals is not None and self._literals.search(text)):
            return False
        return bool(self._special_tokens.text(text, message["role"]) == text)

    def end_text(self, tokenizer: Renders, last: int) -> str:
        """Return the text of the id that ended a turn. The texts are cached."""
        text = self._texts.get(
            last
        )  # One lookup: a thread that renders a large request may clear the dict at any time.
        if text is None:
            if len(self._texts) >= 64:
                self._texts.clear()
            text = self._texts[last] = tokenizer.decode([last])
        return text

    def wants_calls(self, tokenizer: Renders) -> bool:
        """Return whether the template needs a call before a tool message, even if the model's call was malformed."""
        if self._wants_calls is None:
            self._wants_calls = wants_calls(lambda messages: tokenizer.render(messages, [], generation=True))
        return self._wants_calls

    def ends(self, tokenizer: Renders, end: str, reply: Message, new: Sequence[Message]) -> bool:
        """Return whether the template writes `end` directly after a reply like this one, before the answer to it.

        Some models end a turn with the special token of the next speaker, and may choose the wrong one.
        """
        if not new:
            return True
        key = (end, new[0]["role"], "tool_calls" in reply, bool(reply["content"]))
        ends = self._ends.get(key)
        if ends is None:
            if len(self._ends) >= 64:
                self._ends.clear()
            ends = self._ends[key] = self._ask_end(tokenizer, end, reply, new[0])
        return ends

    def _ask_end(self, tokenizer: Renders, end: str, reply: Message, first: Message) -> bool:
        before, whole = self._asked_about(tokenizer, reply, first)
        if not whole.startswith(before) or _SHOWN not in whole:
            return True
        at = after_nth(whole, end, len(before), 0)
        return at is not None and _SHOWN not in whole[len(before) : at] and _WORDS not in whole[at:]

    def moves_words(self, tokenizer: Renders, reply: Message, new: Sequence[Message]) -> bool:
        """Return whether the template writes the content of a reply like this one after the answer to it.

        Gemma 4's templates do so if the reply has calls, and then close the turn, even if the model is to continue it.
        """
        if not new or not reply["content"]:
            return False
        key = (new[0]["role"], "tool_calls" in reply, "reasoning_content" in reply)
        moves = self._moves.get(key)
        if moves is None:
            _, whole = self._asked_about(tokenizer, reply, new[0])
            moves = self._moves[key] = -1 < whole.find(_SHOWN) < whole.rfind(_WORDS)
        return moves

    def _asked_about(self, tokenizer: Renders, reply: Message, first: Message) -> tuple[str, str]:
        """Render a question alone, and followed by a reply and an answer whose contents are markers.

        Args:
            tokenizer: The tokenizer with the template.
            reply: The reply. Its content becomes `_WORDS`, unless it is empty.
            first: The first message of the answer. Its content becomes `_SHOWN`.

        Returns:
            Both texts, or twice "" if the template rejects the messages.
        """
        said, answer = reply.copy(), first.copy()
        said["content"], answer["content"] = _WORDS if reply["content"] else "", _SHOWN
        try:
            before = tokenizer.render([_ASK], [], generation=True)
            return before, tokenizer.render([_ASK, said, answer], [], generation=True)
        except Exception:  # The template rejects these messages, so we can't tell.
            return "", ""


def _makes_arrays(kind: type) -> bool:
    """Return whether a tokenizer class encodes with `id_array`, and no subclass overrides `encode`."""
    own = next((names for each in kind.__mro__ if {"encode", "id_array"} & (names := vars(each).keys())), ())
    return "id_array" in own


def template_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the variables that a user gives for a chat template, and return a copy.

    Raises:
        ValueError: If one of them is a variable that the chat sets itself.
    """
    own = sorted(given.keys() & _OWN)
    if own:
        raise ValueError(
            f"chat_template_kwargs: {', '.join(own)} cannot be set here, because the chat sets them itself; remove them"
        )
    return dict(given)


def warn_of_unused(variables: Collection[str], template: str) -> None:
    """Log a warning that names the variables that don't occur in the template's source."""
    unused = sorted(name for name in variables if re.search(rf"\b{re.escape(name)}\b", template) is None)
    if unused:
        _LOG.warning("chat_template_kwargs: the chat template does not use %s; check the spelling", ", ".join(unused))


def template_text(given: Path | str) -> str:
    """Return a chat template: the contents of the file with that name, or the text itself.

    Raises:
        ValueError: If `given` is neither a template's text nor a readable file.
    """
    if "{" in str(given):
        return str(given)
    try:
        return Path(given).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat_template: {given} cannot be read ({type(error).__name__}); pass a Jinja file or the template's text"
        ) from None


_OWN = frozenset(
    ["conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict"]
)


_QUOTED = r"(['\"])((?:(?!\1).)+)\1"
_IN = re.compile(_QUOTED + r"\s+(?:not\s+)?in\b")


_ASKED = re.compile(r"\.(?:startswith|endswith|split|rsplit|replace|find|index|count|partition)\(\s*" + _QUOTED)


_KEYS = frozenset(
    {"role", "content", "reasoning_content", "reasoning", "thinking", "tool_calls", "tool_call_id", "name", "function"}
    | {"arguments", "parameters", "id", "type", "text", "image", "image_url", "video", "audio", "properties", "items"}
    | {"required", "description", "return", "enum"}
)
"""Names of message fields. A template that checks whether a message has such a field doesn't search its text."""


def sought_words(template: str) -> set[str]:
    """Return the words that the template's source compares texts with, except the names of message fields."""
    found = {match[2] for pattern in (_IN, _ASKED) for match in pattern.finditer(template)}
    words = {word.replace("\\n", "\n") for word in found - _KEYS}
    return {word for word in words if word.strip()}


_BLOCK = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_LITERAL = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)


def literals(template: str) -> set[str]:
    """Return the quoted texts in the template's source that contain more than letters, digits, _ and spaces."""
    found = {
        (one or other).replace("\\n", "\n").strip()
        for block in _BLOCK.findall(template)
        for one, other in _LITERAL.findall(block)
    }
    return {text for text in found if not text.replace("_", "").replace(" ", "").isalnum() and text}


def any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches any of the words, or None if there are none."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
