"""A run's folder: on a full disk, and moved, removed or locked by another process during the run."""

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import pytest

import agentgym as ag
from agentgym.environments.env import Split
from agentgym.errors import AgentGymError
from agentgym.files.folder_lock import FolderInUse, LockedFolder
from agentgym.launch.train import train_policy
from agentgym.run import recorder
from agentgym.run.evaluation import Evaluations
from agentgym.run.metrics_logger import MetricsLogger
from agentgym.run.recorder import open_recorder
from agentgym.run.resume import read_best
from agentgym.store.reader import RolloutStore
from agentgym.train import checkpoint, snapshot
from agentgym.train.checkpoint import last_checkpoint
from tests.files.limits import files_up_to, removed

MODEL = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase"
ELSEWHERE: list[Path] = []
"""Folders to which the env changes at each reset."""


@ag.register("wanders")
class Wanders(ag.ToolEnv[ag.Task]):
    """Changes the working directory, as some libraries do."""

    limits = ag.Limits(turns=1)

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(lambda number: ag.Task(id=f"t{number}", prompt=f"Say {number}."), range(10, 99))

    async def setup(self) -> None:
        for folder in ELSEWHERE:
            os.chdir(folder)

    @ag.reward
    def short(self) -> float:
        return -float(len(self.answer or ""))


SETTINGS = ag.RunConfig(
    recipe="wanders",
    env="wanders",
    model=MODEL,
    train=ag.TrainConfig(temperature=0.7, device="cpu"),
    max_steps=5,
    prompts_per_step=1,
    group_size=2,
    max_turn_tokens=6,
    eval_tasks=0,
    save_every=2,
)
FULL = 10_000
"""Maximum file size in bytes: more than a line of metrics, less than a checkpoint or the store."""


@pytest.fixture
def run(tmp_path: Path) -> ag.RunConfig:
    return replace(SETTINGS, output_dir=tmp_path / "run")


@pytest.fixture
def disk() -> Iterator[ExitStack]:
    """Yield a stack for contexts that fill the disk; they end with the test."""
    with ExitStack() as stack:
        yield stack


def rollout(run: ag.RunConfig, deeds: dict[int, Callable[[], object]]) -> dict[str, Any]:
    """Run the training and call these functions after their steps."""

    class Deeds(ag.Callback):
        def on_step(self, step: int, *_: object) -> None:
            deeds.get(step, lambda: None)()

    summary = asyncio.run(train_policy(run, callbacks=[Deeds()]))
    assert summary["callback_errors"] == {}
    return summary


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stored(folder: Path) -> list[int]:
    with RolloutStore(folder) as store:
        return sorted({row.step for row in store.summaries()})


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def assert_whole(folder: Path, steps: int) -> None:
    """Assert that the folder contains everything that a run of this many steps writes."""
    assert steps_in(folder) == stored(folder) == list(range(steps))
    assert last_checkpoint(folder / "checkpoints").step == steps
    assert json.loads((folder / "summary.json").read_text())["steps"] == steps
    files = ("settings.json", "environment.json", "adapter/adapter_model.safetensors")
    assert all((folder / name).is_file() for name in files)
    assert not (folder / ".lock").exists()


