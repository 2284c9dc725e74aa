"""The benchmarks that are published, in the order of the page, and how each is run."""

import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
KEPT = FOLDER.parent / "results"
PEERS = Path(".venv-bench-peers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a benchmark is run."""

    name: str
    full: tuple[str, ...] | None = ()
    """Arguments of the run that is published; None: it runs only where it is asked for by name, as on a GPU."""
    quick: tuple[str, ...] | None = None
    """Arguments of the run by which continuous integration compares; None where there is none."""

    def command(self, *, quick: bool = False) -> list[str]:
        """The command, by this Python."""
        arguments = (self.quick if quick else self.full) or ()
        return [sys.executable, "-m", f"benchmarks.{self.name}", "--json", *arguments]

    def kept(self, *, quick: bool = False) -> Path:
        """The file that keeps what the run found."""
        return (KEPT / "quick" if quick else KEPT) / f"{self.name}.json"


PLANS = (
    Plan(name="layout"),
    Plan(name="families", full=("--shard",)),
    Plan(name="planning", quick=()),
    Plan(name="logprobs"),
    Plan(name="advantages", quick=()),
    Plan(name="branches"),
    Plan(name="engine"),
    Plan(name="train"),
    Plan(name="gpu", full=None),
    Plan(name="oversample"),
    Plan(name="driver", quick=("--quick",)),
    Plan(name="words"),
    Plan(name="http"),
    Plan(name="scale"),
    Plan(name="store"),
    Plan(name="view"),
    Plan(name="sandbox"),
    Plan(name="start"),
)
