"""What a check found wrong, and the one error that reports all of it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake of an env: its kind, what is wrong, and what its author should change."""

    kind: str
    wrong: str
    change: str

    def __str__(self) -> str:
        return " ".join(f"{self.kind}: {self.wrong}: {self.change}".splitlines())


def report(name: str, findings: Sequence[Finding]) -> None:
    """Raise one AssertionError with every finding on a line of its own; nothing where there are none."""
    lines = list(dict.fromkeys(str(finding) for finding in findings))
    if lines:
        count = "1 finding" if len(lines) == 1 else f"{len(lines)} findings"
        raise AssertionError("\n".join([f"check_env({name}): {count}", *lines]))
