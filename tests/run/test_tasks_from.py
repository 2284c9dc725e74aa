"""Tasks selected beforehand: an evaluation gives their ids, and a run trains only on them."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.environments.mixture import Member, Mixture, mix
from agentgym.errors import Failure
from agentgym.evals.evaluation import Evaluation
from agentgym.run.preflight import hold_checked
from agentgym.run.tasks.chosen import only_tasks
from agentgym.scheduling import Groups
from agentgym.store.reader import RolloutStore
from agentgym.types.rollout import Group, Rollout
from tests.run.test_resume import SETTINGS, Terse


class Rows(ag.ToolEnv[ag.Task]):
    """A data set of four rows per split."""

    @classmethod
    def tasks(cls, split: ag.Split) -> list[dict[str, str]]:  # type: ignore[override]  # rows become tasks
        return [{"id": f"{split}-{i}", "prompt": "?"} for i in range(4)]


def evaluation(rewards: dict[str, list[float | None]]) -> Evaluation:
    failure = Failure(type="EnvError", message="broken")
    groups = [
        Group(
            group_id=name,
            rollouts=tuple(
                Rollout(
                    rollout_id=f"{name}/{i}",
                    group_id=name,
                    segments=(),
                    reward=reward,
                    stop_reason="answer" if reward is not None else "error",
                    failure=None if reward is not None else failure,
                )
                for i, reward in enumerate(of_task)
            ),
        )
        for name, of_task in rewards.items()
    ]
    return Evaluation(groups=Groups(groups), k=4)


def test_ids_are_selected_by_how_often_their_tasks_are_solved() -> None:
    found = evaluation({"never": [0, 0.9], "half": [1, 0], "failed": [None, None], "most": [1, 1, 0.5, 1], "all": [1]})
    assert found.ids_solved(0.1, 0.9) == ["half", "most"]
    assert found.ids_solved(0, 0) == ["never"]
    assert found.ids_solved(0.5, 1) == ["half", "most", "all"]
    assert found.ids_solved(1, 1, solved=0.5) == ["most", "all"]
    with pytest.raises(ValueError, match=r"^least, most: must be shares from 0 to 1"):
        found.ids_solved(0.9, 0.1)


def test_a_file_of_ids_selects_training_tasks_and_not_held_out_ones(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("train-3\n\n train-1 \n")
    chosen = only_tasks(Rows, tmp_path / "ids")
    assert [task.id for task in chosen.tasks("train")] == ["train-1", "train-3"]
    assert chosen.tasks("test") == Rows.tasks("test")
    assert only_tasks(Rows, None) is Rows
    (tmp_path / "ids").write_bytes(b"\xef\xbb\xbftrain-3\r\ntrain-1\r\n")  # as Windows writes UTF-8
    assert [task.id for task in only_tasks(Rows, tmp_path / "ids").tasks("train")] == ["train-1", "train-3"]


def test_each_env_of_a_mixture_gets_its_own_ids(tmp_path: Path) -> None:
    env = mix({"rows": Member(Rows, 1), "terse": Member(Terse, 2)})
    (tmp_path / "ids").write_text("rows/train-2\nterse/t10\nterse/t12\n")
    chosen = only_tasks(env, tmp_path / "ids")
    assert issubclass(chosen, Mixture)
    assert {task.id for task in chosen.tasks("train")} == {"rows/train-2", "terse/t10", "terse/t12"}
    (tmp_path / "ids").write_text("rows/train-2\n")
    with pytest.raises(ValueError, match=r"^tasks_from: .* has no tasks of terse; add some"):
        only_tasks(env, tmp_path / "ids")
    (tmp_path / "ids").write_text("other/1\n")
    with pytest.raises(ValueError, match=r"^tasks_from: 1 of the ids .* match no training task, such as 'other/1'"):
        only_tasks(env, tmp_path / "ids")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train-1\nx\ny\n", r"^tasks_from: 2 of the ids in .* match no training task, such as 'x'$"),
        (" \n", r"^tasks_from: .* contains no ids; write one per line"),
        (None, r"^tasks_from: .*ids cannot be read"),
    ],
)
def test_a_file_that_selects_no_existing_task_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "ids").write_text(text)
    with pytest.raises(ValueError, match=said):
        only_tasks(Rows, tmp_path / "ids")


async def test_a_selected_envs_tasks_run_as_before(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("t20\n")
    chosen = only_tasks(Terse, tmp_path / "ids")
    rollout = await ag.rollout(chosen, chosen.tasks("train")[0], Scripted([say("1")]))
    assert rollout.reward is not None


def test_a_run_trains_only_on_the_selected_tasks(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("t11\nt12\nt13\n")
    run = replace(SETTINGS, tasks_from=tmp_path / "ids", max_steps=2, eval_tasks=0, output_dir=tmp_path / "run")
    asyncio.run(ag.train_policy(run))
    with RolloutStore(tmp_path / "run") as store:
        ids = {row.group_id for row in store.summaries(limit=100)}
    assert ids <= {"t11", "t12", "t13"}
    kept = json.loads((tmp_path / "run" / "settings.json").read_text())["settings"]
    assert kept["tasks_from"] == str(tmp_path / "ids")


class Doubled(Rows):
    """Rows of which the third has the id of the first."""

    of: ag.Split = "train"

    @classmethod
    def tasks(cls, split: ag.Split) -> list[dict[str, str]]:  # type: ignore[override]  # rows become tasks
        return [{"id": f"{split}-{i % 2 if split == cls.of else i}", "prompt": f"{split} {i}"} for i in range(4)]


class DoubledHeldOut(Doubled):
    of: ag.Split = "test"


@pytest.mark.parametrize(("env", "split"), [(Doubled, "train"), (DoubledHeldOut, "test")])
def test_two_tasks_with_the_same_id_are_refused_before_a_model_is_loaded(
    tmp_path: Path, env: type[Rows], split: str
) -> None:
    run = replace(SETTINGS, output_dir=tmp_path, eval_tasks=4)
    said = rf"^env: {env.__name__}.tasks\('{split}'\) has the id '{split}-0' twice, as number 0 and as number 2; give"
    with pytest.raises(ValueError, match=said), hold_checked(run, env, tmp_path):
        raise AssertionError
    unused = replace(run, eval_tasks=2) if split == "test" else replace(run, max_steps=0)
    with hold_checked(unused, env, tmp_path):
        pass


def test_a_selected_id_of_two_tasks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ids").write_text("train-1\n")
    with pytest.raises(ValueError, match=r"^env: Doubled.tasks\('train'\) has the id 'train-0' twice"):
        only_tasks(Doubled, tmp_path / "ids")
