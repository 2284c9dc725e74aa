"""Opening of files that a stranger may have created."""

import json
import os
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from agentgym.files.folder_lock import hold_folder
from agentgym.files.foreign import database as reading
from agentgym.files.foreign.content import MOST_LEVELS, MOST_VALUES, Unpacker, parsed, read_object, values_in
from agentgym.files.foreign.database import ForeignDatabase, ReadCost, check_journal
from agentgym.files.foreign.opening import UnreadableFileError, check_folder, read_bytes, regular_file
from agentgym.files.foreign.tables import Table
from agentgym.store.schema import FILE, StoreError
from agentgym.store.writer import RolloutWriter
from tests.files.foreign.attacks import hot_journal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@pytest.mark.parametrize("kind", ["a pipe", "a folder", "a device", "a socket"])
def test_a_path_that_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a device":
            path = Path("/dev/zero")
        case _:
            os.mknod(path, 0o140600)
    with pytest.raises(UnreadableFileError, match=f"^{path} .*(regular file)"):
        read_bytes(path, within=None)


def test_links_are_followed_only_inside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "down").mkdir(parents=True)
    (folder / "file").write_text("inside")
    (tmp_path / "secret").write_text("outside")
    (folder / "down/inside").symlink_to("../file")
    (folder / "outside").symlink_to("../secret")
    (folder / "through").symlink_to("..")
    (folder / "loop").symlink_to("loop")
    assert read_bytes(folder / "down/inside", within=folder) == b"inside"
    for name in ("outside", "through/secret", "../secret"):
        with pytest.raises(UnreadableFileError, match=f"{name} is a link that leads out of {folder}, to "):
            read_bytes(folder / name, within=folder)
    with pytest.raises(UnreadableFileError, match="loop cannot be read"):
        read_bytes(folder / "loop", within=folder)
    with pytest.raises(FileNotFoundError):
        read_bytes(folder / "none", within=folder)
    assert read_bytes(folder / "outside", within=None) == b"outside"
    linked = tmp_path / "linked"
    linked.symlink_to(folder)  # the named folder itself may be a link
    assert read_bytes(linked / "file", within=linked) == b"inside"


def test_a_too_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnreadableFileError, match="has 1,099,511,627,776 bytes, but the limit is 134,217,728"):
        read_bytes(tmp_path / "file", within=tmp_path)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_json_is_parsed_as_by_python(value: object) -> None:
    text = json.dumps(value).encode()
    assert parsed(text) == json.loads(text)
    assert Unpacker().unpacked(zlib.compress(text)) == json.loads(text)


@pytest.mark.parametrize("make", [lambda n: "[" * n + "]" * n, lambda n: '{"a":' * n + "1" + "}" * n])
def test_json_is_read_up_to_the_nesting_limit(make: Callable[[int], str]) -> None:
    parsed(make(MOST_LEVELS).encode())
    for levels in (MOST_LEVELS + 1, 900, 100_000):
        with pytest.raises(ValueError, match="nests more than 200 levels"):
            parsed(make(levels).encode())


def test_too_many_values_are_refused_but_long_texts_are_not() -> None:
    assert len(parsed(b'["' + b"[,{" * MOST_VALUES + b'"]')[0]) == 3 * MOST_VALUES
    with pytest.raises(ValueError, match="more than 2,097,152 values"):
        parsed(b"[" + b"[]," * MOST_VALUES + b"1]")
    with pytest.raises(ValueError, match="more than 2,097,152 values"):
        parsed(b'["\\\\",' + b"[]," * MOST_VALUES + b'"')  # an unterminated string hides nothing


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JSON)
def test_the_value_count_is_exact_for_many_values_and_at_least_right_for_few(value: object) -> None:
    def count(within: object) -> int:
        if not isinstance(within, list | dict):
            return 0
        inner = list(within.values()) if isinstance(within, dict) else within
        return max(1, len(inner)) + sum(map(count, inner))

    assert values_in(json.dumps(value).encode()) >= count(value)
    assert values_in(json.dumps([value, "[,{" * 5000, [0] * 5000]).encode()) == count(value) + 5003


