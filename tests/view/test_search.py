"""Full-text search: any text is a valid query, and the index follows the store without blocking its writer."""

import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from starlette.testclient import TestClient

from agentgym.store.reader import RolloutStore
from agentgym.store.schema import FILE
from agentgym.store.texts import RolloutTexts, texts_behind
from agentgym.store.writer import RolloutWriter
from agentgym.view.runs import Run, Runs, run_of
from agentgym.view.search import index as index_module
from agentgym.view.search.cache import KEPT_S, sweep
from agentgym.view.search.index import SearchIndex, Unsearchable, snippet
from agentgym.view.search.indexing import Indexing
from tests.store.test_store import group, rollout, segment
from tests.view.made_runs import HOSTILE, add_rollouts, client, make_run

SAID = {
    "a/0": "Look for the hay stack, don't stop; foo_bar(x) == 'needle in it'",
    "b/0": "The NEEDLE stands alone. Straße, café",
    "c/0": "中文分词 is 你好世界, and 東京タワー; สวัสดีครับ",
    "d/0": "done 😀👍🏽 → ok ✓",
    "e/0": HOSTILE,
    "f/0": "hay hay hay NEAR AND OR NOT needle* text: - ^ {x}",
}


def written(folder: Path, said: dict[str, str] = SAID) -> Run:
    with RolloutWriter(folder) as writer:
        for name, text in said.items():
            made = segment([(2, 4), (5, 9)], length=12, text=text)
            writer.add([group(rollout(name, segments=(made,)))], step=0)
    return run_of(folder.resolve())


def indexed(run: Run, spare: Path) -> SearchIndex:
    index = SearchIndex(run, spare)
    while index.advance():
        pass
    return index


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    folder = tmp_path_factory.mktemp("run")
    return indexed(written(folder), folder)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("needle", "abf"),
        ("hay needle", "af"),
        ('"hay stack"', "a"),
        ('"hay needle"', ""),
        ('"needle in', "a"),
        ("don't", "a"),
        ("foo_bar(x)", "a"),
        ("== 'needle", "abf"),
        ("cafe STRASSE", ""),
        ("cafe Straße", "b"),
        ("你好", "c"),
        ("好你", ""),
        ("分词 東京", "c"),
        ("สวัสดี", "c"),
        ("😀", "d"),
        ("👍🏽", "d"),
        ("✓ →", "d"),
        ("script alert(1)", "e"),
        ("b/0", "b"),
        ("text: needle*", "f"),
        ("NOT needle", "f"),
        ("a OR b", ""),
        ("hay NEAR", "f"),
        ("((", ""),
        ('"', ""),
        ("nee", ""),
    ],
)
def test_a_query_finds_texts_that_contain_all_of_its_words_and_phrases(
    index: SearchIndex, asked: str, found: str
) -> None:
    assert "".join("abcdef"[number - 1] for number in index.numbers(asked)) == found


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.characters(), max_size=20) | st.text(st.sampled_from(list("\"'()*:^-+{}\0 aN\ud800😀中")), max_size=20)
)
def test_any_text_is_a_valid_query(index: SearchIndex, asked: str) -> None:
    assert set(index.numbers(asked)) <= {1, 2, 3, 4, 5, 6}


@settings(max_examples=40, deadline=None)
@given(said=st.text(st.characters(max_codepoint=0x24F) | st.sampled_from("中文あ한😀→"), min_size=1, max_size=30))
def test_every_word_of_a_text_is_found(tmp_path_factory: pytest.TempPathFactory, said: str) -> None:
    folder = tmp_path_factory.mktemp("run")
    index = indexed(written(folder, {"a/0": said}), folder)
    for word in said.split():
        if any(character.isalnum() for character in word):
            assert index.numbers(word) == [1], word


def get(asked: TestClient, address: str, **query: object) -> Any:
    answer = asked.get(address, params={name: str(value) for name, value in query.items()})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[TestClient, str, Run]]:
    run = run_of(make_run(tmp_path / "mine", said="a needle in the hay"))
    with client(tmp_path) as asked:
        yield asked, f"/api/runs/{run.key}", run


def test_a_search_is_a_filter_and_adds_a_snippet(served: tuple[TestClient, str, Run]) -> None:
    asked, base, run = served
    asked.indexing.wait_for(run, 10)  # type: ignore[attr-defined]
    found = get(asked, f"{base}/rollouts", q="needle", step_from=1)
    assert (found["total"], found["indexed"]) == (2, 10)
    assert [row["rollout_id"] for row in found["rows"]] == ["task1/2", "task2/2"]
    assert found["rows"][0]["snippet"] == "a needle in the hay"
    assert get(asked, f"{base}/state")["indexed"] == 10
    assert get(asked, f"{base}/rollouts", q="needle", failed=1)["total"] == 0


