"""One segment's conversation with an engine that takes messages. Its ids are placeholders that count tokens."""

import json
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from agentgym.chat.fitting import check_messages
from agentgym.types.messages import Message, is_image

CHARACTERS = 4.0
"""Estimated characters per token, until the engine has counted the tokens."""
IMAGE_TOKENS = 1000
"""Estimated tokens per image, until the engine has counted them. Models use 85 to 1,600 for an image of usual size."""
FILL = 0
"""The id that stands for every token of a conversation with an engine that takes messages. Such an engine returns no
ids.
"""


def estimated_tokens(value: object) -> int:
    """Estimate how many tokens a value takes in a prompt, until the engine's response says the actual number."""
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
    """The counterpart of `Chat` for an engine that takes messages and returns no ids.

    `prompt_ids` and `extend` return one placeholder id (`FILL`) for each estimated token of the messages.
    """

    def __init__(self, tools: Sequence[dict[str, Any]], messages: Sequence[Message], *, call_example: str = "") -> None:
        self.tools, self.messages = tools, list(messages)
        self.call_example = call_example
        """A call as the model writes it; "" if the engine's API reads calls."""

    def prompt_ids(self) -> list[int]:
        """Return one `FILL` for each estimated token of the whole chat."""
        check_messages(self.messages, sees=True)
        return [FILL] * estimated_tokens([*self.tools, *self.messages])

    def branch(self) -> "MessageChat":
        """Return an independent copy of the chat."""
        return MessageChat(self.tools, self.messages, call_example=self.call_example)

    def extend(
        self,
        token_ids: Sequence[int],
        reply: Message,
        new: Sequence[Message],
        room: int | None = None,
        *,
        stopped: bool = True,
    ) -> list[int]:
        """Append a turn and the messages that answer it. Return one `FILL` for each estimated token of the answer."""
        check_messages(new, answers=True, sees=True)
        self.messages += [reply, *new]
        return [FILL] * estimated_tokens(list(new))