def test_all_values_of_one_record_share_one_limit() -> None:
    half = zlib.compress(b"[" + b"[]," * (MOST_VALUES // 4) + b"1]")
    unpacker = Unpacker()
    assert len(unpacker.unpacked(half)) == MOST_VALUES // 4 + 1
    with pytest.raises(ValueError, match="more than 2,097,152 values when it is unpacked"):
        unpacker.unpacked(half)
    with pytest.raises(ValueError, match="more than 2,097,152 values when it is unpacked"):
        Unpacker(most_values=1 << 30).unpacked(zlib.compress(b"[" + b"[]," * MOST_VALUES + b"1]"))


def test_a_text_with_four_byte_characters_counts_by_its_memory() -> None:
    assert Unpacker(100).unpacked(zlib.compress(b'"' + b"a" * 60 + b'"')) == "a" * 60
    with pytest.raises(ValueError, match="more than 100 bytes"):
        Unpacker(100).unpacked(zlib.compress(f'"{"a" * 60}😀"'.encode()))


def test_all_bytes_unpacked_for_one_record_share_one_limit() -> None:
    unpacker = Unpacker(100)
    assert unpacker.unpacked(zlib.compress(b"[" + b"1," * 20 + b"1]")) == [1] * 21
    with pytest.raises(ValueError, match="more than 100 bytes"):
        unpacker.unpacked(zlib.compress(b'"' + b"a" * 60 + b'"'))
    for damaged in (b"", b"no zlib", zlib.compress(b'"abcdefghijklmnop"')[:-6]):
        with pytest.raises(ValueError, match="cannot be unpacked"):
            Unpacker().unpacked(damaged)


def test_json_other_than_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[]")
    with pytest.raises(UnreadableFileError, match="a must contain a JSON object, got list"):
        read_object(tmp_path / "a", within=tmp_path)


def made(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)
    return path


def test_a_database_is_opened_read_only_and_its_schema_is_not_trusted(tmp_path: Path) -> None:
    path = made(tmp_path / "a.sqlite", "CREATE TABLE a (b)", "INSERT INTO a VALUES (1)")
    before = path.read_bytes()
    database = ForeignDatabase(path, within=tmp_path)
    assert database.rows("SELECT b FROM a WHERE b = ?", [1]) == (["b"], [(1,)])
    assert database.rows("PRAGMA trusted_schema")[1] == [(0,)]
    for deed in ("INSERT INTO a VALUES (2)", "DROP TABLE a", f"ATTACH '{tmp_path / 'b'}' AS b", "VACUUM"):
        with pytest.raises(sqlite3.Error, match=r"readonly|too many attached"):
            database.rows(deed)
    database.close()
    assert (path.read_bytes(), [file.name for file in tmp_path.iterdir()]) == (before, ["a.sqlite"])


def test_a_statements_steps_and_rows_are_bounded_by_the_file_size(tmp_path: Path) -> None:
    path = made(tmp_path / "a.sqlite", "CREATE TABLE a (b)", "INSERT INTO a VALUES (1)")
    database = ForeignDatabase(path, within=tmp_path)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    with pytest.raises(UnreadableFileError, match="reading it takes too long for the size of the file"):
        database.rows(f"{endless} SELECT count(*) FROM n")
    with pytest.raises(UnreadableFileError, match="returned more data than a file of this size"):
        database.rows(f"{endless} SELECT i FROM n")
    with pytest.raises(sqlite3.DataError, match="too big"):
        database.rows("SELECT zeroblob(100000000)")
    assert database.rows("SELECT b FROM a")[1] == [(1,)]
    database.close()


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("CREATE TABLE other (b)", "it has no table a, or a view in its place"),
        ("CREATE VIEW a AS SELECT 1 AS b", "it has no table a, or a view in its place"),
        ("CREATE VIRTUAL TABLE a USING fts5(b)", "it has no table a, or a view in its place"),
        ("CREATE TABLE a (c)", "its table a has no column b"),
        ("CREATE TABLE a (c, b AS (length(c)))", "its table a computes its column b"),
        ("CREATE TABLE a (b, c AS (length(b)))", "its table a computes its column c"),
        ("CREATE TABLE a (b); CREATE VIEW json_each AS SELECT 1", "its view 'json_each' hides a function of SQLite"),
        ("CREATE TABLE a (b); CREATE TABLE pragma_x (a)", "its table 'pragma_x' hides a function of SQLite"),
        ("CREATE TABLE a (b); CREATE VIRTUAL TABLE c USING fts5(b)", "it has a virtual table, 'c'"),
        ("CREATE TABLE a (b, c)", r"its table a has the key \(\) instead of \(b\)"),
        ("CREATE TABLE a (c, b, PRIMARY KEY (c, b))", r"its table a has the key \(c, b\) instead of \(b\)"),
        (
            "CREATE VIEW a AS SELECT 1 AS b, 2 AS c",
            "it has no table a, or a view in its pl",
        ),
        ("CREATE TABLE a (b PRIMARY KEY, c)", r"its table a has no index by_b on \(b, c\)"),
        ("CREATE TABLE a (b PRIMARY KEY, c); CREATE INDEX by_b ON a (c, b)", r"has no index by_b on \(b, c\)"),
        (
            "CREATE TABLE a (b PRIMARY KEY, c); CREATE INDEX by_b ON a (b, c COLLATE NOCASE)",
            r"has no index by_b on \(b, c\)",
        ),
        (
            "CREATE TABLE a (b PRIMARY KEY, c); CREATE TABLE d (b, c); CREATE INDEX by_b ON d (b, c)",
            r"its table a has no index by_b on \(b, c\)",
        ),
    ],
)
def test_tables_that_are_not_plain_or_have_computed_columns_are_refused(
    tmp_path: Path, statement: str, told: str
) -> None:
    database = ForeignDatabase(made(tmp_path / "a.sqlite", *statement.split("; ")), within=tmp_path)
    wanted = Table(columns=["b", "c"], key=["b"], indexes={"by_b": ["b", "c"]})
    with pytest.raises(UnreadableFileError, match=f"a.sqlite: .*{told}.*; ask for an unchanged copy of the file"):
        database.check_tables({"a": wanted})
    database.close()


