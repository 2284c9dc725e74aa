"""A store's vocabulary: the bytes of each token id that occurs, stored once, and displayed without the model."""

import errno
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from agentgym.store import schema, statements
from agentgym.store.reader import RolloutStore
from agentgym.store.schema import FILE, StoreError
from agentgym.store.vocabulary import VocabularyWriter, shown_token
from agentgym.store.writer import RolloutWriter
from agentgym.types.rollout import Rollout, Segment
from tests.store.test_store import group, rollout


class Names:
    """Gives token bytes, and records the requested ids."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, model: str, ids: Sequence[int]) -> Mapping[int, bytes]:
        self.asked += ids
        return {token: f"{model}{token}".encode() for token in ids if token != 13}


def spoken(name: str, ids: Sequence[int], model: str = "") -> Rollout:
    """Return a rollout of one segment with these ids, none of them sampled."""
    made = Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=np.array(ids),
        sampled=np.zeros(len(ids), np.bool_),
        logprobs=np.zeros(len(ids), np.float32),
        turns=(),
        model=model,
        trained=not model,
    )
    return rollout(name, segments=(made,))


def test_a_copied_store_has_its_token_texts_without_the_model(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    with RolloutWriter(run, token_bytes=Names()) as writer:
        writer.add([group(spoken("a/0", [5, 70_000, 5, 13]))], step=0)
        writer.add([group(spoken("b/0", [5, 6], model="judge"))], step=0)
    shutil.copytree(run, tmp_path / "copy")
    with RolloutStore(tmp_path / "copy") as store:
        assert store.token_bytes("", {5, 70_000, 13, 99}) == {5: b"5", 70_000: b"70000"}
        assert store.token_bytes("judge", [5, 6]) == {5: b"judge5", 6: b"judge6"}
        assert store.token_bytes("stranger", [5]) == {}


def test_a_token_id_is_looked_up_once_even_by_a_resumed_run(tmp_path: Path) -> None:
    names = Names()
    with RolloutWriter(tmp_path, token_bytes=names) as writer:
        writer.add([group(spoken("a/0", [1, 2, 2]), spoken("a/1", [2, 3])), group(spoken("b/0", [3, 1]))], step=0)
        writer.add([group(spoken("c/0", [1, 4, 13]))], step=0)
        writer.add([group(spoken("d/0", [13]))], step=0)
    assert names.asked == [1, 2, 3, 4, 13]
    again = Names()
    with RolloutWriter(tmp_path, done=1, token_bytes=again) as writer:
        writer.add([group(spoken("e/0", [1, 2, 900_000]))], step=1)
    assert again.asked == [900_000]
    with RolloutStore(tmp_path) as store:
        assert sorted(store.token_bytes("", range(10))) == [1, 2, 3, 4]


def test_a_token_id_is_looked_up_once_even_if_the_tokenizer_is_loaded_after_the_store_was_opened(
    tmp_path: Path,
) -> None:
    asked = []
    for step in range(2):
        names = Names()
        with RolloutWriter(tmp_path, done=step) as writer:
            writer.add([group(rollout(f"before/{step}"))], step=step)
            writer.flush()
            writer.vocabulary.token_bytes = names  # as in runs and evaluations, which load the model later
            writer.add([group(spoken(f"a/{step}", [1, 2 + step]))], step=step)
        asked.append(names.asked)
    assert asked == [[1, 2], [3]]


def test_token_bytes_that_did_not_fit_on_a_full_disk_are_stored_with_their_rollouts_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = VocabularyWriter.add

    def fills(vocabulary: VocabularyWriter, connection: sqlite3.Connection, rollouts: Sequence[Rollout]) -> None:
        add(vocabulary, connection, rollouts)
        monkeypatch.setattr(VocabularyWriter, "add", add)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(VocabularyWriter, "add", fills)
    with RolloutWriter(tmp_path, token_bytes=Names()) as writer:
        writer.add([group(spoken("a/0", [1, 2]))], step=0)
        writer.flush()
        writer.add([group(spoken("b/0", [2, 3]))], step=0)
    assert writer.lost == 0
    with RolloutStore(tmp_path) as store:
        assert len(store) == 2
        assert sorted(store.token_bytes("", range(10))) == [1, 2, 3]


def overwritten(path: Path) -> None:
    """Overwrite the first page of a store's vocabulary, as a broken disk may."""
    with closing(sqlite3.connect(path)) as store:
        (page,) = store.execute("SELECT rootpage FROM sqlite_master WHERE name = 'vocabulary'").fetchone()
        (size,) = store.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)


