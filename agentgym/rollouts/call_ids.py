"""Ids of tool calls: no two calls of a conversation have the same one."""

import re
from collections.abc import Sequence
from typing import Self

import numpy as np

from agentgym.seeds import seed_for
from agentgym.types.messages import Message, ToolCall

_CHARACTERS = 36
"""Number of different characters in an id: the digits and the lowercase letters."""
_LENGTH = 9
"""Number of characters of an id. Mistral's templates accept only ids of nine letters and digits."""
_NUMBERED = re.compile(r"(.*:)\d+", re.DOTALL)


class CallIds:
    """Gives an id to each call of one conversation. It remembers the ids of calls that the context no longer contains.

    An id that the model or the endpoint wrote is kept, unless an earlier call of the conversation has it. Then one that
    ends with a number, such as "functions.look:0", gets another number, because Kimi's templates show a call's name
    only as a part of its id. Other ids are derived from the rollout's seed and the conversation's name, so a repeated
    rollout has the same ids, and its forks and sub-agents have different ones.

    Args:
        of: What distinguishes the conversation from others: the rollout's seed, and the conversation's name.
        messages: The messages that the conversation starts with. The ids of their calls are not given again.
    """

    def __init__(self, of: Sequence[int | str], messages: Sequence[Message]) -> None:
        self._of, self._made = tuple(of), 0
        self._known = {call.get("id", "") for message in messages for call in message.get("tool_calls", ())}

    def branch(self, name: str, messages: Sequence[Message] = ()) -> Self:
        """Return the ids of a conversation that starts from this one, in which the ids so far are not given again.

        Args:
            name: What distinguishes it from all others that start from this one.
            messages: Messages that it starts with.
        """
        other = type(self)((*self._of, name), messages)
        other._known |= self._known
        return other

    def named(self, message: Message) -> Message:
        """Return the message with an id for each of its calls, without changing the message that was given."""
        calls = message.get("tool_calls")
        return message if not calls else {**message, "tool_calls": [self._named(call) for call in calls]}

    def _named(self, call: ToolCall) -> ToolCall:
        id = self._numbered(call.get("id", ""))
        while not id or id in self._known:
            number = seed_for("call id", *self._of, self._made) % _CHARACTERS**_LENGTH
            id = np.base_repr(number, _CHARACTERS).lower().zfill(_LENGTH)
            self._made += 1
        self._known.add(id)
        return {**call, "id": id}

    def _numbered(self, id: str) -> str:
        """Return the id that the model wrote, with another number if it ends with one and is already known."""
        numbered = _NUMBERED.fullmatch(id)
        number = len(self._known)
        while numbered and id in self._known:
            id, number = f"{numbered[1]}{number}", number + 1
        return id
