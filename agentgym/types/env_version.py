"""What an environment was when a result was measured."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVersion:
    """What an env was when a result was measured."""

    where: str
    """The class, as MODULE:CLASS."""
    version: str | None = None
    """The version that the class declares, else that of the package that it is of; None where there is neither."""
    sha256: str | None = None
    """The hash of its files; None for a class that is of no file, as in a notebook."""

    def __str__(self) -> str:
        parts = [self.where, self.version and f"version {self.version}", self.sha256 and f"sha256 {self.sha256[:12]}"]
        return ", ".join(part for part in parts if part)


def as_json(versions: Mapping[str, EnvVersion]) -> dict[str, dict[str, str | None]]:
    """Return the versions as they are kept in a run's settings."""
    return {name: {"where": of.where, "version": of.version, "sha256": of.sha256} for name, of in versions.items()}
