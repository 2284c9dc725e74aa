"""Collects the failed cases of a rollout, from the verdicts of all hidden tests that run during a `with` statement."""

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
    """Collects the cases that fail in verdicts inside a `with` statement: `with noting_failed_cases() as failed`.

    `failed` maps each case's name to the reason. A case that passes in a later verdict is removed.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> dict[str, str]:
        failed: dict[str, str] = {}
        self._before = _noted.set(failed)
        return failed

    def __exit__(self, *_: object) -> None:
        _noted.reset(self._before)


def note(verdict: Verdict) -> Verdict:
    """Return the verdict, after recording its cases for the innermost active `noting_failed_cases`, if any."""
    failed = _noted.get()
    if failed is not None:
        for name in verdict.cases:
            failed.pop(name, None)
        failed |= {name: why for name, why in verdict.cases.items() if why is not None}
    return verdict


def note_failed(name: str, why: str) -> None:
    """Record a failure other than a failed case of hidden tests, such as a reward that is 0.0 because of an error.

    It is added to the innermost active `noting_failed_cases`, if any.

    Args:
        name: The name of what failed, such as a reward.
        why: The reason.
    """
    failed = _noted.get()
    if failed is not None:
        failed[name] = why


def kept_cases(failed: Mapping[str, str]) -> dict[str, str]:
    """Return the first `KEPT_CASES` failed cases, and an entry with the number of the others, if any."""
    kept = {cut_middle(name, KEPT_NAME): why for name, why in islice(failed.items(), KEPT_CASES)}
    more = len(failed) - KEPT_CASES
    return kept | ({"(others)": f"{more} more cases failed"} if more > 0 else {})
