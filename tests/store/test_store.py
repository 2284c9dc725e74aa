"""The rollout store: added rollouts are on disk, complete, and come back unchanged."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentgym.errors import Failure
from agentgym.files.foreign.content import Unpacker
from agentgym.store import schema, writer as writing
from agentgym.store.reader import RolloutStore
from agentgym.store.rows import packed, segment_of, segment_row
from agentgym.store.run_settings import versions
from agentgym.store.schema import FILE, StoreError
from agentgym.store.writer import RolloutWriter, Trained
from agentgym.types.completion import Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from agentgym.types.task import Task

TEXT = st.text(st.characters(), max_size=8)  # including lone surrogates and control characters


def segment(spans: Sequence[tuple[int, int]], *, length: int, text: str = "said", top: int = 60_000) -> Segment:
    """Return a segment with these spans of sampled tokens, for example:

    ::

        ids      P  a  a  e  a          spans (1, 3), (4, 5)
        sampled  0  1  1  0  1
    """
    rng = np.random.default_rng(length)
    sampled = np.zeros(length, np.bool_)
    turns = []
    for number, (start, stop) in enumerate(spans):
        sampled[start:stop] = True
        turns.append(
            Turn(
                start=start,
                stop=stop,
                finish_reason="stop",
                versions=(Version(0, 3),),
                message=Message(role="assistant", content=text),
                env_messages=(Message(role="tool", content=text, name="bash"),),
                seconds=0.25,
                env_seconds=0.5,
                reward=0.125,
                number=number,
            )
        )
    return Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=rng.integers(0, top, length),
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(length, np.float32), 0),
        turns=tuple(turns),
        prompt_messages=(Message(role="user", content=text),),
    )


def rollout(name: str = "task/0", reward: float | None = 1.0, **changes: Any) -> Rollout:
    """Return a rollout of one segment with two turns; it failed if `reward` is None."""
    failure = Failure(type="EnvError", message="KeyError: 'x'", where="reward 'right'", traceback="Traceback ..\n")
    return Rollout(
        rollout_id=name,
        group_id=name.partition("/")[0],
        segments=changes.pop("segments", (segment([(2, 4), (5, 9)], length=12),)),
        reward=reward,
        rewards={} if reward is None else {"right": reward},
        stop_reason="answer" if reward is not None else "error",
        failure=failure if reward is None else None,
        metrics={"seconds": 1.5, "tool_calls": 2.0},
        sandbox="sha256:1",
    )


def group(*rollouts: Rollout) -> Group:
    task = Task(id=rollouts[0].group_id, prompt=(Message(role="user", content="Go."),))
    return Group(group_id=rollouts[0].group_id, rollouts=rollouts, task=task)


def same(one: Any, other: Any) -> bool:
    """Return whether two frozen values are equal, with arrays compared by element."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Rollout | Segment):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    return bool(one == other)


def written(folder: Path, *groups: Group, step: int = 0) -> None:
    with RolloutWriter(folder) as writer:
        writer.add(groups, step=step)


@settings(max_examples=60, deadline=None)
@given(
    text=TEXT,
    cuts=st.lists(st.integers(1, 60), unique=True, max_size=8).map(sorted),
    top=st.sampled_from([9, 1 << 16, 1 << 20]),
)
def test_a_segment_is_restored_whatever_its_text(text: str, cuts: list[int], top: int) -> None:
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    one = segment(spans, length=64, text=text, top=top)
    assert same(segment_of(segment_row(one), Unpacker()), one)


def test_rollouts_are_restored_with_their_task(tmp_path: Path) -> None:
    played = rollout()
    written(tmp_path, group(played), step=7)
    with RolloutStore(tmp_path) as store:
        (found,) = store.find()
        assert same(found.rollout, played)
        assert (found.phase, found.step, found.trainer_logprobs) == ("train", 7, (None,))
        assert store.task("task") == {"id": "task", "prompt": [{"role": "user", "content": "Go."}]}


def test_a_steps_training_data_is_stored_with_its_rollouts(tmp_path: Path) -> None:
    played = rollout()
    logprobs = played.segments[0].logprobs[played.segments[0].sampled] - np.float32(0.25)
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(played)], step=1)
        made = Trained(rollout_id="task/0", segment=0, logprobs=logprobs, advantages=[0.5, -0.5], gap=0.25)
        writer.add_step([made], step=1)
    with RolloutStore(tmp_path) as store:
        (found,) = store.find()
    assert found.advantages == ((0.5, -0.5),)
    assert np.array_equal(np.asarray(found.trainer_logprobs[0]), logprobs)
    assert found.logprob_gap == 0.25
    (gaps,) = found.turn_gaps
    assert gaps == pytest.approx((0.25, 0.25))


