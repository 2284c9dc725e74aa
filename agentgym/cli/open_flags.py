"""Flags whose names are not known beforehand, such as those of an env's parameters."""

from collections.abc import Sequence

from agentgym.cli.output import RefusedWords


def flags_in(words: Sequence[str], prefix: str, command: str) -> tuple[list[tuple[str, str]], list[str]]:
    """Return name and value of each flag with the prefix, `--PREFIX.NAME VALUE` or with `=`, and the other words.

    :raises RefusedWords: for a flag without a value; the message names it.
    """
    found: list[tuple[str, str]] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if not flag.startswith(prefix):
            others.append(word)
            continue
        value = text if equals else next(rest, "--")
        if not equals and value.startswith("--"):
            raise RefusedWords(f"{command}: {flag}: needs a value after it")
        found.append((flag.removeprefix(prefix), value))
    return found, others