def test_tables_of_the_expected_form_are_read(tmp_path: Path) -> None:
    whole = ["CREATE TABLE a (c, b PRIMARY KEY)", "CREATE INDEX by_b ON a (b, c)", "CREATE TABLE other (d)"]
    database = ForeignDatabase(made(tmp_path / "a.sqlite", *whole, "CREATE VIEW v AS SELECT 1"), within=tmp_path)
    wanted = Table(columns=["b", "c"], key=["b"], indexes={"by_b": ["b", "c"]})
    database.check_tables({"a": wanted})
    database.close()


def test_all_statements_of_one_read_share_a_limit_from_the_file_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "FREE_STEPS", 1_000_000)
    path = made(tmp_path / "a.sqlite", "CREATE TABLE a (b)", "INSERT INTO a VALUES (1)")
    database = ForeignDatabase(path, within=tmp_path)
    counting = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 20000) SELECT count(*) FROM n"
    for _ in range(30):  # each query by itself
        assert database.rows(counting)[1] == [(20000,)]
    read, done = ReadCost(), []
    with suppress(UnreadableFileError), database.one_read(read):
        for _ in range(30):
            with database.one_read():
                done += database.rows(counting)[1]
    assert 0 < len(done) < 30
    with pytest.raises(UnreadableFileError, match="reading it takes too long"), database.one_read(read):
        database.rows(counting)
    assert database.rows(counting)[1] == [(20000,)]
    database.close()