def test_only_the_first_of_very_long_texts_have_a_snippet(
    served: tuple[TestClient, str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, base, run = served
    monkeypatch.setattr("agentgym.view.api.MOST_READ", 10)
    asked.indexing.wait_for(run, 10)  # type: ignore[attr-defined]
    rows = get(asked, f"{base}/rollouts", q="needle")["rows"]
    assert [row["snippet"] is None for row in rows] == [False, True, True]


def test_rollouts_that_are_written_later_are_found(served: tuple[TestClient, str, Run]) -> None:
    asked, base, run = served
    asked.indexing.wait_for(run, 10)  # type: ignore[attr-defined]
    add_rollouts(run.folder, ["fresh/0"], step=9)
    assert asked.indexing.wait_for(run, 11) == 11  # type: ignore[attr-defined]
    assert get(asked, f"{base}/rollouts", q="fresh")["total"] == 1


def test_rollouts_that_a_resumed_run_dropped_are_not_found(tmp_path: Path) -> None:
    run = written(tmp_path, {f"old{n}/0": "before" for n in range(3)})
    add_rollouts(tmp_path, ["late/0", "late/1"], step=1)
    index = indexed(run, tmp_path)
    assert index.numbers("late") == [4, 5]
    add_rollouts(tmp_path, ["again/0", "again/1"], step=1, done=1)  # they reuse the numbers of those that were cut
    while index.advance():
        pass
    assert index.numbers("late") == []
    assert index.numbers("again") == [4, 5]
    assert index.numbers("before") == [1, 2, 3]


def test_an_index_is_continued_by_the_next_viewer_or_two_at_once(tmp_path: Path, cache: Path) -> None:
    run, folder = written(tmp_path, {f"t{n}/0": "word" for n in range(60)}), cache / "agentgym/search"
    folder.mkdir(parents=True)
    first, second = SearchIndex(run, folder), SearchIndex(run, folder)
    assert first.advance()
    assert second.indexed() == 25
    with Indexing() as one, Indexing() as other:
        assert one.wait_for(run, 60) == other.wait_for(run, 60) == 60
    assert len(first.numbers("word")) == 60


def test_rollouts_that_another_viewer_indexed_are_not_indexed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path)
    first, second = SearchIndex(run, tmp_path), SearchIndex(run, tmp_path)

    def read_while_the_other_indexes(store: RolloutStore, number: int, limit: int) -> list[RolloutTexts]:
        found = texts_behind(store, number, limit)
        monkeypatch.setattr("agentgym.view.search.index.texts_behind", texts_behind)
        second.advance()
        return found

    monkeypatch.setattr("agentgym.view.search.index.texts_behind", read_while_the_other_indexes)
    first.advance()
    assert (first.indexed(), second.indexed()) == (len(SAID), len(SAID))


@pytest.mark.parametrize("content", [b"no index" * 999, b"", b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_index_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    run = written(tmp_path)
    (tmp_path / f"{run.key}.sqlite").write_bytes(content)
    assert indexed(run, tmp_path).numbers("needle") == [1, 2, 6]


def test_the_index_is_in_the_users_cache_and_not_in_the_runs_folder(tmp_path: Path, cache: Path) -> None:
    run = written(tmp_path)
    with Indexing() as indexing:
        assert indexing.wait_for(run, len(SAID)) == len(SAID)
    assert [path.name for path in (cache / "agentgym/search").glob("*.sqlite")] == [f"{run.key}.sqlite"]
    assert stat.S_IMODE((cache / "agentgym/search").stat().st_mode) == 0o700
    assert {path.name for path in tmp_path.iterdir()} <= {FILE, f"{FILE}-wal", f"{FILE}-shm"}


@pytest.mark.parametrize("others", ["a file", "a link", "open to all"])
def test_a_cache_of_another_user_is_not_used(
    tmp_path: Path, cache: Path, others: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, elsewhere = cache / "agentgym/search", tmp_path / "elsewhere"
    folder.parent.mkdir()
    elsewhere.mkdir()
    match others:
        case "a file":
            folder.touch()
        case "a link":
            folder.symlink_to(elsewhere)
        case _:
            folder.mkdir()
            folder.chmod(0o777)
    with Indexing() as indexing:
        assert indexing.wait_for(written(tmp_path / "run"), len(SAID)) == len(SAID)
    assert "search indexes are stored in a temporary folder" in caplog.text
    assert list(cache.rglob("*.sqlite")) == list(elsewhere.iterdir()) == []


def test_unused_indexes_and_the_oldest_of_too_many_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    for name, age in (("new", 1.0), ("old", 100.0), ("older", 200.0), ("forgotten", 2 * KEPT_S)):
        for end in ("", "-wal"):
            file = tmp_path / f"{name}.sqlite{end}"
            file.write_bytes(bytes(500))
            os.utime(file, (now - age, now - age))
    (tmp_path / "no index").touch()
    sweep(tmp_path)
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"new", "old", "older", "no index"}
    monkeypatch.setattr("agentgym.view.search.cache.MOST_BYTES", 2500)
    sweep(tmp_path)
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"new", "old", "no index"}


def test_indexing_writes_nothing_to_the_store(tmp_path: Path) -> None:
    run = written(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as holder, holder:  # another writer would have to wait
        holder.execute("BEGIN IMMEDIATE")
        assert indexed(run, tmp_path).indexed() == len(SAID)
        holder.rollback()


def test_a_run_without_a_store_is_indexed_when_it_has_one(tmp_path: Path) -> None:
    run = run_of(tmp_path.resolve())
    with Indexing() as indexing:
        assert indexing.of(run) is not None
        written(tmp_path)
        assert indexing.wait_for(run, len(SAID)) == len(SAID)


@pytest.mark.parametrize(
    ("text", "asked", "shown"),
    [
        ("a needle", "Needle", "a needle"),
        ("x " * 100 + "needle\n\n in" + " y" * 100, '"needle"', "… x x x"),
        ("nothing", "needle", None),
        ("İstanbul needle", "needle", "İstanbul needle"),
        ("any", '"" ', None),
    ],
)
def test_a_snippet_surrounds_the_match(text: str, asked: str, shown: str | None) -> None:
    found = snippet([text], asked)
    assert found == shown or (found is not None and shown is not None and "needle in" in found and len(found) < 140)


def test_a_runs_key_depends_only_on_its_folder(tmp_path: Path) -> None:
    made = [make_run(tmp_path / name / "run 1/é", steps=1) for name in ("a", "b")]
    keys = [run.key for run in Runs([tmp_path]).all()]
    assert keys == [Runs([folder]).all()[0].key for folder in made]
    assert len(set(keys)) == 2
    assert all(key.isascii() for key in keys)


def test_a_damaged_store_does_not_stop_the_indexing_of_other_runs(tmp_path: Path) -> None:
    damaged, sound = (run_of(make_run(tmp_path / name)) for name in ("damaged", "sound"))
    with closing(sqlite3.connect(damaged.folder / FILE)) as store, store:
        store.execute("UPDATE rollouts SET detail = x'00'")
    store.close()
    with Indexing() as indexing:
        indexing.of(damaged)
        while indexing.of(damaged) is not None:
            pass
        assert indexing.wait_for(sound, 10) == 10


def test_a_run_that_is_removed_while_viewed_is_reported(tmp_path: Path) -> None:
    with client(tmp_path) as asked:
        run = run_of(make_run(tmp_path / "mine"))
        base = f"/api/runs/{run.key}"
        assert asked.get(f"{base}/state").status_code == 200
        run.folder.rename(tmp_path / ".removed")
        for rest in ("", "/state", "/rollouts?q=said", "/rollouts/1", "/metrics"):
            answer = asked.get(f"{base}{rest}")
            assert (answer.status_code, "mine was removed" in answer.json()["error"]) == (404, True)


def test_a_failed_index_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE)) as store, store:
        sound = store.execute("SELECT detail FROM rollouts WHERE number = 1").fetchone()
        store.execute("UPDATE rollouts SET detail = x'00' WHERE number = 1")
    with Indexing() as indexing, sqlite3.connect(tmp_path / FILE) as store:
        while indexing.of(run) is not None:
            pass
        assert "rollout 1" in indexing.why(run)
        store.execute("UPDATE rollouts SET detail = ? WHERE number = 1", sound)
        store.commit()
        assert indexing.of(run) is None  # not immediately, so that a store that stays damaged isn't read all the time
        monkeypatch.setattr("agentgym.view.search.indexing.TRY_AGAIN_S", 0.0)
        assert indexing.wait_for(run, len(SAID)) == len(SAID)
    store.close()


def test_an_index_that_is_damaged_during_use_is_rebuilt(tmp_path: Path) -> None:
    run = written(tmp_path)
    index = indexed(run, tmp_path)
    index.path.write_bytes(b"SQLite format 3\0" + b"\xff" * 9999)
    with pytest.raises(Unsearchable, match="try again soon"):
        index.numbers("needle")
    while index.advance():
        pass
    assert index.numbers("needle") == [1, 2, 6]


def test_searching_does_not_wait_for_indexing(tmp_path: Path) -> None:
    index = indexed(written(tmp_path), tmp_path)
    with closing(sqlite3.connect(index.path)) as writer, writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert index.numbers("needle") == [1, 2, 6]
        writer.rollback()
    writer.close()


def test_on_a_full_disk_the_index_moves_elsewhere(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path / "run", {f"t{n}/0": " ".join(f"word{n}of{i}" for i in range(3000)) for n in range(3)})
    connected = index_module._connected

    def with_little_room(path: Path, mode: str = "rwc") -> sqlite3.Connection:
        """Open a connection that reports a full disk if its file is in the cache, by SQLite's own means."""
        index = connected(path, mode)
        if path.is_relative_to(cache):
            index.execute("PRAGMA max_page_count = 1")
        return index

    monkeypatch.setattr(index_module, "_connected", with_little_room)
    with Indexing() as indexing:
        indexing.of(run)
        while indexing.indexed(run) != 3:
            pass
        found = indexing.of(run)
        assert found is not None
        assert found.numbers("word1of7") == [2]
        assert list(cache.rglob("*.sqlite")) == []
