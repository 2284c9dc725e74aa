"""A line of the reports of `agentgym doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check: whether something is available, and if not, how to get it."""

    name: str
    ok: bool
    detail: str
    get: str = ""
    otherwise: str = "missing"
    """The word that is printed if the finding is not ok."""

    def __str__(self) -> str:
        line = f"{'ok' if self.ok else self.otherwise:<9}{self.name:<16}{self.detail}".rstrip()
        return line if self.ok or not self.get else f"{line}\n{'':<25}-> {self.get}"
