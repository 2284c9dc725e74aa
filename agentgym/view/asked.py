"""The parameters of requests, parsed from a URL's query, with one error sentence for each invalid one."""

import math
from collections.abc import Mapping

from agentgym.config_fields import nearest
from agentgym.store.reader import LARGEST
from agentgym.store.table import SORTS, Filters
from agentgym.view.answers import Refused

MOST_ROWS = 1000
"""Largest number of rows in one response."""
Query = Mapping[str, str]


def text(query: Query, name: str) -> str | None:
    """Return the text of a parameter, or None if it is missing or empty."""
    return query.get(name) or None


def whole(query: Query, name: str, otherwise: int, *, least: int = 0, most: int = LARGEST) -> int:
    """Return an integer between `least` and `most`, or `otherwise` if the parameter is missing.

    Raises:
        Refused: If the value is anything else.
    """
    given = text(query, name)
    return otherwise if given is None else _whole(name, given, least, most)


def maybe_whole(query: Query, name: str) -> int | None:
    """Return an integer, or None if the parameter is missing."""
    given = text(query, name)
    return None if given is None else _whole(name, given, -LARGEST, LARGEST)


def maybe_number(query: Query, name: str) -> float | None:
    """Return a finite number, or None if the parameter is missing."""
    given = text(query, name)
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Refused(f"{name}: expected a number, got {given!r:.80}")
    return value


def flag(query: Query, name: str) -> bool:
    """Return whether a parameter is 1.

    Raises:
        Refused: If the value is not 0, 1 or empty.
    """
    given = query.get(name, "")
    if given not in ("", "0", "1"):
        raise Refused(f"{name}: expected 0 or 1, got {given!r:.80}")
    return given == "1"


def one_of(query: Query, name: str, choices: Mapping[str, object] | tuple[str, ...], otherwise: str) -> str:
    """Return the value of a parameter that must be one of `choices`, or `otherwise` if it is missing.

    Raises:
        Refused: If the value is not one of them; the message suggests the nearest one.
    """
    given = query.get(name) or otherwise
    if given not in choices:
        raise Refused(f"{name}: unknown value {given!r:.80}; {nearest(given[:80], list(choices))}")
    return given


def filters(query: Query, among: list[int] | None = None) -> Filters:
    """Return the rollout filters in a query.

    Args:
        query: The URL's parameters.
        among: The numbers of the rollouts that a search found; None if there was no search.
    """
    return Filters(
        phase=text(query, "phase"),
        env=text(query, "env"),
        task=text(query, "task"),
        stop=text(query, "stop"),
        step_from=maybe_whole(query, "step_from"),
        step_to=maybe_whole(query, "step_to"),
        reward_from=maybe_number(query, "reward_from"),
        reward_to=maybe_number(query, "reward_to"),
        failed=flag(query, "failed"),
        suspicious=flag(query, "suspicious"),
        tool_errors=flag(query, "tool_errors"),
        among=among,
    )


def paging(query: Query) -> tuple[int, int]:
    """Return the offset of a page and its largest number of rows."""
    return whole(query, "offset", 0), whole(query, "limit", 200, least=1, most=MOST_ROWS)


def sorting(query: Query, columns: Mapping[str, str] = SORTS, otherwise: str = "number") -> tuple[str, bool]:
    """Return the column to sort by, and whether to sort in descending order."""
    descending = one_of(query, "order", ("asc", "desc"), "asc") == "desc"
    return one_of(query, "sort", columns, otherwise), descending


def _whole(name: str, given: str, least: int, most: int) -> int:
    try:
        value = int(given[:40])
    except ValueError:
        raise Refused(f"{name}: expected an integer, got {given!r:.80}") from None
    if not least <= value <= most:
        raise Refused(f"{name}: expected a value from {least} to {most}, got {value}")
    return value
