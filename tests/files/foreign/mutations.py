"""Random changes to a run's folder: to bytes, JSON values, rows of the store, and file types."""

import json
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from agentgym.files.foreign.content import DAMAGE
from agentgym.store.schema import FILE
from tests.files.foreign.attacks import ATTACKS, STEERING

Mutation = tuple[str, Any]
"""The name of a change, and its arguments."""
FILES = ("settings.json", "metrics.jsonl", "summary.json", FILE, ".lock")
BLOBS = (("rollouts", "detail"), ("segments", "messages"), ("segments", "turns"), ("tasks", "task"))
COLUMNS = {
    "rollouts": (
        *("number", "phase", "step", "group_id", "rollout_id", "reward", "stop_reason", "failure", "turns", "tokens"),
        *("seconds", "suspicious", "logprob_gap", "tool_calls", "tool_errors", "detail"),
    ),
    "segments": (
        *("rollout", "place", "parent", "kind", "token_ids", "id_bytes", "logprobs", "turns", "messages", "trained"),
        "advantages",
    ),
    "tasks": ("group_id", "task"),
    "vocabulary": ("model", "ids", "lengths", "bytes"),
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 7, 2**31, 2**63, -(2**63), 2**70, 10**400, 0.5, -1e308, float("nan"), float("inf")),
    *("", "a", "0", STEERING, "../../thesis.txt", "/dev/zero", "\ud800", "\0", "x" * 100_000, "[" * 1000),
    *([], {}, [[]], [None], {"a": None}, {"role": 3}, [[1, 2]], ["a"] * 1000),
    json.loads("[" * 190 + "]" * 190),
)
"""JSON values that may be inserted anywhere."""
CELLS = (
    *(None, 0, -1, 7, 2**62, -(2**63), 0.5, float("inf"), -1e308, "", "x", STEERING, "task0", "0.5"),
    *(
        b"",
        b"\0",
        b"\xff" * 7,
        b"\0" * 4096,
        zlib.compress(b"[]"),
        zlib.compress(b"null"),
        zlib.compress(b"{}"),
        b"[1]",
    ),
)
"""SQLite values that may be inserted into any cell."""

MOST_STEPS = 2_000_000
"""Virtual machine steps of SQLite that a change's statements may take; the rest of the change is skipped."""
PLACES = st.integers(0, 2**20)
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "bytes": st.tuples(st.sampled_from(FILES), PLACES, st.binary(max_size=12), st.integers(0, 12)),
    "cut": st.tuples(st.sampled_from(FILES), PLACES),
    "doubled": st.tuples(st.sampled_from(FILES), PLACES, st.integers(1, 5000)),
    "json": st.tuples(st.sampled_from(FILES[:3]), PLACES, st.integers(0, len(ODD) - 1)),
    "blob": st.tuples(st.sampled_from(BLOBS), PLACES, st.integers(0, len(ODD) - 1)),
    "cell": st.sampled_from(sorted(COLUMNS)).flatmap(
        lambda table: st.tuples(
            st.just(table), st.sampled_from(COLUMNS[table]), st.booleans(), st.integers(0, len(CELLS) - 1)
        )
    ),
    "attack": st.sampled_from(sorted(ATTACKS)),
}
MUTATIONS = st.lists(
    st.sampled_from([*CHANGES, "json", "blob", "blob", "cell", "bytes"]).flatmap(
        lambda name: st.tuples(st.just(name), CHANGES[name])
    ),
    min_size=1,
    max_size=4,
)
"""Up to four changes, most of which leave a readable store."""


def mutate(folder: Path, mutations: list[Mutation]) -> None:
    """Apply the changes in order; skip one that an earlier change has made impossible."""
    for name, arguments in mutations:
        with suppress(OSError, sqlite3.Error, zlib.error, AssertionError, *DAMAGE):
            _MADE[name](folder, arguments)


def _bytes(folder: Path, arguments: tuple[str, int, bytes, int]) -> None:
    name, place, fresh, gone = arguments
    content = _content(folder / name)
    at = place % (len(content) + 1)
    (folder / name).write_bytes(content[:at] + fresh + content[at + gone :])


def _cut(folder: Path, arguments: tuple[str, int]) -> None:
    name, place = arguments
    content = _content(folder / name)
    (folder / name).write_bytes(content[: place % (len(content) + 1)])


def _doubled(folder: Path, arguments: tuple[str, int, int]) -> None:
    name, place, size = arguments
    content = _content(folder / name)
    at = place % (len(content) + 1)
    (folder / name).write_bytes(content[: at + size] + content[at:])


def _content(path: Path) -> bytes:
    if not path.is_file() or path.stat().st_size > 1 << 24:
        raise OSError("an earlier change has put something else there")
    return path.read_bytes()


def _json(folder: Path, arguments: tuple[str, int, int]) -> None:
    name, place, odd = arguments
    lines = _content(folder / name).decode().splitlines() if name.endswith("l") else [_content(folder / name).decode()]
    at = place % len(lines)
    lines[at] = json.dumps(changed_within(json.loads(lines[at]), place, ODD[odd]))
    (folder / name).write_text("\n".join(lines) + "\n")


def _blob(folder: Path, arguments: tuple[tuple[str, str], int, int]) -> None:
    (table, column), place, odd = arguments
    with closing(_store(folder)) as store:
        rows = store.execute(f"SELECT DISTINCT {column} FROM {table}").fetchall()
        (blob,) = rows[place % len(rows)]
        fresh = changed_within(json.loads(zlib.decompress(blob)), place, ODD[odd])
        packed = zlib.compress(json.dumps(fresh).encode())
        store.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (packed, blob))


def _cell(folder: Path, arguments: tuple[str, str, bool, int]) -> None:
    table, column, every, odd = arguments
    key = {"segments": "rollout", "tasks": "group_id"}.get(table, "rowid")
    some = "" if every else f" WHERE {key} = (SELECT min({key}) FROM {table})"
    with closing(_store(folder)) as store:
        store.execute(f"UPDATE OR REPLACE {table} SET {column} = ?{some}", (CELLS[odd],))


def _store(folder: Path) -> sqlite3.Connection:
    _content(folder / FILE)
    store = sqlite3.connect(folder / FILE, isolation_level=None)
    store.set_progress_handler(lambda: True, MOST_STEPS)  # an earlier change may have created endless rows
    return store


def _attack(folder: Path, name: str) -> None:
    ATTACKS[name](folder)


_MADE: dict[str, Callable[[Path, Any], None]] = {
    "bytes": _bytes,
    "cut": _cut,
    "doubled": _doubled,
    "json": _json,
    "blob": _blob,
    "cell": _cell,
    "attack": _attack,
}


def changed_within(value: Any, place: int, odd: Any) -> Any:
    """Return the value after replacing one of its nested values or keys by something odd."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(places) < 10_000:
        one = waiting.pop()
        if isinstance(one, dict | list):
            keys = list(one) if isinstance(one, dict) else list(range(len(one)))
            places += [(one, key) for key in keys]
            waiting += [one[key] for key in keys]
    if not places:
        return odd
    holder, key = places[place % len(places)]
    if isinstance(holder, dict) and place % 7 == 0:
        del holder[key]
    elif isinstance(holder, dict) and isinstance(odd, str) and place % 5 == 0:
        holder[odd] = holder.pop(key)
    else:
        holder[key] = odd
    return value
