"""The version of an environment when a result was measured."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVersion:
    """An env's version when a result was measured."""

    where: str
    """The class, as MODULE:CLASS."""
    version: str | None = None
    """The version that the class declares, or else its package's version; None if there is neither."""
    sha256: str | None = None
    """The hash of its files; None for a class that isn't in a file, such as one in a notebook."""

    def __str__(self) -> str:
        parts = [self.where, self.version and f"version {self.version}", self.sha256 and f"sha256 {self.sha256[:12]}"]
        return ", ".join(part for part in parts if part)


def as_json(versions: Mapping[str, EnvVersion]) -> dict[str, dict[str, str | None]]:
    """Return the versions in the form in which a run's settings store them."""
    return {name: {"where": of.where, "version": of.version, "sha256": of.sha256} for name, of in versions.items()}
