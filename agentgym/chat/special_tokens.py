"""Escaping of special tokens in contents, so that text from a user, a tool or a file never becomes a special token.

A tokenizer recognizes the text of a special token anywhere in its input. `render` therefore breaks each special token
in a message's content with one character that doesn't occur in normal text. `encode` drops that character and encodes
the special token as plain characters::

    content    ok<|im_end|>
    rendered   <|im_start|>tool\\nok<BREAK|im_end|><|im_end|>
    ids        <|im_start|> | tool\\nok | < | | | im | _ | end | |> | <|im_end|>

Ids that the engine sampled are not affected.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, cast

from agentgym.types.json_values import whole_characters
from agentgym.types.messages import Message

BREAK = "\ufdd0"
"""The character that breaks a special token, one of Unicode's noncharacters. If a content already contains this
character, each occurrence is doubled.
"""
_TYPED = frozenset({"user", "tool"})
"""Roles in whose contents every special token is broken."""


def unbroken(text: str) -> tuple[str, list[int]]:
    """Return the text without breaks, and the positions of the breaks in it."""
    if BREAK not in text:
        return text, []
    parts, breaks, length = list[str](), list[int](), 0
    for n, run in enumerate(re.split(f"({BREAK}+)", text)):
        kept = BREAK * (len(run) // 2) if n % 2 else run
        if n % 2 and len(run) % 2:
            breaks.append(length)
        parts.append(kept)
        length += len(kept)
    return "".join(parts), breaks


def is_broken(start: int, stop: int, breaks: Sequence[int]) -> bool:
    """Return whether a break follows one of the characters with the indices `start` to `stop` - 1."""
    return bisect_right(breaks, stop) > bisect_right(breaks, start)


class SpecialTokens:
    """One tokenizer's special tokens, and methods that break those that occur in a message's content.

    In the text of users and tools, every special token is broken. In the text of the system and the assistant, and in
    the tools' schemas, only special tokens that delimit turns are broken. Others, such as <think> and <tool_call>, stay
    whole, because prompts and models write them on purpose.
    """

    def __init__(self, every: Iterable[str], turns: Iterable[str] = ()) -> None:
        self.every = frozenset(every)
        self._every, self._turns = _Breaker({*self.every}), _Breaker({*turns})

    def guarded(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, with the special tokens in their contents broken.

        Messages that need no change are returned as the same objects.
        """
        return [cast("Message", self._of(message["role"]).value(message)) for message in messages]

    def guarded_tools(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the tools' schemas, with the special tokens that delimit turns broken."""
        return [cast("dict[str, Any]", self._turns.value(tool)) for tool in tools]

    def text(self, text: str, role: str) -> str:
        """Return the content of a message with this role, with its special tokens broken."""
        return self._of(role).text(text)

    def _of(self, role: str) -> "_Breaker":
        return self._every if role in _TYPED else self._turns


class _Breaker:
    """Breaks the special tokens of one set wherever they occur in a text."""

    def __init__(self, special_tokens: set[str]) -> None:
        special_tokens = {special for special in special_tokens if special}
        longest_first = "|".join(re.escape(special) for special in sorted(special_tokens, key=len, reverse=True))
        self._found = re.compile("|".join(filter(None, [longest_first, f"[{BREAK}\ud800-\udfff]"])))
        # Special tokens may overlap, so each position at which one begins is matched separately.
        self._begins = re.compile(f"(?=(?:{longest_first}))[\\s\\S]" if special_tokens else "(?!)")
        self._heads = {special[:n] for special in special_tokens for n in range(1, len(special))}
        self._tails = {special[n:] for special in special_tokens for n in range(1, len(special))}
        self._head_lasts, self._tail_firsts = {head[-1] for head in self._heads}, {tail[0] for tail in self._tails}
        firsts, lasts = ("".join({special[n] for special in special_tokens}) for n in (0, -1))
        self._hints = re.compile("[" + re.escape(firsts + lasts) + f"{BREAK}\ud800-\udfff]")
        self._longest = max(map(len, special_tokens), default=0)

    def text(self, text: str) -> str:
        """Return the text with a break after the first character of each special token."""
        if not self._hints.search(text):
            return text
        if self._found.search(text):
            text = whole_characters(text).replace(BREAK, BREAK * 2)
            text = self._begins.sub(rf"\g<0>{BREAK}", text)
        return self._apart(text)

    def _apart(self, text: str) -> str:
        """Break the ends of a text if they could form a special token together with the template's adjacent text."""
        if text[0] in self._tail_firsts and any(text[:n] in self._tails for n in range(1, self._longest)):
            behind = text[1:]
            run = len(behind) - len(behind.lstrip(BREAK))
            text = text if run % 2 else f"{text[0]}{BREAK}{behind}"
        if text[-1] in self._head_lasts and any(text[-n:] in self._heads for n in range(1, self._longest)):
            text += BREAK
        return text

    def value(self, value: Any) -> Any:
        """Return the value with every text in it broken, including keys, or the same object if nothing changes."""
        if isinstance(value, str):
            return self.text(value) if self._hints.search(value) else value
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, (list, tuple)):
            items = [self.value(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        return value

    def _dict(self, value: dict[str, Any]) -> dict[str, Any]:
        changed = {}
        for key, item in value.items():
            name, made = key if key in _FIELDS else self.value(key), self.value(item)
            if name is not key or made is not item:
                changed[key] = (name, made)
        return dict(changed.get(key, (key, item)) for key, item in value.items()) if changed else value


_FIELDS = frozenset(
    {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "id", "type", "function"}
)
"""Keys of messages and tool calls that need no check, because they contain no special token."""


class BrokenMarkEncoder:
    """Encodes rendered texts that contain broken special tokens. Such texts are rare, so they are encoded whole."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.special_tokens = frozenset(backend.get_added_tokens_decoder())
        self._markless: Any = None
        self._letters: dict[str, list[int]] = {}
        """The ids of the characters of each special token that was found broken so far, by its text."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text without its breaks. A broken special token gets the ids of its characters."""
        plain, breaks = unbroken(text)
        (made,) = self.backend.encode_batch(
            [plain], add_special_tokens=False
        )  # Unlike `encode`, this lets other threads run.
        if not breaks or not any(token in self.special_tokens for token in made.ids):
            return list(made.ids)
        ids: list[int] = []
        for token, (start, stop) in zip(made.ids, made.offsets, strict=True):
            if token in self.special_tokens and is_broken(start, stop, breaks):
                ids += self._spelled(plain[start:stop])
            else:
                ids.append(token)
        return ids

    def _spelled(self, special: str) -> list[int]:
        if special not in self._letters:
            self._letters[special] = self._spell(special)
        return self._letters[special]

    def _spell(self, special: str) -> list[int]:
        for parts in ([special], [special[0], special[1:]], [*special]):
            ids = [token for part in parts for token in self._plainly(part)]
            if ids and self.special_tokens.isdisjoint(ids):
                return ids
        raise ValueError(
            f"messages: the tokenizer cannot encode its added token {special!r} as plain text; remove that text"
        )

    def _plainly(self, text: str) -> list[int]:
        """Return the ids of a text, encoded by the same tokenizer without its added tokens."""
        if self._markless is None:
            from tokenizers import Tokenizer

            state = json.loads(self.backend.to_str())
            self._markless = Tokenizer.from_str(json.dumps(state | {"added_tokens": [], "post_processor": None}))
            self._markless.no_truncation()
            self._markless.no_padding()
        ids: list[int] = self._markless.encode(text, add_special_tokens=False).ids
        return ids
