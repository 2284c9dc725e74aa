"""Stores that a stranger may have created: their tables and values are checked, and reading them is bounded."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from agentgym.files.foreign import database as reading
from agentgym.store.reader import RolloutStore
from agentgym.store.schema import FILE, READ_TABLES, StoreError
from agentgym.store.suspicious import FEWEST
from agentgym.store.table import Filters, rows_of
from agentgym.store.texts import texts_of
from agentgym.store.writer import RolloutWriter
from tests.files.foreign.attacks import changed, nulls
from tests.store.test_store import group, rollout, same, segment, written


def many(folder: Path, rollouts: int, *, phases: int) -> Path:
    """Write a store with this many rollouts and phases."""
    with RolloutWriter(folder) as writer:
        for number in range(rollouts):
            writer.add([group(rollout(f"t{number}/0"))], phase=f"phase{number % phases}", step=0)
    return folder


@pytest.mark.parametrize("table", READ_TABLES)
def test_every_table_that_is_read_must_be_plain_with_plain_columns(tmp_path: Path, table: str) -> None:
    written(tmp_path, group(rollout("a/0")))
    for column in [*READ_TABLES[table].columns, "other"]:
        names = [name for name in READ_TABLES[table].columns if name != column]
        computed = ", ".join([*names, f"{column} AS (instr(zeroblob(1000000), x'01'))"])
        changed(tmp_path, f"DROP TABLE IF EXISTS {table}", f"CREATE TABLE {table} ({computed})")
        with pytest.raises(StoreError, match=f"its table {table} computes its column {column}"), RolloutStore(tmp_path):
            pass
    changed(tmp_path, f"DROP TABLE {table}", f"CREATE VIEW {table} AS SELECT 1")
    with pytest.raises(StoreError, match=f"it has no table {table}, or a view in its place"), RolloutStore(tmp_path):
        pass


def test_a_table_may_not_shadow_the_function_that_lists_columns(tmp_path: Path) -> None:
    written(tmp_path, group(rollout("a/0")))
    changed(tmp_path, "CREATE VIRTUAL TABLE pragma_table_xinfo USING fts5(name, hidden UNINDEXED, t)")
    with pytest.raises(StoreError, match="it has a virtual table, 'pragma_table_xinfo'"), RolloutStore(tmp_path):
        pass


@pytest.mark.parametrize("index", READ_TABLES["rollouts"].indexes)
def test_a_store_without_an_index_is_refused_by_the_indexs_name(tmp_path: Path, index: str) -> None:
    written(tmp_path, group(rollout("a/0")))
    changed(tmp_path, f"DROP INDEX {index}")
    with pytest.raises(StoreError, match=f"its table rollouts has no index {index} on "), RolloutStore(tmp_path):
        pass


@pytest.mark.parametrize("table", ["rollouts", "segments", "tasks"])
def test_a_store_with_a_table_without_a_key_is_refused(tmp_path: Path, table: str) -> None:
    written(tmp_path, group(rollout("a/0")))
    changed(
        tmp_path,
        f"CREATE TABLE copy AS SELECT * FROM {table}",
        f"DROP TABLE {table}",
        f"ALTER TABLE copy RENAME TO {table}",
    )
    with pytest.raises(StoreError, match=rf"its table {table} has the key \(\) instead of"), RolloutStore(tmp_path):
        pass


def test_all_statements_of_one_read_share_a_step_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many statements is short. A store that stays open for long has a separate limit for each read."""
    many(tmp_path, 200, phases=1)
    monkeypatch.setattr(reading, "LOOK_EACH", 10)
    with RolloutStore(tmp_path) as store:
        assert len(list(store.find())) == 200
        monkeypatch.setattr(reading, "STEPS_A_BYTE", 0)
        monkeypatch.setattr(reading, "FREE_STEPS", 4000)
        tasks = [store.task("t7") for _ in range(300)]
        assert None not in tasks
        assert [found.number for found in store.find(ids=["t7"])] == [8]
        assert len(store.summaries()) == 200
        with pytest.raises(StoreError, match="reading it takes too long for the size of the file"):
            list(store.find())
    with RolloutStore(tmp_path, one_read=True) as store:
        tasks = []
        with suppress(StoreError):
            tasks.extend(store.task("t7") for _ in range(300))
        assert 10 < len(tasks) < 300


