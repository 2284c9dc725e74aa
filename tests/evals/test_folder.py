"""The folder of an evaluation: on a full disk, and moved, removed or locked by another process while it runs."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.cli import main as cli
from agentgym.cli.evals.outcome import INCOMPLETE, exit_status
from agentgym.engines.scripted import Scripted, say
from agentgym.evals.evaluation import Evaluation
from agentgym.evals.kept import kept_in
from agentgym.evals.rescore import rescore
from agentgym.files.folder_lock import LockedFolder
from agentgym.scheduling.accounting import Groups
from agentgym.store.reader import RolloutStore
from agentgym.store.writer import RolloutWriter
from tests.files.limits import files_up_to, removed
from tests.store.test_store import group, rollout

DEEDS: dict[int, Callable[[], object]] = {}
"""What happens while a task is scored, by the task's number."""
TASKS = 12


class Deeds(ag.ToolEnv[ag.Task]):
    """Calls a function of the test while a task is scored; the reward is 1."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return [ag.Task(id=str(number), prompt=f"{number} " * 2000) for number in range(TASKS)]

    @ag.reward
    async def one(self) -> float:
        DEEDS.pop(int(self.task.id), lambda: None)()
        return 1.0


@pytest.fixture
def disk() -> Iterator[ExitStack]:
    """Yield a stack for contexts that fill the disk; they end with the test."""
    with ExitStack() as stack:
        yield stack
    DEEDS.clear()


async def played(out: Path | str, *, resume: bool = False) -> Evaluation:
    return await ag.evaluate(Deeds, Scripted([say("x")]), concurrency=1, output_dir=out, resume=resume)


def stored(folder: Path) -> list[str]:
    with RolloutStore(folder) as store:
        return sorted(row.group_id for row in store.summaries())


ALL = sorted(map(str, range(TASKS)))


async def test_an_evaluation_on_a_full_disk_returns_its_result_and_reruns_lost_rollouts(
    tmp_path: Path, disk: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    DEEDS[4] = lambda: disk.enter_context(files_up_to(2_000))
    found = await played(tmp_path / "eval")
    disk.close()
    assert (found.reward, len(found.rollouts)) == (1.0, TASKS)
    kept = stored(tmp_path / "eval")
    assert 0 < found.not_kept == TASKS - len(kept)
    assert (
        f"output_dir: {found.not_kept} rollouts are not stored in {tmp_path}/eval; `resume` runs them again"
        in caplog.messages
    )
    again = await played(tmp_path / "eval", resume=True)
    assert (again.resumed, again.not_kept, stored(tmp_path / "eval")) == (len(kept), 0, ALL)


async def test_rollouts_that_did_not_fit_are_written_when_there_is_space(tmp_path: Path, disk: ExitStack) -> None:
    DEEDS.update({4: lambda: disk.enter_context(files_up_to(2_000)), 8: disk.close})
    found = await played(tmp_path / "eval")
    assert (found.not_kept, stored(tmp_path / "eval")) == (0, ALL)
    assert (tmp_path / "eval/summary.json").is_file()


@pytest.mark.parametrize("how", ["moved", "removed", "taken"])
async def test_an_evaluation_whose_folder_disappears_stores_all_of_its_rollouts(
    tmp_path: Path, disk: ExitStack, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take() -> None:
        (tmp_path / "eval/.lock").unlink()
        disk.callback(LockedFolder(tmp_path / "eval").close)

    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    now = {"moved": tmp_path / "archive", "removed": tmp_path / "eval", "taken": tmp_path / "eval-2"}[how]
    deeds = {
        "moved": lambda: (tmp_path / "eval").rename(now),
        "removed": lambda: removed(tmp_path / "eval"),
        "taken": take,
    }
    DEEDS.update({2: lambda: os.chdir("other"), 4: deeds[how]})
    found = await played("eval")
    disk.close()
    assert (found.reward, found.not_kept, stored(now)) == (1.0, 0, ALL)
    assert (now / "summary.json").is_file()
    assert (await played(now, resume=True)).resumed == TASKS
    assert any("while it was written to" in message or "has taken the folder" in message for message in caplog.messages)


async def test_named_tasks_and_the_tasks_of_a_split_are_different_evaluations(tmp_path: Path) -> None:
    await played(tmp_path / "eval")
    chosen = [ag.Task(id="t0", prompt="Say 0.")]
    with pytest.raises(ValueError, match=r"^tasks: .* was started with tasks of the split 'test'; use the same"):
        await ag.evaluate(Deeds, Scripted([say("x")]), tasks=chosen, output_dir=tmp_path / "eval", resume=True)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["settings.json", "summary.json", "notes.txt"])
async def test_an_evaluation_refuses_a_folder_with_other_content(tmp_path: Path, name: str, resume: bool) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / name).write_text('{"my": 1}')
    with pytest.raises(ValueError, match=r"contains '\w+\.\w+' but no evaluation|was started with None"):
        await played(tmp_path / "eval", resume=resume)
    assert {path.name: path.read_text() for path in (tmp_path / "eval").iterdir()} == {name: '{"my": 1}'}


async def test_a_rescore_on_a_full_disk_returns_its_result_and_leaves_nothing(tmp_path: Path, disk: ExitStack) -> None:
    await played(tmp_path / "eval")
    DEEDS[0] = lambda: disk.enter_context(files_up_to(2_000))
    found = await rescore(tmp_path / "eval", Deeds, tmp_path / "again")
    disk.close()
    assert (len(found.reward.after), found.reward.changed, found.not_kept) == (TASKS, 0, TASKS)
    assert os.listdir(tmp_path) == ["eval"]  # noqa: PTH208


def test_an_evaluation_that_starts_on_a_full_disk_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with files_up_to(300):
        assert cli.main(["eval", f"{__name__}:Deeds", "--model", "tiny", "--output-dir", "new"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("agentgym: eval: [Errno 27] File too large")


def evaluation(scored: int, failed: int, **more: Any) -> Evaluation:
    one = [group(rollout(f"{number}/0", reward=None if number < failed else 1.0)) for number in range(scored + failed)]
    return Evaluation(groups=Groups(one), k=1, **more)


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (evaluation(9, 0), 0, ""),
        (evaluation(9, 1), 0, "1 of 10 rollouts have no reward; to run them again: "),
        (evaluation(8, 2), INCOMPLETE, "--resume --retry-failed"),
        (evaluation(9, 0, not_kept=1), INCOMPLETE, "1 of 9 rollouts are not in"),
        (evaluation(9, 0, resumed=9), 0, "nothing to run: all 9 rollouts are already in"),
    ],
)
def test_the_exit_code_tells_how_an_evaluation_went(
    found: Evaluation, code: int, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert exit_status(found, tmp_path) == code
    err = capsys.readouterr().err
    assert said in err
    assert bool(said) == bool(err)


def test_evaluations_and_rescores_of_the_same_second_have_different_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "eval").mkdir()
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(played("eval")).not_kept == 0
    words = ["rescore", "eval", "--env", f"{__name__}:Deeds"]
    assert [cli.main(words) for _ in range(3)] == [0, 0, 0]
    folders = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("folder")]
    assert len(set(folders)) == 3
    assert all(Path(folder).is_dir() for folder in folders)
    assert cli.main(["rescore", "eval", "--env", "nowhere:None"]) == 1
    assert len(list((tmp_path / "eval").glob("rescored-*"))) == 3  # the refused one leaves nothing


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (None, r"contains rollouts, but no settings\.json of an evaluation"),
        ('{"versions": {}, "model": null}', r"contains rollouts, but no settings\.json of an evaluation"),
        ('{"settings": ', r"settings\.json cannot be read \("),
    ],
)
async def test_rollouts_without_an_evaluations_settings_are_refused_with_and_without_resume(
    tmp_path: Path, settings: str | None, said: str, resume: bool
) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0"))], step=0)
    if settings is not None:
        (tmp_path / "settings.json").write_text(settings)
    with pytest.raises(ValueError, match=rf"^output_dir: .*{said}.*; use another folder$"):
        await played(tmp_path, resume=resume)


async def test_an_evaluation_that_ended_before_its_store_was_created_can_be_resumed(tmp_path: Path) -> None:
    await played(tmp_path / "eval")
    for path in (tmp_path / "eval").iterdir():
        if path.name != "settings.json":
            path.unlink()
    with pytest.raises(ValueError, match=r"^output_dir: .* already holds an evaluation; resume it with resume=True"):
        await played(tmp_path / "eval")
    assert (await played(tmp_path / "eval", resume=True)).resumed == 0
    assert stored(tmp_path / "eval") == ALL


async def test_numpy_integers_are_stored_as_integers(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"n": np.int64(2), "k": np.int64(1), "seed": np.int64(3), "concurrency": np.int64(1)}
    assert (await ag.evaluate(Deeds, Scripted([say("x")]), output_dir=tmp_path, **numbers)).seed == 3
    resumed = await ag.evaluate(Deeds, Scripted([say("x")]), n=2, seed=3, output_dir=tmp_path, resume=True)
    assert resumed.resumed == 2


async def test_an_evaluation_whose_folder_cannot_be_recreated_reports_what_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def in_the_way() -> None:
        removed(tmp_path / "above")
        (tmp_path / "above").write_text("a file")

    DEEDS[4] = in_the_way
    found = await played(tmp_path / "above/eval")
    assert (found.reward, found.not_kept) == (1.0, TASKS)
    assert f"{tmp_path}/above/eval could not be written" in caplog.text


async def test_an_evaluation_whose_folder_can_be_recreated_later_loses_no_rollout(tmp_path: Path) -> None:
    def in_the_way() -> None:
        removed(tmp_path / "above")
        (tmp_path / "above").write_text("a file")

    DEEDS.update({4: in_the_way, 8: (tmp_path / "above").unlink})
    found = await played(tmp_path / "above/eval")
    assert (found.not_kept, stored(tmp_path / "above/eval")) == (0, ALL)
    assert (await played(tmp_path / "above/eval", resume=True)).resumed == TASKS


def test_model_names_of_a_lost_folder_are_omitted_while_the_disk_is_full(tmp_path: Path, disk: ExitStack) -> None:
    settings = {"seed": 0, "more": "x" * 2000}
    with kept_in(tmp_path / "eval", settings, {}, [], {}, k=1, resume=False, retry_failed=False) as kept:
        removed(tmp_path / "eval")
        disk.enter_context(files_up_to(500))
        kept.hold_models({"": {"weights": "a"}})
        disk.close()
        assert not (tmp_path / "eval/settings.json").exists()
        kept.hold_models({"": {"weights": "a"}})
    assert '"a"' in (tmp_path / "eval/settings.json").read_text()
