"""The verdicts of one rollout: each that a sandbox gives is noted for whoever asked for them."""

from collections.abc import Mapping
from contextvars import ContextVar
from itertools import islice

from agentgym.sandboxes.protocol.programs import Verdict, cut_middle

KEPT_CASES = 100
KEPT_NAME = 300
"""The most failed cases that a rollout keeps, and characters of the name of one: code under test can invent some."""
_noted: ContextVar[dict[str, str] | None] = ContextVar("_noted", default=None)


class noting_failed_cases:
    """Give the cases that verdicts of this block found failed, with the reasons; one that passes later leaves it."""

    __slots__ = ("_before",)

    def __enter__(self) -> dict[str, str]:
        failed: dict[str, str] = {}
        self._before = _noted.set(failed)
        return failed

    def __exit__(self, *_: object) -> None:
        _noted.reset(self._before)


def note(verdict: Verdict) -> Verdict:
    """Note a verdict where somebody asked for it, and return it."""
    failed = _noted.get()
    if failed is not None:
        for name in verdict.cases:
            failed.pop(name, None)
        failed |= {name: why for name, why in verdict.cases.items() if why is not None}
    return verdict


def note_failed(name: str, why: str) -> None:
    """Note something that has failed and is no case of a verdict, such as a reward, where somebody asked for it."""
    failed = _noted.get()
    if failed is not None:
        failed[name] = why


def kept_cases(failed: Mapping[str, str]) -> dict[str, str]:
    """Return the first failed cases, and how many there are beside them."""
    kept = {cut_middle(name, KEPT_NAME): why for name, why in islice(failed.items(), KEPT_CASES)}
    more = len(failed) - KEPT_CASES
    return kept | ({"(others)": f"{more} more cases failed"} if more > 0 else {})