def test_reading_many_phases_takes_no_more_statements_than_reading_one(tmp_path: Path) -> None:
    asked: list[str] = []
    for folder, count in ((tmp_path / "few", 1), (tmp_path / "many", 2 * FEWEST)):
        with RolloutStore(many(folder, count, phases=count)) as store:
            read = store.query

            def counted(sql: str, *values: object) -> list[Any]:
                asked.append(sql)
                return read(sql, *values)  # noqa: B023

            store.query = counted  # type: ignore[method-assign]
            assert len(list(store.find(phase="phase0", suspicious=False))) == 1
            assert store.far_rewards() == set()
            assert len(store.summaries()) == count
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]  # the same statements


def test_more_outlying_rewards_than_a_statement_has_parameters_are_found(tmp_path: Path) -> None:
    written(tmp_path, group(*(rollout(f"t/{number}", 0.0) for number in range(3))))
    with RolloutStore(tmp_path) as store:
        store._opened().connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 100)
        store.far_rewards = lambda phase=None: {*range(2, 1000)}  # type: ignore[method-assign]
        assert [found.number for found in store.summaries(suspicious=True, order="written")] == [2, 3]
        assert store.count(suspicious=True) == 2


NEVER_NULL = [
    ("rollouts", column)
    for column in ("phase", "step", "group_id", "rollout_id", "stop_reason", "turns", "tokens", "seconds", "detail")
] + [("segments", name) for name in ("kind", "token_ids", "id_bytes", "logprobs", "turns", "messages")]


@pytest.mark.parametrize(("table", "column"), NEVER_NULL)
def test_a_forbidden_null_is_refused_by_column_and_row(tmp_path: Path, table: str, column: str) -> None:
    written(tmp_path, group(rollout("a/0")))
    nulls(tmp_path, table, column)
    named = "turns_of_segment" if (table, column) == ("segments", "turns") else column
    with RolloutStore(tmp_path) as store:
        with pytest.raises(StoreError, match=f"rollout 1: its {named} is NULL instead of"):
            list(store.find())
        if table == "rollouts" and column != "detail":
            for read in (store.summaries, lambda: rows_of(store, Filters())):
                with pytest.raises(StoreError, match=f"rollout 1: its {column} is NULL instead of"):
                    read()


def test_null_is_refused_in_tasks_and_in_searched_text(tmp_path: Path) -> None:
    written(tmp_path, group(rollout("a/0")))
    nulls(tmp_path, "tasks", "task")
    nulls(tmp_path, "rollouts", "seconds")
    with RolloutStore(tmp_path) as store:
        with pytest.raises(StoreError, match="task 'a': its task is NULL instead of BLOB"):
            store.task("a")
        with pytest.raises(StoreError, match="rollout 1: its mark is NULL instead of TEXT"):
            texts_of(store, 1)


def test_an_allowed_null_is_read(tmp_path: Path) -> None:
    written(tmp_path, group(rollout("a/0", None)))
    with RolloutStore(tmp_path) as store:
        (found,) = store.summaries()
        assert (found.reward, found.suspicious) == (None, ())


def test_a_long_rollout_can_be_read(tmp_path: Path) -> None:
    """100,000 tokens in 1,000 turns, each with texts that look like JSON."""
    spans = [(100 * turn + 10, 100 * turn + 90) for turn in range(1000)]
    long = rollout("a/0", segments=(segment(spans, length=100_000, text='[{"a": 1}, ' * 200),))
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(long)], step=0)
    assert writer.lost == 0
    with RolloutStore(tmp_path) as store:
        (found,) = store.find()
    assert same(found.rollout, long)


def test_a_store_with_additional_columns_can_be_read(tmp_path: Path) -> None:
    written(tmp_path, group(rollout("a/0")))
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as store:
        for table in ("rollouts", "segments", "tasks", "vocabulary"):
            store.execute(f"ALTER TABLE {table} ADD COLUMN later TEXT")
        store.execute("CREATE TABLE lost_and_found (a, b)")
        store.execute("CREATE TRIGGER no BEFORE INSERT ON tasks BEGIN SELECT RAISE(ABORT, 'no'); END")
    with RolloutStore(tmp_path) as read:
        assert len(list(read.find())) == 1