def running(script: str) -> Callable[[Path], None]:
    """Return a function that runs this SQL on a store."""

    def run(path: Path) -> None:
        with closing(sqlite3.connect(path)) as store:
            store.executescript(script)

    return run


@pytest.mark.parametrize(
    ("damage", "done"),
    [
        pytest.param(overwritten, "read", id="overwritten"),
        pytest.param(running("UPDATE vocabulary SET ids = 5"), "read", id="a number"),
        pytest.param(running("ALTER TABLE vocabulary RENAME ids TO old"), "read", id="without a column"),
        pytest.param(running("ALTER TABLE vocabulary ADD COLUMN later"), "written", id="with a column"),
        pytest.param(
            running("DROP TABLE vocabulary; CREATE VIEW vocabulary AS SELECT '' AS model, x'' AS ids"),
            "written",
            id="a view",
        ),
    ],
)
def test_a_vocabulary_that_cannot_be_read_or_written_loses_no_rollout_and_is_logged_once(
    tmp_path: Path, damage: Callable[[Path], None], done: str, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutWriter(tmp_path, token_bytes=Names()) as writer:
        writer.add([group(spoken("a/0", [1]))], step=0)
    damage(tmp_path / FILE)
    with RolloutWriter(tmp_path, done=1, token_bytes=Names()) as writer:
        writer.add([group(spoken("b/0", [2]), spoken("b/1", [3]))], step=1)
        writer.flush()
        writer.add([group(spoken("c/0", [4]))], step=2)
    assert writer.lost == 0
    assert [f"{FILE}: the vocabulary in it cannot be {done}, so no" in message for message in caplog.messages] == [True]
    with closing(sqlite3.connect(tmp_path / FILE)) as store:
        stored = store.execute("SELECT rollout_id FROM rollouts ORDER BY number").fetchall()
    assert stored == [("a/0",), ("b/0",), ("b/1",), ("c/0",)]


def test_a_failing_tokenizer_loses_no_rollout_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(model: str, ids: Sequence[int]) -> Mapping[int, bytes]:
        raise KeyError("no such id")

    played = [spoken("a/0", [1]), spoken("b/0", [2], model="judge"), spoken("c/0", [3])]
    with RolloutWriter(tmp_path, token_bytes=fails) as writer:
        writer.add([group(one) for one in played], step=0)
        writer.add([group(spoken("d/0", [4]))], step=0)
    assert writer.lost == 0
    assert [record.message for record in caplog.records] == [
        "token texts are not stored, and the run continues without them: KeyError: 'no such id'"
    ]
    with RolloutStore(tmp_path) as store:
        assert len(store) == 4


def test_ids_outside_the_vocabulary_take_no_memory(tmp_path: Path) -> None:
    names = Names()
    with RolloutWriter(tmp_path, token_bytes=names) as writer:
        writer.add([group(spoken("a/0", [7, 2**31 - 1]))], step=0)
        writer.add([group(spoken("b/0", [7, 2**31 - 1]))], step=0)
    assert (writer.lost, names.asked) == (0, [7])


def test_a_store_of_an_earlier_version_is_refused_with_the_version(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0"))], step=0)
    with closing(sqlite3.connect(tmp_path / FILE)) as old, old:
        old.execute("PRAGMA user_version = 3")
    with pytest.raises(StoreError, match="the store has version 3, and this agentgym reads version 4"):
        RolloutStore(tmp_path).__enter__()


@pytest.mark.parametrize("row", ["'', x'000000'", "'', 5", "'', 'text'", "CAST(x'ff' AS TEXT), x''"])
def test_a_damaged_vocabulary_is_logged_once_and_loses_no_rollout(
    tmp_path: Path, row: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(schema.open_store(tmp_path / FILE)) as other:
        other.execute(f"INSERT INTO vocabulary VALUES ({row}, x'', x'')")
    with RolloutWriter(tmp_path, token_bytes=Names()) as writer:
        writer.add([group(spoken("a/0", [1]))], step=0)
        writer.flush()
        writer.add([group(spoken("b/0", [2]))], step=0)
    assert writer.lost == 0
    assert [f"{FILE}: the vocabulary in it cannot be read" in message for message in caplog.messages] == [True]
    with RolloutStore(tmp_path) as store:
        assert len(store) == 2


def test_stored_ids_outside_any_vocabulary_take_no_memory(tmp_path: Path) -> None:
    with closing(schema.open_store(tmp_path / FILE)) as store:
        store.execute("INSERT INTO vocabulary VALUES ('', x'07000000ffffffff', x'', x'')")
        vocabulary = VocabularyWriter(Names())
        vocabulary.read(store)
    assert [len(seen) for seen in vocabulary._seen.values()] == [8]


def test_a_store_that_cannot_be_written_is_closed_each_time_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []
    closed: list[sqlite3.Connection | None] = []

    def recorded_open(path: Path) -> sqlite3.Connection:
        opened.append(schema.open_store(path))
        return opened[-1]

    def recorded_close(connection: sqlite3.Connection | None) -> None:
        closed.append(connection)
        statements.close(connection)

    def fails(*_: object) -> None:
        raise RuntimeError("full") from OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("agentgym.store.writer.open_store", recorded_open)
    monkeypatch.setattr("agentgym.store.writer.close", recorded_close)
    monkeypatch.setattr(VocabularyWriter, "read", fails)
    with RolloutWriter(tmp_path, token_bytes=Names()) as writer:
        writer.add([group(rollout("b/0"))], step=1)
    assert writer.lost == 1
    in_thread = opened[1:]  # the writer opens and closes the store once before its thread starts
    assert in_thread
    assert all(any(connection is other for other in closed) for connection in in_thread)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (b" hello", " hello"),
        ("é中😀".encode(), "é中😀"),
        (b"\xf0\x9f", "⟨F0 9F⟩"),
        (b"\x98\x80!", "⟨98 80⟩!"),
        (b"a\xe4\xb8", "a⟨E4 B8⟩"),
        (b"\xad\xe4\xb8\xad\xe6", "⟨AD⟩中⟨E6⟩"),
        (b"\xed\xa0\x80", "⟨ED A0 80⟩"),
        (b"\x00\x1b[31m", "\x00\x1b[31m"),
        (b"", ""),
    ],
)
def test_incomplete_characters_are_shown_as_hex(given: bytes, shown: str) -> None:
    assert shown_token(given) == shown


@given(st.binary(max_size=12))
def test_every_byte_of_a_token_is_shown(given: bytes) -> None:
    shown, read = shown_token(given), b""
    for place, part in enumerate(shown.replace("⟩", "⟨").split("⟨")):
        read += bytes.fromhex(part) if place % 2 else part.encode()
    assert read == given or "⟨".encode() in given or "⟩".encode() in given


def test_a_recreated_store_has_the_token_bytes_of_the_lost_one(tmp_path: Path) -> None:
    (now := tmp_path / "now").mkdir()
    (now / f".{FILE}-new").write_text("no store, so that none can be copied there")
    with RolloutWriter(tmp_path, token_bytes=Names()) as writer:
        writer.add([group(spoken("a/0", [1, 2]))], step=0)
        writer.flush()
        writer.follow(now, lost=True)
        writer.add([group(spoken("b/0", [2, 3]))], step=0)
    assert writer.lost == 1
    with RolloutStore(now) as store:
        assert sorted(store.token_bytes("", range(10))) == [2, 3]