def test_a_full_disk_does_not_stop_a_run_and_failed_writes_are_made_up_later(
    run: ag.RunConfig, disk: ExitStack, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fill = lambda: disk.enter_context(files_up_to(FULL))  # noqa: E731
    summary = rollout(run, {0: fill, 3: disk.close})
    assert_whole(tmp_path / "run", 5)
    assert kept(tmp_path / "run") == ["step-000004", "step-000005"] or kept(tmp_path / "run")[-1] == "step-000005"
    assert summary["rollouts_not_stored"] == 0
    assert summary["not_written"]["a checkpoint"] == 3  # after steps 2, 3 and 4, since it is retried after each
    said = capfd.readouterr().err
    assert said.count("could not be written (File too large); there is none yet; the write is retried after") == 1


def test_a_run_whose_last_checkpoint_does_not_fit_says_from_where_it_can_resume(
    run: ag.RunConfig, disk: ExitStack, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rollout(replace(run, max_steps=2), {})
    adapter = (tmp_path / "run/adapter/adapter_model.safetensors").stat().st_size
    room = lambda: disk.enter_context(files_up_to(3 * adapter // 2))  # noqa: E731  includes optimizer moments
    rollout(replace(run, output_dir=None, resume=tmp_path / "run", max_steps=4, save_every=0), {2: room})
    said = capfd.readouterr().err
    assert "The disk accepted no checkpoint after step 2: the run can be resumed from there" in said


def test_a_run_that_ends_on_a_full_disk_says_what_is_saved_and_can_be_resumed(
    run: ag.RunConfig, disk: ExitStack, tmp_path: Path
) -> None:
    fill = lambda: disk.enter_context(files_up_to(FULL))  # noqa: E731
    with pytest.raises(AgentGymError, match=r"adapter could not be written.* 3 steps .* the checkpoint of step 2"):
        rollout(replace(run, max_steps=3), {1: fill})
    disk.close()
    assert last_checkpoint(tmp_path / "run/checkpoints").step == 2
    rollout(replace(run, output_dir=None, resume=tmp_path / "run", max_steps=3), {})
    assert_whole(tmp_path / "run", 3)


def test_a_run_follows_its_moved_folder_whatever_the_working_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{__name__}.ELSEWHERE", [tmp_path / "other"])
    run = replace(SETTINGS, output_dir=Path("run"), model=os.path.relpath(MODEL, tmp_path))
    summary = rollout(run, {1: lambda: (tmp_path / "run").rename(tmp_path / "archive")})
    assert_whole(tmp_path / "archive", 5)
    assert summary["output_dir"] == str(tmp_path / "archive")
    assert list((tmp_path / "other").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "other"]
    assert f"was moved to {tmp_path}/archive while it was written to" in capfd.readouterr().err


def test_a_removed_folder_is_written_again_with_all_that_the_run_knows(
    run: ag.RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rollout(replace(run, save_every=4), {1: lambda: removed(tmp_path / "run")})
    assert_whole(tmp_path / "run", 5)
    assert kept(tmp_path / "run") == ["step-000004", "step-000005"]
    assert "was removed while it was written to" in capfd.readouterr().err


def test_a_folder_removed_after_the_last_step_gets_its_checkpoint_and_policy_again(
    run: ag.RunConfig, tmp_path: Path
) -> None:
    rollout(run, {4: lambda: removed(tmp_path / "run")})
    assert_whole(tmp_path / "run", 5)
    assert kept(tmp_path / "run") == ["step-000005"]


def moved(folder: Path) -> None:
    """Move the folder, as `mv run archive` does."""
    folder.rename(folder.with_name("archive"))


class Before(Protocol):
    """Calls a function once, just before the given call of a function of a module or class."""

    def __call__(self, owner: object, name: str, deed: Callable[[], object], *, call: int = 1) -> None: ...


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[Before]:
    """Yield a `Before`, and check at the end of the test that each of its functions was called."""
    asked, done = list[str](), list[str]()

    def ask(owner: object, name: str, deed: Callable[[], object], *, call: int = 1) -> None:
        calls, real = count(1), getattr(owner, name)
        asked.append(name)

        def doing(*values: Any, **named: Any) -> Any:
            if next(calls) == call:
                deed()
                done.append(name)
            return real(*values, **named)

        monkeypatch.setattr(owner, name, doing)

    yield ask
    assert asked == done


@pytest.mark.parametrize(("write", "call"), [("write_file", 4), ("_sync", 4), ("written_whole", 2), ("_steps", 3)])
@pytest.mark.parametrize(("gone", "now"), [(moved, "archive"), (removed, "run")])
def test_a_folder_that_disappears_while_a_checkpoint_is_written_still_gets_it(
    run: ag.RunConfig, tmp_path: Path, before: Before, write: str, call: int, gone: Any, now: str
) -> None:
    before(checkpoint, write, lambda: gone(tmp_path / "run"), call=call)
    summary = rollout(run, {})
    assert_whole(tmp_path / now, 5)
    assert summary["output_dir"] == str(tmp_path / now)
    assert [path.name for path in tmp_path.iterdir()] == [now]


def test_files_removed_within_a_folder_are_written_again(
    run: ag.RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def remove() -> None:
        for path in (tmp_path / "run").iterdir():
            removed(path) if path.is_dir() else path.unlink()

    rollout(run, {3: remove})
    assert_whole(tmp_path / "run", 5)
    said = capfd.readouterr().err
    assert all(
        f"{tmp_path / 'run' / name} was removed; writing it" in said for name in ("metrics.jsonl", "rollouts.sqlite")
    )


def test_a_checkpoint_with_a_removed_file_is_written_again(run: ag.RunConfig, tmp_path: Path, before: Before) -> None:
    def remove_state() -> None:
        [file] = (tmp_path / "run/checkpoints").glob(".step-*/state.pt")
        file.unlink()

    before(checkpoint, "sum_of", remove_state, call=2)
    assert rollout(run, {})["not_written"] == {}
    assert_whole(tmp_path / "run", 5)


@pytest.mark.parametrize("write", ["write_adapter", "write_checkpoint"])
@pytest.mark.parametrize(("gone", "now"), [(moved, "archive"), (removed, "run")])
def test_a_folder_that_disappears_at_the_end_still_gets_checkpoint_and_policy(
    run: ag.RunConfig, tmp_path: Path, before: Before, write: str, gone: Any, now: str
) -> None:
    call = {"write_adapter": 1, "write_checkpoint": 3}[write]
    before(snapshot, write, lambda: gone(tmp_path / "run"), call=call)
    rollout(run, {})
    assert_whole(tmp_path / now, 5)


@pytest.mark.parametrize(("gone", "now"), [(moved, "archive"), (removed, "run")])
def test_the_best_policy_is_saved_if_the_folder_disappears_during_its_evaluation(
    run: ag.RunConfig, tmp_path: Path, before: Before, gone: Any, now: str
) -> None:
    before(Evaluations, "_recorded", lambda: gone(tmp_path / "run"), call=2)
    rollout(replace(run, eval_tasks=1, eval_every=2, max_steps=3), {})
    assert last_checkpoint(tmp_path / now / "checkpoints").step == 3
    assert read_best(tmp_path / now) is not None
    assert [path.name for path in tmp_path.iterdir()] == [now]


@pytest.mark.parametrize("moment", ["last_place", "summary"])
@pytest.mark.parametrize("gone", [moved, removed])
def test_a_folder_that_disappears_at_the_very_end_is_followed_or_named(
    run: ag.RunConfig,
    tmp_path: Path,
    before: Before,
    gone: Any,
    moment: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    call = {"last_place": 1, "summary": 2}[moment]
    before(recorder.Recorder, moment, lambda: gone(tmp_path / "run"), call=call)
    summary = rollout(replace(run, max_steps=1), {})
    said = capfd.readouterr().err
    if gone is removed:
        assert list(tmp_path.iterdir()) == []
        assert ("WARNING: The folder" in said) == (moment == "last_place")
    else:
        assert_whole(tmp_path / "archive", 1)
    if gone is moved and moment == "last_place":
        assert summary["output_dir"] == str(tmp_path / "archive")
        assert f"was moved to {tmp_path / 'archive'} at the end" in said


def test_files_removed_at_the_very_end_are_named(
    run: ag.RunConfig, tmp_path: Path, before: Before, capfd: pytest.CaptureFixture[str]
) -> None:
    before(recorder.Recorder, "last_place", (tmp_path / "run/rollouts.sqlite").unlink)
    rollout(replace(run, max_steps=1), {})
    assert f"removed from {tmp_path / 'run'} at the end of the run are lost: rollouts.sqlite." in capfd.readouterr().err


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "rollouts.sqlite", "settings.json", "environment.json", "checkpoints"]
)
def test_each_removed_file_is_written_again_without_touching_the_others(
    run: ag.RunConfig, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run" / name

    def remove() -> None:
        removed(file) if file.is_dir() else file.unlink()

    rollout(replace(run, eval_tasks=1, eval_every=1), {2: remove})
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval/reward" not in line] == list(range(5))
    assert set(stored(tmp_path / "run")) >= set(range(5))
    assert last_checkpoint(tmp_path / "run/checkpoints").step == 5
    best = read_best(tmp_path / "run")
    rewards = [line["eval/reward"] for line in lines if "eval/reward" in line and line["step"]]
    assert best is not None
    assert best.reward == max(rewards)
    assert all((tmp_path / "run" / each).is_file() for each in ("settings.json", "environment.json", "summary.json"))
    assert len(re.findall(rf"{file}\S* was removed; writing it again\.", capfd.readouterr().err)) == 1


def test_an_editor_that_replaces_the_metrics_file_duplicates_no_line(
    run: ag.RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run/metrics.jsonl"

    def edit() -> None:
        file.with_name("new").write_text(file.read_text())
        file.with_name("new").replace(file)

    rollout(run, {1: edit})
    assert_whole(tmp_path / "run", 5)
    assert f"{file} was replaced by another file" in capfd.readouterr().err


def test_something_else_in_place_of_the_metrics_file_does_not_end_the_run(run: ag.RunConfig, tmp_path: Path) -> None:
    def put_folder() -> None:
        (tmp_path / "run/metrics.jsonl").rename(tmp_path / "metrics.jsonl")
        (tmp_path / "run/metrics.jsonl").mkdir()

    summary = rollout(run, {1: put_folder})
    assert summary["not_written"]["metrics.jsonl"] > 0
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    assert last_checkpoint(tmp_path / "run/checkpoints").step == 5


def test_a_folder_replaced_by_another_one_gets_no_checkpoint_of_the_run(
    run: ag.RunConfig, tmp_path: Path, before: Before
) -> None:
    def replaced() -> None:
        moved(tmp_path / "run")
        (tmp_path / "run").mkdir()

    before(recorder.Recorder, "flush", replaced, call=3)
    rollout(run, {})
    assert_whole(tmp_path / "archive", 5)


async def test_a_thread_that_finds_the_folder_moved_waits_for_the_one_that_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    with closing(LockedFolder(tmp_path / "run")) as held:
        log = MetricsLogger(held.path, steps=1)
        async with open_recorder(held.path, log, first=True, done=0, held=held) as record:

            def second() -> None:
                record.follow()
                found.append(log.folder)

            def said(_: str) -> None:
                other.start()
                other.join(0.2)  # it waits until this thread is done

            found: list[Path] = []
            other = threading.Thread(target=second)
            monkeypatch.setattr(log, "alert", said)
            (tmp_path / "run").rename(tmp_path / "archive")
            record.follow()
            other.join()
    assert found == [tmp_path / "archive"]


def test_a_run_whose_folder_another_process_takes_ends_and_saves_next_to_it(
    run: ag.RunConfig, disk: ExitStack, tmp_path: Path
) -> None:
    def take() -> None:
        (tmp_path / "run/.lock").unlink()
        disk.callback(LockedFolder(tmp_path / "run").close)

    with pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}.*this process ends"):
        rollout(run, {1: take})
    beside = tmp_path / "run-2"
    assert steps_in(beside) == [0, 1, 2]
    assert last_checkpoint(beside / "checkpoints").step == 3
    assert (beside / "settings.json").is_file()
    assert (beside / "adapter/adapter_model.safetensors").is_file()
    assert kept(tmp_path / "run") == ["step-000002"]


def test_if_no_folder_can_be_created_next_to_a_taken_one_the_loss_is_reported(
    run: ag.RunConfig, disk: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    longest = tmp_path / ("r" * 255)  # too long to append "-2"

    def take() -> None:
        (longest / ".lock").unlink()
        disk.callback(LockedFolder(longest).close)

    with pytest.raises(FolderInUse, match="this process ends"):
        rollout(replace(run, output_dir=longest), {2: take})
    assert "no folder can be created next to it ([Errno 36] File name too long" in caplog.text
    assert "the training after step 2 is lost" in caplog.text
    assert kept(longest) == ["step-000002"]
