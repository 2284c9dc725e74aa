"""A store's writer whose thread meets errors: it continues, logs the losses, and never blocks a caller forever."""

import errno
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentgym.store import schema, writer as writing
from agentgym.store.reader import RolloutStore
from agentgym.store.schema import FILE
from agentgym.store.statements import StepJob, write_step
from agentgym.store.writer import RolloutWriter, Trained
from tests.store.test_store import group, rollout


def steps_that(error: Exception) -> Iterator[Trained]:
    yield Trained(rollout_id="a0/0", segment=0, logprobs=None, advantages=[0.5, -0.5])
    raise error


@pytest.mark.parametrize("error", [KeyError("none"), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("held", [False, True])
def test_a_failing_step_job_is_logged_and_blocks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, held: bool, error: Exception
) -> None:
    monkeypatch.setattr(schema, "OPEN_SECONDS", 0.01)
    with RolloutWriter(tmp_path) as writer, closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        if held:
            other.execute("BEGIN IMMEDIATE")
        writer.add([group(rollout("a0/0"))], step=0)
        writer.flush()
        writer.add_step(steps_that(error), step=0)
        writer.flush()
        if held:
            other.execute("ROLLBACK")
    assert "a step's training results could not be written" in caplog.text
    with RolloutStore(tmp_path) as store:
        assert [of.rollout.rollout_id for of in store.find()] == ["a0/0"]
    assert writer.lost == 0


def test_a_steps_data_survives_a_disk_that_fills_up_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills(connection: sqlite3.Connection, job: StepJob) -> None:
        write_step(connection, job)
        monkeypatch.setattr(writing, "write_step", write_step)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "write_step", fills)
    made = Trained(rollout_id="a0/0", segment=0, logprobs=None, advantages=[0.5, -0.5])
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a0/0"))], step=0)
        writer.add_step(iter([made]), step=0)
        writer.flush()
    with RolloutStore(tmp_path) as store:
        assert [of.advantages for of in store.find()] == [((0.5, -0.5),)]


def test_a_store_whose_new_folder_is_a_file_blocks_nothing_and_counts_losses(tmp_path: Path) -> None:
    (folder := tmp_path / "run").mkdir()
    with RolloutWriter(folder) as writer:
        writer.add([group(rollout("a/0"))], step=0)
        writer.flush()
        shutil.rmtree(folder)
        folder.write_text("a file")
        writer.follow(folder, lost=True)
        writer.add([group(rollout("b/0"))], step=0)
        writer.flush()
    assert writer.lost == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_rollouts_added_after_the_thread_died_are_counted_and_flush_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object, **__: object) -> None:
        raise SystemExit

    monkeypatch.setattr(writing, "LOOK_S", 0.01)
    monkeypatch.setattr(RolloutWriter, "_do", dies)
    with RolloutWriter(tmp_path) as writer:
        writer.flush()
        writer.add([group(rollout("a/0"), rollout("a/1"))], step=0)
        writer.flush()
    assert writer.lost == 2


def test_adding_no_groups_after_an_error_does_not_block(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.flush()
        writer._write_groups = None  # type: ignore[method-assign, assignment]
        writer.add([], step=0)
        writer.add([group(rollout("a/0"))], step=0)
        writer.flush()
    assert writer.lost == 1
