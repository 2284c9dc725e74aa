"""Collects the failed cases of a rollout from the verdicts of its sandbox, for the block that asked for them."""

from collections.abc import Mapping
from contextvars import ContextVar
from itertools import islice

from agentgym.sandboxes.protocol.programs import Verdict, cut_middle

KEPT_CASES = 100
KEPT_NAME = 300
"""Maximum number of failed cases stored per rollout, and maximum characters of a case's name.

Both have limits because tested code can invent cases and their names.
"""
_noted: ContextVar[dict[str, str] | None] = ContextVar("_noted", default=None)


class noting_failed_cases:
    """Collects the cases that fail in a block's verdicts: `with noting_failed_cases() as failed`.

    `failed` maps each case's name to the reason. A case that passes later is removed.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> dict[str, str]:
        failed: dict[str, str] = {}
        self._before = _noted.set(failed)
        return failed

    def __exit__(self, *_: object) -> None:
        _noted.reset(self._before)


def note(verdict: Verdict) -> Verdict:
    """Record a verdict's cases for the `noting_failed_cases` block that is running, if any, and return the verdict."""
    failed = _noted.get()
    if failed is not None:
        for name in verdict.cases:
            failed.pop(name, None)
        failed |= {name: why for name, why in verdict.cases.items() if why is not None}
    return verdict


def note_failed(name: str, why: str) -> None:
    """Record a failure that is not a case of a verdict, such as a reward, for the block that is running, if any."""
    failed = _noted.get()
    if failed is not None:
        failed[name] = why


def kept_cases(failed: Mapping[str, str]) -> dict[str, str]:
    """Return the first `KEPT_CASES` failed cases, and an entry with the number of the others, if any."""
    kept = {cut_middle(name, KEPT_NAME): why for name, why in islice(failed.items(), KEPT_CASES)}
    more = len(failed) - KEPT_CASES
    return kept | ({"(others)": f"{more} more cases failed"} if more > 0 else {})
