"""Run folders that a stranger might send: each attack modifies the folder of a valid run."""

import json
import os
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from agentgym.store.schema import FILE

MAGIC = bytes.fromhex("d9d505f920a163d7")
Attack = Callable[[Path], None]
STEERING = "\x1b]0;owned\x07\x1b[2J\rgone \u202etxt.exe\u2066 \x9b31m"
"""Text that would set a terminal's title, clear the screen, return to the start of the line, and reverse the text
direction.
"""


def hot_journal(database: Path, victim: Path) -> None:
    """Write a hot journal next to the database; if SQLite rolls it back, it then deletes the victim."""
    size = 4096
    pages = max(1, database.stat().st_size // size) if database.exists() else 1
    head = (MAGIC + struct.pack(">IIIII", 0, 0x1234, pages, 512, size)).ljust(512, b"\0")
    name = os.fsencode(victim)
    tail = struct.pack(">I", (1 << 30) // size + 1) + name + struct.pack(">II", len(name), sum(name)) + MAGIC
    database.with_name(f"{database.name}-journal").write_bytes(head + tail)


def changed(folder: Path, *statements: str) -> None:
    """Run statements on the folder's store, without the run's write-ahead log."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        store.execute("PRAGMA journal_mode = DELETE")
        for statement in statements:
            store.execute(statement)


def replaced(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    """Put something else in place of a file."""
    (folder / name).unlink(missing_ok=True)
    make(folder / name)


def zip_bomb(folder: Path, column: str = "messages", table: str = "segments") -> None:
    """Write a gigabyte of JSON, compressed to a megabyte."""
    packing = zlib.compressobj(9)
    piece = b'"' + b"a" * (1 << 20) + b'",'
    blob = packing.compress(b"[") + b"".join(packing.compress(piece) for _ in range(1024)) + packing.flush()
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        store.execute(f"UPDATE {table} SET {column} = ?", (blob,))


def view_without_end(folder: Path, table: str = "rollouts") -> None:
    """Replace a table by a view with endless rows."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        names = [name for _, name, *_ in store.execute(f"PRAGMA table_info({table})")]
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    shown = ", ".join(f"old.{name} AS {name}" for name in names)
    changed(
        folder,
        "PRAGMA legacy_alter_table = ON",
        f"ALTER TABLE {table} RENAME TO kept",
        f"CREATE VIEW {table} AS {endless} SELECT {shown} FROM n, kept AS old",
    )


def computed_column(folder: Path) -> None:
    """Replace a table by one that computes a column anew for each row."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        (sql,) = store.execute("SELECT sql FROM sqlite_master WHERE name = 'rollouts'").fetchone()
        store.execute("PRAGMA journal_mode = DELETE")
        store.execute("PRAGMA writable_schema = ON")
        lies = sql.replace("tokens      INTEGER NOT NULL,", "tokens INTEGER AS (length(hex(zeroblob(100000000)))),")
        assert lies != sql
        store.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'rollouts'", (lies,))


def nulls(folder: Path, table: str, column: str) -> None:
    """Write NULL into a column that the store's schema declares NOT NULL."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        store.execute("PRAGMA journal_mode = DELETE")
        store.execute("PRAGMA writable_schema = ON")
        store.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE name = ?", (table,))
    changed(folder, f"UPDATE {table} SET {column} = NULL")


def many_small_values(folder: Path) -> None:
    """Write segments whose prompts have 262,144 objects, each in a few kilobytes."""
    said = b'{"prompt": [' + b", ".join([b'{"a": 1}'] * (1 << 18)) + b'], "turns": []}'
    blob, nothing = zlib.compress(said, 9), zlib.compress(b"[]")
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        store.execute("DELETE FROM segments")
        store.executemany(
            "INSERT INTO segments VALUES (?, ?, 0, 'fork', x'', 2, x'', ?, ?, NULL, NULL)",
            [(number, place, nothing, blob) for number in (1, 2, 3) for place in range(40)],
        )


def steering_texts(folder: Path) -> None:
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        names = ", ".join(f"{name} = ?" for name in ("phase", "group_id", "rollout_id", "stop_reason", "suspicious"))
        store.execute(f"UPDATE rollouts SET {names}", [STEERING.replace(" ", "_")] * 5)
        store.execute("UPDATE rollouts SET failure = ? WHERE failure IS NOT NULL", (STEERING,))
    settings = json.loads((folder / "settings.json").read_text())
    settings["envs"][STEERING] = {"where": STEERING, "version": STEERING}
    settings["rescored"] = STEERING
    (folder / "settings.json").write_text(json.dumps(settings))


def lying_values(folder: Path) -> None:
    """Write values of types that can't be computed with; readers must report damage, without a traceback."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        detail = {"rewards": {"a": "much"}, "metrics": {}, "sandbox": None, "failed_cases": {}, "failure": None}
        packed = zlib.compress(json.dumps(detail).encode())
        store.execute("UPDATE rollouts SET detail = ? WHERE reward IS NOT NULL", (packed,))


def no_messages(folder: Path) -> None:
    """Write numbers in place of messages, so that code that reads a role finds none."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        for number, place, turns in store.execute("SELECT rollout, place, turns FROM segments").fetchall():
            said = {"prompt": [7, None, {}], "turns": [[3, []]] * len(json.loads(zlib.decompress(turns)))}
            store.execute(
                "UPDATE segments SET messages = ? WHERE rollout = ? AND place = ?",
                (zlib.compress(json.dumps(said).encode()), number, place),
            )


def deep(levels: int = 100_000) -> str:
    return "[" * levels + "]" * levels


def deep_blobs(folder: Path) -> None:
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as store:
        store.execute("UPDATE segments SET messages = ?", (zlib.compress(deep().encode()),))


def rows_without_end(folder: Path) -> None:
    """Write a tree of pages in which each page has one child many times: more rows than atoms, in a few kilobytes."""
    size = 4096
    changed(folder, "PRAGMA wal_checkpoint", "VACUUM")
    with closing(sqlite3.connect(folder / FILE)) as store:
        (root,) = store.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rollouts'").fetchone()
    content = bytearray((folder / FILE).read_bytes())
    leaf = len(content) // size + 1
    content += content[(root - 1) * size : root * size]  # the rows, moved to another page
    below = leaf
    for _ in range(12):
        place = len(content) // size + 1
        cells = [struct.pack(">I", below) + b"\x7f" for _ in range(400)]
        page = bytearray(size)
        at, starts = size, []
        for cell in cells:
            at -= len(cell)
            page[at : at + len(cell)] = cell
            starts.append(at)
        page[:12] = struct.pack(">BHHHBI", 5, 0, len(cells), at, 0, below)
        page[12 : 12 + 2 * len(cells)] = struct.pack(f">{len(cells)}H", *starts)
        content += page
        below = place
    content[(root - 1) * size : root * size] = content[(below - 1) * size : below * size]
    content[28:32] = struct.pack(">I", len(content) // size)
    (folder / FILE).write_bytes(content)


def link(to: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(to)


def sparse(path: Path) -> None:
    """Write a terabyte-sized sparse file that takes no disk space."""
    with path.open("wb") as file:
        file.truncate(1 << 40)


def in_settings(text: str) -> Attack:
    return lambda folder: written(folder / "settings.json", text)


def written(path: Path, text: str) -> None:
    path.write_text(text)


def replacing(name: str, make: Callable[[Path], object]) -> Attack:
    return lambda folder: replaced(folder, name, make)


def journal_of(name: str, *, empty: bool = False) -> Attack:
    """Return an attack that adds a hot journal to the store or a copy of it, which deletes one of the user's files."""

    def attack(folder: Path) -> None:
        changed(folder)
        if empty:
            replaced(folder, FILE, Path.touch)
        elif name != FILE:
            shutil.copy(folder / FILE, folder / name)
        hot_journal(folder / name, folder.parent / "thesis.txt")

    return attack


def links_at_written_names(folder: Path) -> None:
    for name in (".settings.json-new", ".metrics.jsonl-cut", "export-sft.jsonl.part", "export-openai.jsonl.part"):
        (folder / name).symlink_to(folder.parent / "thesis.txt")
    (folder / "report").mkdir()
    (folder / "report/report.html").symlink_to(folder.parent / "site/report.html")
    (folder / "report/reward.png").symlink_to(folder.parent / "site/picture.png")


ATTACKS: Mapping[str, Attack] = {
    **{
        f"{name} is {what}": replacing(name, make)
        for name in ("metrics.jsonl", "settings.json", "summary.json", ".lock", FILE, f"{FILE}-wal", f"{FILE}-shm")
        for what, make in {
            "a pipe": os.mkfifo,
            "a link to /dev/zero": link("/dev/zero"),
            "a terabyte of nothing": sparse,
            "a folder": Path.mkdir,
        }.items()
    },
    "a zip bomb in the messages": zip_bomb,
    "a zip bomb in the details": lambda folder: zip_bomb(folder, "detail", "rollouts"),
    "a zip bomb in a task": lambda folder: zip_bomb(folder, "task", "tasks"),
    "a view without an end": view_without_end,
    "segments without an end": lambda folder: view_without_end(folder, "segments"),
    "rows without an end": rows_without_end,
    "a computed column": computed_column,
    "texts that steer the terminal": steering_texts,
    "a view in place of the vocabulary": lambda folder: view_without_end(folder, "vocabulary"),
    "a table in place of a function": lambda folder: changed(folder, "CREATE TABLE json_each (value)"),
    "a table without an index": lambda folder: changed(folder, "DROP INDEX rollouts_by_phase_and_reward"),
    "many small values": many_small_values,
    "phases that are NULL": lambda folder: nulls(folder, "rollouts", "phase"),
    "steps that are NULL": lambda folder: nulls(folder, "rollouts", "step"),
    "tasks that are NULL": lambda folder: nulls(folder, "rollouts", "group_id"),
    "names that are NULL": lambda folder: nulls(folder, "rollouts", "rollout_id"),
    "kinds that are NULL": lambda folder: nulls(folder, "segments", "kind"),
    "values of the wrong type": lying_values,
    "columns of the wrong type": lambda folder: changed(folder, "UPDATE segments SET token_ids = 'x', logprobs = 7"),
    "an unknown sign": lambda folder: changed(folder, "UPDATE rollouts SET suspicious = 'no-such-sign'"),
    "numbers in place of messages": no_messages,
    "blobs of 100,000 levels": deep_blobs,
    "settings of 100,000 levels": in_settings(deep()),
    "settings that are not an object": in_settings("[1]"),
    "settings of odd types": in_settings(
        json.dumps({"settings": {"env": 3, "model": [], "steps": 2**70, "recipe": {}}, "envs": {"a": {"where": 3}}})
    ),
    "settings with a number of 5,000 digits": in_settings('{"settings": {"steps": %s}}' % ("9" * 5000)),
    "metrics of odd sizes": lambda folder: written(
        folder / "metrics.jsonl",
        f'{{"step": {2**70}, "reward": NaN}}\n{{"step": 1, "reward": {"9" * 5000}}}\n{{"step": 2, "x": {deep()}}}\n'
        f'{{"step": 3, "reward": {2**70}, "time/step": "a"}}\n{{"step": true}}\n{{"step": -5, "reward": 1e400}}\n',
    ),
    "a hot journal": journal_of(FILE),
    "a hot journal of an empty store": journal_of(FILE, empty=True),
    "a hot journal of an index": journal_of("search-index.sqlite"),
    "an index that is a link": lambda folder: (folder / "search-index.sqlite").symlink_to(
        folder.parent / "mine.sqlite"
    ),
    "a store that is a link": replacing(FILE, link("../mine.sqlite")),
    "links at every name that is written": links_at_written_names,
    "a report that is a link": lambda folder: (folder / "report").symlink_to("../site"),
}

CHOSEN = list(ATTACKS)[::6]
"""The attacks that the default tests run; the slow tests try all of them with every command."""