def test_a_foreign_hot_journal_deletes_nothing(tmp_path: Path) -> None:
    """SQLite's own behavior is shown first: it deletes the file that the journal names."""
    victim, run = tmp_path / "thesis.txt", tmp_path / "run"
    run.mkdir()
    for folder in (tmp_path, run):
        path = made(folder / FILE, "CREATE TABLE a (b)")
        victim.write_text("years of work")
        hot_journal(path, victim)
        if folder is tmp_path:
            with closing(sqlite3.connect(path)) as database:
                database.execute("SELECT * FROM sqlite_master").fetchall()
            assert not victim.exists()
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        ForeignDatabase(path, within=run)
    with pytest.raises(UnreadableFileError, match=r"-journal tells SQLite to delete another file"):
        check_journal(path)
    with pytest.raises(StoreError, match=r"-journal tells SQLite to delete another file"), RolloutWriter(run):
        pass
    assert victim.read_text() == "years of work"
    assert path.with_name(f"{FILE}-journal").exists()


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
def test_files_that_sqlite_opens_next_to_a_database_must_not_be_links(tmp_path: Path, end: str) -> None:
    path, victim = made(tmp_path / "a.sqlite", "CREATE TABLE a (b)"), tmp_path / "thesis.txt"
    victim.write_text("years of work")
    beside = path.with_name(f"{path.name}{end}")
    for make in (beside.symlink_to, beside.hardlink_to):
        make(victim)
        with pytest.raises(UnreadableFileError, match=f"a.sqlite{end}: SQLite would open it"):
            ForeignDatabase(path, within=tmp_path)
        beside.unlink()
    assert victim.read_text() == "years of work"


def test_a_run_is_not_started_in_a_folder_whose_files_link_outside(tmp_path: Path) -> None:
    folder, victim = tmp_path / "run", tmp_path / "thesis.txt"
    (folder / "elsewhere").mkdir(parents=True)
    victim.write_text("years of work")
    (folder / "again").symlink_to("metrics.jsonl")
    check_folder(folder)
    for name in (".lock", "metrics.jsonl", ".settings.json-new", "checkpoints"):
        (folder / name).symlink_to(tmp_path if name == "checkpoints" else victim)
        with pytest.raises(UnreadableFileError, match=f"{name} is a link that leads out of"), hold_folder(folder):
            pass
        (folder / name).unlink()
    os.mkfifo(folder / ".lock")
    with pytest.raises(UnreadableFileError, match="is a pipe or a device"), hold_folder(folder):
        pass
    assert victim.read_text() == "years of work"


def test_a_live_runs_write_ahead_log_is_read_and_a_damaged_one_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("CREATE TABLE a (b)")
        writer.execute("INSERT INTO a VALUES (1)")
        database = ForeignDatabase(path, within=tmp_path)
        writer.execute("INSERT INTO a VALUES (2)")
        assert database.rows("SELECT count(*) FROM a")[1] == [(2,)]
        database.close()
        copied = tmp_path / "copied"
        copied.mkdir()
        for end in ("", "-wal"):
            (copied / f"a.sqlite{end}").write_bytes(path.with_name(f"a.sqlite{end}").read_bytes())
    kept = (copied / "a.sqlite").read_bytes()
    database = ForeignDatabase(copied / "a.sqlite", within=copied)  # as a killed run leaves it
    assert database.rows("SELECT count(*) FROM a")[1] == [(2,)]
    database.close()
    (copied / "a.sqlite-wal").write_bytes(os.urandom(9999))
    database = ForeignDatabase(copied / "a.sqlite", within=copied)
    database.close()
    assert (copied / "a.sqlite").read_bytes() == kept


def test_a_file_is_resolved_to_its_path_without_links(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "b").symlink_to("a")
    assert regular_file(tmp_path / "b", within=tmp_path) == (tmp_path / "a").resolve()
