"""Findings of a check, and the one error that reports all of them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake in an env."""

    kind: str
    """The check that found it, as listed in docs/testing.md."""
    wrong: str
    """What is wrong."""
    change: str
    """The change that the env's author should make."""

    def __str__(self) -> str:
        return " ".join(f"{self.kind}: {self.wrong}: {self.change}".splitlines())


def report(name: str, findings: Sequence[Finding]) -> None:
    """Raise one AssertionError with a line for each finding, if there are any."""
    if findings:
        raise AssertionError("\n".join([f"check_env({name}): {counted(findings)}", *map(str, findings)]))


def counted(findings: Sequence[Finding]) -> str:
    """Return the number of findings with its noun, as in "2 findings"."""
    return "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
