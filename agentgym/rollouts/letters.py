"""Writing a text's marks in letters: ids of a rendering in which the marks of contents are broken."""

import json
from typing import Any

from agentgym.rollouts.marks import is_broken, unbroken


class Letters:
    """Encodes what `render` made of contents with marks; such texts are rare, and encoded whole."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.marks = frozenset(backend.get_added_tokens_decoder())
        self._markless: Any = None

    def encode(self, text: str) -> list[int]:
        """The ids of the text without its breaks; a mark that a break stands in has the ids of its letters."""
        plain, breaks = unbroken(text)
        made = self.backend.encode(plain, add_special_tokens=False)
        if not breaks or not any(token in self.marks for token in made.ids):
            return list(made.ids)
        ids: list[int] = []
        for token, (start, stop) in zip(made.ids, made.offsets, strict=True):
            if token in self.marks and is_broken(start, stop, breaks):
                ids += self._spelled(plain[start:stop])
            else:
                ids.append(token)
        return ids

    def _spelled(self, mark: str) -> list[int]:
        for parts in ([mark], [mark[0], mark[1:]], [*mark]):
            ids = [token for part in parts for token in self._plainly(part)]
            if ids and self.marks.isdisjoint(ids):
                return ids
        raise ValueError(f"messages: the text {mark!r} is a mark of the tokenizer, which cannot write it in letters")

    def _plainly(self, text: str) -> list[int]:
        """The ids of a text by a tokenizer that knows no marks."""
        if self._markless is None:
            from tokenizers import Tokenizer

            state = json.loads(self.backend.to_str())
            self._markless = Tokenizer.from_str(json.dumps(state | {"added_tokens": [], "post_processor": None}))
            self._markless.no_truncation()
            self._markless.no_padding()
        ids: list[int] = self._markless.encode(text, add_special_tokens=False).ids
        return ids
