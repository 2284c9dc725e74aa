"""Names of tools: which ones a tool may have, and which ones chat APIs take."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NameRule:
    """The characters that a name may have, and how many of them."""

    characters: str
    """The characters, as in brackets of a regular expression."""
    longest: int
    _valid: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_valid", re.compile(f"[{self.characters}]{{1,{self.longest}}}"))

    def allows(self, name: str) -> bool:
        """Return whether the rule allows a name."""
        return bool(self._valid.fullmatch(name))

    def nearest(self, name: str, taken: Container[str] = ()) -> str:
        """Return an allowed name that is like this one, and not one of those that are taken."""
        made = re.sub(f"[^{self.characters}]", "_", name)[: self.longest] or "tool"
        found, number = made, 1
        while found in taken:
            number += 1
            found = f"{made[: self.longest - len(f'_{number}')]}_{number}"
        return found

    def renamed(self, names: Iterable[str]) -> dict[str, str]:
        """Return an allowed name for each of the names that the rule does not allow. No two of the names are the same.

        Args:
            names: Different names.
        """
        names = list(names)
        taken = {name for name in names if self.allows(name)}
        made: dict[str, str] = {}
        for name in names:
            if name not in taken:
                made[name] = self.nearest(name, {*taken, *made.values()})
        return made


TOOL = NameRule("A-Za-z0-9_./-", 128)
"""The names that a tool may have: those that the Model Context Protocol allows."""
API = NameRule("A-Za-z0-9_-", 64)
"""The names that the chat APIs of OpenAI and others accept."""


class SentNames:
    """The names under which a chat API gets tools, and their own names again for its calls."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        self._sent = API.renamed(tool["function"]["name"] for tool in tools)
        self._own = {sent: own for own, sent in self._sent.items()}

    def sent(self, name: str) -> str:
        """Return the name that the API gets, also for a name that the model invented."""
        return self._sent.get(name) or (name if API.allows(name) else API.nearest(name))

    def own(self, name: str) -> str:
        """Return the tool's own name for one that the API sent."""
        return self._own.get(name, name)

    def tools(self, tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the descriptions of tools with the names that the API gets."""
        return [
            {**tool, "function": {**tool["function"], "name": self.sent(tool["function"]["name"])}} for tool in tools
        ]


def check_tool_name(name: str, where: str, change: str) -> None:
    """Raise ValueError if a tool may not have this name.

    Args:
        name: The name.
        where: The start of the error's message.
        change: How to give the tool another name, with {} for that name.
    """
    if not TOOL.allows(name):
        raise ValueError(
            f"{where}: its name must have 1 to {TOOL.longest} characters, which may be a to z, digits, _, -, . and /; "
            + change.format(repr(TOOL.nearest(name)))
        )