def test_worst_and_best_exclude_failed_rollouts_which_have_their_own_query(tmp_path: Path) -> None:
    written(tmp_path, group(rollout("a/0", 0.5), rollout("a/1", None), rollout("a/2", -1.0), rollout("a/3", 2.0)))
    with RolloutStore(tmp_path) as store:
        ids = {order: [f.rollout.rollout_id for f in store.find(order=order)] for order in ("worst", "best")}
        (failed,) = store.find(failed=True)
    assert ids == {"worst": ["a/2", "a/0", "a/3"], "best": ["a/3", "a/0", "a/2"]}
    assert failed.rollout.failure == rollout(reward=None).failure


@pytest.mark.parametrize(("asked", "found"), [("a/1", ["a/1"]), ("b", ["b/0"]), ("1", ["a/0"]), ("c", [])])
def test_a_rollout_is_found_by_id_task_or_number(tmp_path: Path, asked: str, found: list[str]) -> None:
    written(tmp_path, group(rollout("a/0"), rollout("a/1")), group(rollout("b/0")))
    with RolloutStore(tmp_path) as store:
        assert [f.rollout.rollout_id for f in store.find(ids=[asked])] == found


def test_a_resumed_run_drops_the_rollouts_of_repeated_steps(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        for step in range(4):
            writer.add([group(rollout(f"t{step}/0"))], step=step)
        writer.add([group(rollout("held/0"))], phase="eval_before", step=0)
    with RolloutWriter(tmp_path, done=2) as writer:
        writer.add([group(rollout("again/0"))], step=2)
    with RolloutStore(tmp_path) as store:
        assert [f.rollout.rollout_id for f in store.find()] == ["t0/0", "t1/0", "held/0", "again/0"]


def test_a_store_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0"))], step=0)
        writer.flush()
        with RolloutStore(tmp_path) as store:
            assert len(store) == 1
            writer.add([group(rollout("b/0"))], step=0)
            writer.flush()
            assert len(store) == 2


KILLED = """
import os, signal, sys
from pathlib import Path
from agentgym.store.writer import RolloutWriter
from tests.store.test_store import group, rollout

with RolloutWriter(Path(sys.argv[1])) as writer:
    for number in range(1000):
        writer.add([group(rollout(f"t{number}/0"))], step=number)
        if number == 20:
            writer.flush()
            print("written", flush=True)
        if number == 400:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_every_rollout_complete_or_absent(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "written\n"), done.stderr
    with RolloutStore(tmp_path) as store:
        found = list(store.find())
    assert len(found) >= 21
    assert all(same(f.rollout, rollout(f.rollout.rollout_id)) for f in found)


def test_if_the_disk_refuses_writes_the_run_continues_and_counts_the_losses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0"))], step=0)
        writer.flush()
        with closing(sqlite3.connect(tmp_path / FILE)) as other, other:
            other.execute("CREATE TRIGGER full BEFORE INSERT ON rollouts BEGIN SELECT RAISE(ABORT, 'disk full'); END")
        writer.add([group(rollout("b/0"), rollout("b/1"))], step=1)
        writer.add([group(rollout("c/0"))], step=1)
        writer.flush()
        assert writer.lost == 3
    assert len([r for r in caplog.records if "are lost so far" in r.message]) == 1
    with RolloutStore(tmp_path) as store:
        assert len(store) == 1


class OddTask(Task):
    value: Any = None
    """A task with a field of any type, including types that JSON lacks."""


@pytest.mark.parametrize("value", [b"\xff\xfe", len, object(), {(1, 2): "keys of a tuple"}, {"a set"}])
def test_a_task_without_a_json_form_is_not_stored_but_its_rollouts_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: object
) -> None:
    odd = OddTask(id="a", prompt=(Message(role="user", content="Go."),), value=value)
    with RolloutWriter(tmp_path) as writer:
        writer.add([Group(group_id="a", rollouts=(rollout("a/0"),), task=odd)], step=0)
    assert writer.lost == 0
    with RolloutStore(tmp_path) as store:
        assert len(store) == 1
        assert store.task("a") is None
    assert "task 'a' could not be written, but its rollouts are stored: ValueError: OddTask.value" in caplog.text


def test_a_lone_surrogate_in_a_task_is_stored(tmp_path: Path) -> None:
    odd = OddTask(id="a", prompt=(Message(role="user", content="Go."),), value="\ud800")
    with RolloutWriter(tmp_path) as writer:
        writer.add([Group(group_id="a", rollouts=(rollout("a/0"),), task=odd)], step=0)
    with RolloutStore(tmp_path) as store:
        assert store.task("a") == {"id": "a", "prompt": [{"role": "user", "content": "Go."}], "value": "\ud800"}


def test_an_unwritable_task_is_logged_once_and_its_rollouts_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    circle: list[object] = []
    circle.append(circle)
    odd = OddTask(id="a", prompt=(Message(role="user", content="Go."),)).model_copy(update={"value": circle})
    with RolloutWriter(tmp_path) as writer:
        for step in range(2):
            writer.add([Group(group_id="a", rollouts=(rollout("a/0"),), task=odd)], step=step)
    assert writer.lost == 0
    assert len([r for r in caplog.records if "task 'a' could not be written" in r.message]) == 1
    with RolloutStore(tmp_path) as store:
        assert (len(store), store.task("a")) == (2, None)


def test_lone_surrogates_in_names_are_escaped_and_still_found(tmp_path: Path) -> None:
    played = replace(rollout("a/0"), rollout_id="a\ud800/0", stop_reason="bad\ud800reason")
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(played)], phase="p\ud800", step=0)
        made = Trained(rollout_id="a\ud800/0", segment=0, logprobs=None, advantages=[0.5, -0.5])
        writer.add_step([made], phase="p\ud800", step=0)
    assert writer.lost == 0
    with RolloutStore(tmp_path) as store:
        (found,) = store.find(ids=["a\ud800/0"], phase="p\ud800")
    assert found.rollout.stop_reason == r"bad\ud800reason"
    assert found.advantages == ((0.5, -0.5),)


def test_a_failed_cut_and_a_later_failed_write_are_both_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, group(rollout("a/0")), step=3)
    with closing(sqlite3.connect(tmp_path / FILE)) as other, other:
        for deed in ("DELETE", "INSERT"):
            other.execute(f"CREATE TRIGGER no_{deed} BEFORE {deed} ON rollouts BEGIN SELECT RAISE(ABORT, 'no'); END")
    with RolloutWriter(tmp_path, done=2) as writer:
        writer.add([group(rollout("b/0"))], step=2)
    assert [("could not be removed" in m, "are lost so far" in m) for m in caplog.messages] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize("bytes_of_it", [b"no database" * 99, b"SQLite format 3\0" + b"\1" * 84])
def test_a_corrupt_store_is_named_with_the_fix_before_the_run_starts(tmp_path: Path, bytes_of_it: bytes) -> None:
    (tmp_path / FILE).write_bytes(bytes_of_it)
    with (
        pytest.raises(StoreError, match=f"{FILE}: this rollout store cannot be opened .* out of the folder"),
        RolloutWriter(tmp_path),
    ):
        pass


def test_a_file_with_other_tables_is_named_with_the_fix(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE)) as other, other:
        other.execute("CREATE TABLE rollouts (a)")
    with pytest.raises(StoreError, match=r"no such column: step.*out of the folder"), RolloutWriter(tmp_path):
        pass


def test_a_locked_store_is_named_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "OPEN_SECONDS", 0.0)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"is locked.*another process has locked it"), RolloutWriter(tmp_path):
            pass


def test_writers_that_open_concurrently_wait_for_each_other(tmp_path: Path) -> None:
    def write(number: int) -> int:
        with RolloutWriter(tmp_path, done=9) as writer:
            writer.add([group(rollout(f"t{number}/0"))], step=0)
        return writer.lost

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(write, range(8))) == [0] * 8
    with RolloutStore(tmp_path) as store:
        assert len(store) == 8


def test_a_rollout_with_damaged_bytes_is_named(tmp_path: Path) -> None:
    written(tmp_path, group(rollout("a/0")))
    with closing(sqlite3.connect(tmp_path / FILE)) as other, other:
        other.execute("UPDATE segments SET messages = x'00'")
    with RolloutStore(tmp_path) as store, pytest.raises(StoreError, match=f"{FILE}: the store cannot.*rollout 1: "):
        list(store.find())


def test_a_folder_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="name the folder of a run"), RolloutStore(tmp_path):
        pass


@pytest.mark.parametrize(
    ("kept", "named"),
    [
        (None, ""),
        ("no JSON", ""),
        ('{"versions": {"agentgym": null}}', ""),
        (json.dumps({"versions": versions()}), ""),  # written by a resume that this version refused
        ('{"versions": {"agentgym": "0.0.1"}}', ", 0.0.1 according to the folder's settings.json"),
        (r'{"versions": {"agentgym": "1\n\u001b"}}', r", 1\n\x1b according to the folder's settings.json"),
    ],
)
def test_a_store_of_another_version_is_refused_with_the_version_of_agentgym_if_known(
    tmp_path: Path, kept: str | None, named: str
) -> None:
    written(tmp_path, group(rollout()))
    with closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
        connection.execute("PRAGMA user_version = 99")
    if kept is not None:
        (tmp_path / "settings.json").write_text(kept)
    with pytest.raises(StoreError, match="the store has version 99") as refused, RolloutStore(tmp_path):
        pass
    assert str(refused.value).endswith(f"; open it with the agentgym version that wrote it{named}")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (("turns", 0, 0), "message: a message must be an object, got "),
        (("turns", 0, 1, 0), "env_messages: a message must be an object, got "),
        (("turns", 0, 1), "env_messages: must be a list, got "),
        (("prompt", 0), "prompt: a message must be an object, got "),
        (("prompt",), "prompt: must be a list, got "),
    ],
)
@pytest.mark.parametrize("odd", ["text", None, 7])
def test_an_invalid_message_is_named_by_field(tmp_path: Path, field: Sequence[Any], said: str, odd: Any) -> None:
    written(tmp_path, group(rollout("a/0")))
    with closing(sqlite3.connect(tmp_path / FILE)) as other, other:
        (blob,) = other.execute("SELECT messages FROM segments WHERE rollout = 1").fetchone()
        found = within = Unpacker().unpacked(blob)
        for key in field[:-1]:
            within = within[key]
        within[field[-1]] = odd
        other.execute("UPDATE segments SET messages = ? WHERE rollout = 1", (packed(found),))
    with RolloutStore(tmp_path) as store, pytest.raises(StoreError, match=said + type(odd).__name__):
        list(store.find())


@pytest.mark.parametrize("calls", ["text", 7, {"function": {}}])
def test_a_rollout_whose_calls_are_not_a_list_is_stored(tmp_path: Path, calls: Any) -> None:
    played = rollout("a/0")
    turn = played.segments[0].turns[0]._replace(message={"role": "assistant", "content": ["x"], "tool_calls": calls})
    odd = replace(played.segments[0], turns=(turn, *played.segments[0].turns[1:]))
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(replace(played, segments=(odd,)))], step=0)
    assert writer.lost == 0
    with RolloutStore(tmp_path) as store:
        assert [one.rollout.segments[0].turns[0].message["tool_calls"] for one in store.find()] == [calls]


@pytest.mark.parametrize("call", [{"function": None}, {}, "text", {"function": {"name": None}}])
def test_a_rollout_with_an_invalid_call_is_stored(tmp_path: Path, call: Any) -> None:
    played = rollout("a/0")
    turn = played.segments[0].turns[0]._replace(message={"role": "assistant", "content": "", "tool_calls": [call]})
    odd = replace(played.segments[0], turns=(turn, *played.segments[0].turns[1:]))
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(replace(played, segments=(odd,)))], step=0)
    assert writer.lost == 0
    with RolloutStore(tmp_path) as store:
        assert [one.rollout.segments[0].turns[0].message["tool_calls"] for one in store.find()] == [[call]]


def test_a_temporarily_locked_store_loses_nothing_and_a_later_loss_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "OPEN_SECONDS", 0.01)
    with RolloutWriter(tmp_path) as writer, closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        writer.flush()  # its thread has opened the store
        other.execute("BEGIN IMMEDIATE")
        for step in range(3):
            writer.add([group(rollout(f"a{step}/0"))], step=step)
            writer.flush()
        assert [of.levelname for of in caplog.records] == ["WARNING"]
        assert "stay in memory and are retried" in caplog.messages[0]
        other.execute("ROLLBACK")
        writer.add_step([Trained(rollout_id="a0/0", segment=0, logprobs=None, advantages=[0.5, -0.5])], step=0)
        writer.flush()
        assert "it can be written again; writing the rollouts that stayed in memory" in caplog.messages[1]
        other.execute("CREATE TRIGGER no BEFORE INSERT ON rollouts BEGIN SELECT RAISE(ABORT, 'no'); END")
        writer.add([group(rollout("b/0"))], step=3)
        writer.flush()
        assert "1 are lost so far" in caplog.messages[2]
    with RolloutStore(tmp_path) as store:
        assert [of.rollout.rollout_id for of in store.find()] == ["a0/0", "a1/0", "a2/0"]
        assert [of.advantages for of in store.find(ids=["a0/0"])] == [((0.5, -0.5),)]
    assert writer.lost == 1


def test_if_too_many_rollouts_wait_the_oldest_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "OPEN_SECONDS", 0.01)
    monkeypatch.setattr(writing, "HELD_MOST", 2)
    with RolloutWriter(tmp_path) as writer, closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        writer.flush()  # its thread has opened the store
        other.execute("BEGIN IMMEDIATE")
        for step in range(5):
            writer.add([group(rollout(f"a{step}/0"))], step=step)
            writer.flush()
        assert writer.lost == 3
    with RolloutStore(tmp_path) as store:
        assert [of.rollout.rollout_id for of in store.find()] == ["a3/0", "a4/0"]
