"""What tyro says of a command line that it refuses, as one line."""

import re
from collections.abc import Sequence
from itertools import pairwise

_TITLE_OR_END = re.compile(r"[╭╰]| \S")
_FLAG = re.compile(r"--?[a-zA-Z]")
_RULE = re.compile(r"[─-]+")
_UNKNOWN = re.compile(r"Unrecognized options: ?(.*)")
_MEANT = re.compile(r"Perhaps you meant: (-[\w.-]+)")
_TYPE = re.compile(r" into \w+ type typing\..*")
_NEEDED = re.compile(r"Missing from .*?: (\S+) (.*?)(?: \(required\))?$")


def refusal(said: str, arguments: Sequence[str] = ()) -> str:
    """Return what tyro's framed text says in one line: the word that is wrong, and the option that may be meant.

    A word that is one too many among the `arguments` is named with the option in front of it.
    """
    parts = [" ".join(part) for part in _sections(said)]
    text = parts[0] if parts else " ".join(said.split())
    if (unknown := _UNKNOWN.match(text)) is not None:
        return _of_unknown(unknown[1].split(", "), " ".join(parts[1:]), arguments)
    if (needed := _NEEDED.match(text)) is not None:
        return f"{needed[1]} is missing: {_plain(needed[2])}"
    return _plain(text.partition(" Got errors:")[0])


def _sections(said: str) -> list[list[str]]:
    """Return the lines below the title, cut where a line is drawn across; there are no sides where stdout is ASCII."""
    found: list[list[str]] = [[]]
    for line in said.splitlines():
        words = line.strip("│ ")
        if _TITLE_OR_END.match(line) or not words:
            continue
        if _RULE.fullmatch(words):
            found.append([])
        else:
            found[-1].append(words)
    return [part for part in found if part]


def _of_unknown(words: list[str], hint: str, arguments: Sequence[str]) -> str:
    flag = next((word for word in words if _FLAG.match(word)), None)
    if flag is None:
        given = [part.strip() for word in arguments for part in word.split("=", 1)]
        behind = [f" after {one}" for one, word in pairwise(given) if word == words[0] and _FLAG.match(one)]
        return f"{words[0]!r}{''.join(behind[:1])} is one word too many"
    meant = _MEANT.search(hint)
    return f"there is no option {flag}" + (f"; did you mean {meant[1]}?" if meant else "")


def _plain(text: str) -> str:
    """Return a sentence as a part of another one."""
    return _TYPE.sub("", text[:1].lower() + text[1:]).removesuffix(".")
