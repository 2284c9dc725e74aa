"""The published benchmarks, in the order of the pages, and how each is run."""

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
    """Arguments of the published run; None if the benchmark runs only if it is named, such as one for a GPU."""
    quick: tuple[str, ...] | None = None
    """Arguments of the run that continuous integration compares, or None if there is none."""

    def command(self, *, quick: bool = False) -> list[str]:
        """Return the command that runs it with this Python."""
        arguments = (self.quick if quick else self.full) or ()
        return [sys.executable, "-m", f"benchmarks.{self.name}", "--json", *arguments]

    def kept(self, *, quick: bool = False) -> Path:
        """Return the file that stores its result."""
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
    Plan(name="microbatch"),
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
