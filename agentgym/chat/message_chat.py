"""The conversation of one segment with an engine that is asked with messages: its ids only count tokens."""

import json
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from agentgym.chat.fitting import check_messages
from agentgym.types.messages import Message, is_image

CHARACTERS = 4.0
"""Characters of a token, where the engine has not counted them yet."""
IMAGE_TOKENS = 1000
"""Tokens of an image, where the engine has not counted them yet: models take from 85 to 1,600 for one of usual size."""
FILL = 0
"""The id that stands for every token: the engine gives none."""


def estimated_tokens(value: object) -> int:
    """Estimate how many tokens a value takes in a prompt; the engine's own count comes with its answer."""
    images = 0

    def plain(inner: Any) -> Any:
        nonlocal images
        if is_image(inner):
            images += 1
            return ""
        if isinstance(inner, Mapping):
            return {name: plain(item) for name, item in inner.items()}
        return [plain(item) for item in inner] if isinstance(inner, list | tuple) else inner

    return ceil(len(json.dumps(plain(value), ensure_ascii=False)) / CHARACTERS) + images * IMAGE_TOKENS


class MessageChat:
    """Does what `Chat` does, with one FILL for each token that the new messages are likely to take."""

    def __init__(self, tools: Sequence[dict[str, Any]], messages: Sequence[Message]) -> None:
        self.tools, self.messages = tools, list(messages)

    def prompt_ids(self) -> list[int]:
        """Return a FILL for each token that the whole chat is likely to take."""
        check_messages(self.messages, sees=True)
        return [FILL] * estimated_tokens([*self.tools, *self.messages])

    def branch(self) -> "MessageChat":
        """Return a copy that goes on from here by itself."""
        return MessageChat(self.tools, self.messages)

    def extend(
        self,
        token_ids: Sequence[int],
        reply: Message,
        new: Sequence[Message],
        room: int | None = None,
        *,
        stopped: bool = True,
    ) -> list[int]:
        """Take up a turn and its answer; return a FILL for each token that the answer is likely to take."""
        check_messages(new, answers=True, sees=True)
        self.messages += [reply, *new]
        return [FILL] * estimated_tokens(list(new))
