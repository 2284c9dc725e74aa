"""A run's summary on the real engine and trainer: whether it learned something, and if not, why."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.environments.env import Split
from agentgym.run.metrics_logger import MetricsLogger
from agentgym.run.summary import Report, account, rewards_at_ends

ROOT = Path(__file__).parents[2]


def task(number: int) -> ag.Task:
    return ag.Task(id=f"t{number}", prompt=(ag.Message(role="user", content=f"Start at key {number}."),))


class Constant(ag.ToolEnv[ag.Task]):
    """Has a broken tool and a constant reward; its judge fails for a quarter of the tasks."""

    limits = ag.Limits(turns=2)

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(task, range(10, 50) if split == "train" else range(50, 90))

    @ag.tool
    async def python(self, code: str) -> str:
        """Run Python code."""
        raise AttributeError("no interpreter")

    @ag.reward
    def constant(self) -> float:
        if int(self.task.id[1:]) % 4 == 0:
            raise ValueError("judge is down")
        return 0.5


class Taskless(ag.ToolEnv[ag.Task]):
    """Has no tasks to train on."""


SETTINGS = ag.RunConfig(
    recipe="constant",
    env=f"{__name__}:Constant",
    model="tiny",
    engine=ag.TransformersConfig(slots=8),
    train=ag.TrainConfig(temperature=0.7, device="cpu"),
    max_steps=2,
    prompts_per_step=4,
    group_size=2,
    max_turn_tokens=40,
    eval_tasks=2,
)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that gives the name of one of this file's env classes, however pytest imported the file."""
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, "report_envs", module)
    return "report_envs:{}".format


async def test_a_run_that_learned_nothing_says_so_and_why(
    tmp_path: Path, made: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    summary = await ag.train_policy(replace(SETTINGS, env=made("Constant"), output_dir=tmp_path))
    assert summary["optimizer_steps"] == 0
    assert summary["groups_without_signal"] > 0
    assert summary["failed"] == sum(summary["failures"].values()) > 0
    assert all("judge is down" in text for text in summary["failures"])
    assert summary["tool_errors"]["python"] > 0
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    said = capsys.readouterr().err
    for reason in (
        "No optimizer step",
        "No group had a signal",
        "The reward never varied",
        "The tool 'python' failed in",
        "judge is down",
        "learned nothing: no optimizer step was taken",
        "failed rollouts: EnvError",
    ):
        assert said.count(f"WARNING: {reason}") == 1 or not reason[0].isupper() or reason.startswith("rollouts")
        assert reason in said


async def test_the_held_out_scores_are_in_the_metrics_file(tmp_path: Path, made: Callable[[str], str]) -> None:
    run = replace(SETTINGS, env=made("Constant"), output_dir=tmp_path)
    summary = await ag.train_policy(run)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    held_out = [row for row in rows if "eval/reward" in row]
    count = {"eval/reward/constant": 0.5, "eval/pass@1": 0.0, "eval/rollouts": 2.0, "eval/failed": 0.0}
    assert held_out == [
        {"step": 0, "eval/reward": summary["eval_before"], **count},
        {"step": 2, "eval/reward": summary["eval_after"], **count},
    ]


async def test_an_env_without_tasks_is_refused_before_the_model_is_loaded(
    tmp_path: Path, made: Callable[[str], str]
) -> None:
    run = replace(SETTINGS, env=made("Taskless"), model="no/such-model", output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^env: Taskless declares no tasks; define `@classmethod"):
        await ag.train_policy(run)
    with pytest.raises(ValueError, match=r"^prompts_per_step: .* has 40 tasks, but at least 99"):
        await ag.train_policy(replace(run, env=made("Constant"), prompts_per_step=99))
    with pytest.raises(
        ValueError,
        match=r"^prompts_per_step: .* has 40 tasks, but at least 42 are needed, because prompts_per_step",
    ):
        await ag.train_policy(replace(run, env=made("Constant"), prompts_per_step=21, max_staleness=1))
    extra = ag.OversampleConfig(extra_groups=1, stop="target")
    with pytest.raises(
        ValueError, match=r"at least 41 are needed, because prompts_per_step and oversample\.extra_groups need"
    ):
        await ag.train_policy(replace(run, env=made("Constant"), prompts_per_step=40, oversample=extra))


def test_metrics_are_strict_json_and_non_finite_values_are_counted(tmp_path: Path) -> None:
    def refuse(name: str) -> Any:
        raise AssertionError(name)

    with MetricsLogger(tmp_path, steps=1) as log:
        log(0, {"reward": 0.5, "train/loss": float("nan"), "train/grad_norm": float("inf")})
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 0, "reward": 0.5, "train/loss": None, "train/grad_norm": None, "metrics_not_finite": 2}


def test_stderr_in_a_file_has_one_line_per_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsLogger(tmp_path, steps=2) as log:
        for step in range(2):
            log.note("rollouts")
            log(step, {"reward": 0.5})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 0, 1/2 done", "step 1, 2/2 done"]
    assert "reward 0.50 (last 5: 0.50)" in lines[0]


RECIPE = """
import agentgym as ag

RECIPE = ag.RunConfig(
    recipe="adding",
    env="my_env:Adder",
    model="tiny",
    max_steps=1,
    prompts_per_step=2,
    group_size=2,
    eval_tasks=2,
    train=ag.TrainConfig(lr=1e-3),
)

if __name__ == "__main__":
    ag.main(RECIPE)
"""
ENV = """
import agentgym as ag

class Adder(ag.ToolEnv[ag.Task]):
    @classmethod
    def tasks(cls, split):
        numbers = range(50) if split == "train" else range(50, 60)
        return ag.Procedural(lambda n: ag.Task(id=str(n), prompt=({"role": "user", "content": f"{n} + 1?"},)), numbers)

    @ag.reward
    def short(self) -> float:
        return 1 / (1 + len(self.answer or ""))
"""


def in_a_folder_of_its_own(folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    (folder / "adding.py").write_text(RECIPE)
    (folder / "my_env.py").write_text(ENV)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "adding.py", *flags]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_recipe_in_any_folder_can_train_the_shipped_model(tmp_path: Path) -> None:
    done = in_a_folder_of_its_own(tmp_path, "--max-turn-tokens", "8")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 1
    folder = tmp_path / summary["output_dir"]
    names = {path.name for path in folder.iterdir()}
    kept = {"adapter", "checkpoints", "environment.json", "metrics.jsonl", "rollouts.sqlite", "settings.json"}
    assert names - {"reward.png"} == kept | {"summary.json"}
    kept = json.loads((folder / "settings.json").read_text())
    assert kept["settings"]["max_turn_tokens"] == 8
    assert kept["versions"]["torch"]


def test_an_invalid_setting_is_refused_on_the_command_line(tmp_path: Path) -> None:
    done = in_a_folder_of_its_own(tmp_path, "--group-size", "1")
    assert done.returncode == 2
    assert "adding: --group-size: a single rollout" in done.stderr
    assert "Traceback" not in done.stderr


ROWS: list[dict[str, Any]] = [
    {
        "reward": reward,
        "rollouts/started": 64.0,
        "rollouts/finished": 60.0,
        "rollouts/failed": 4.0,
        "failures/EnvError": 3.0,
        "failures/SandboxError": 1.0,
        "samples/groups": 8.0,
        "samples/groups_without_signal": 3.0,
        "samples/rollouts_trained": 40.0,
        "groups/solved_by_all": 0.25,
        "samples/untrained_tokens": 0.0,
        "train/optimizer_steps": 1.0,
        "train/trained_tokens": 1000.0,
        "train/skipped_steps": 0.0,
        "stop/answer": 0.9,
        "stop/turns": 0.1,
    }
    for reward in (0.0, 0.5, 0.5, 0.5, 0.5, 1.0)
]


def test_the_final_report_says_what_was_learned_or_why_not() -> None:
    assert account(ROWS, {0: 0.25, 6: 0.75}) == [
        "learned: held-out reward 0.25 at the start, 0.75 at the end",
        "         training reward 0.33 in the first 3 steps, 0.67 in the last 3",
        "         6 optimizer steps on 240 of 384 rollouts, 6,000 tokens",
        "not learned from: 18 of 48 groups, whose rewards are all equal; 12 groups solved by all rollouts",
        "                  24 failed rollouts: EnvError 18, SandboxError 6",
        "cut off: 10.0% of the rollouts by the turns limit",
    ]


def test_a_run_whose_reward_fell_does_not_claim_to_have_learned() -> None:
    fell = account(ROWS[::-1], {})[0]
    assert fell == "got worse: training reward 0.67 in the first 3 steps, 0.33 in the last 3"
    fell = account(ROWS[::-1], {0: 0.75, 6: 0.25})[0]
    assert fell == "got worse: held-out reward 0.75 at the start, 0.25 at the end"


def test_the_verdict_stands_before_the_reward_that_decides_it() -> None:
    first, second, *_ = account(ROWS[::-1], {0: 0.25, 6: 0.75})
    assert first == "learned: held-out reward 0.25 at the start, 0.75 at the end"
    assert second == "         training reward 0.67 in the first 3 steps, 0.33 in the last 3"


def test_the_rewards_of_a_short_run_are_those_of_its_first_and_last_step() -> None:
    assert account(ROWS[:2], {})[0] == "learned: training reward 0.00 in the first step, 0.50 in the last"
    assert rewards_at_ends(ROWS[:2]) == (0.0, 0.5, 1)


@pytest.mark.parametrize(("steps", "many"), [(1, 1), (2, 1), (3, 1), (5, 2), (9, 4), (10, 5), (40, 5)])
def test_the_first_and_the_last_steps_of_a_run_do_not_overlap(steps: int, many: int) -> None:
    rows = [{"reward": float(step)} for step in range(steps)]
    middle = (many - 1) / 2
    assert rewards_at_ends(rows) == (middle, steps - 1 - middle, many)


@pytest.mark.parametrize(("rows", "held_out"), [(ROWS[:1], {}), (ROWS, {0: 0.5, 6: 0.501}), (ROWS[1:5], {})])
def test_a_run_whose_reward_stayed_the_same_does_not_claim_to_have_learned(
    rows: list[dict[str, float]], held_out: dict[int, float]
) -> None:
    assert account(rows, held_out)[0].startswith("reward unchanged: ")
    taught = [row | {"teacher/divergence": 0.1} for row in rows]
    assert account(taught, held_out)[0].startswith("trained: ")


def test_the_held_out_reward_decides_whether_the_reward_fell() -> None:
    assert account(ROWS[::-1], {0: 0.25, 6: 0.75})[0].startswith("learned: ")
    assert account(ROWS, {0: 0.75, 6: 0.25})[0].startswith("got worse: ")


BRANCHED = {
    "rollout/branches": 2.0,
    "rollout/branches_failed": 0.5,
    "rollout/branch_tokens": 30.0,
    "tokens/sampled": 40.0,
}


def test_the_final_report_covers_branches_and_the_critic() -> None:
    rows = [row | BRANCHED for row in ROWS]
    assert "branches: 720 (180 failed), with 75% of the sampled tokens" in account(rows, {})
    assert "18 of 48 groups, whose rewards are all equal, including those of their branches; 12 groups" in "\n".join(
        account(rows, {})
    )
    rows = [row | {"train/explained_variance": value} for row, value in zip(ROWS, (-0.5, 0.2, 0.25), strict=False)]
    assert "critic: explained variance -0.50 at the start, 0.25 at the end" in account([*rows, *ROWS[3:]], {})
    summary = Report().summary([row | BRANCHED for row in rows])
    names = ("branches", "branches_failed", "branch_tokens", "explained_variance")
    assert [summary[name] for name in names] == [360, 90, 5400, 0.25]
    assert not summary.keys() & Report().summary(ROWS).keys() & set(names)


def test_a_run_that_should_branch_but_did_not_gives_a_warning() -> None:
    said = Report().warnings([row | {"rollout/branches": 0.0} for row in ROWS])
    assert said == ["No branch was run: branching.after and branching.every selected no state in any rollout."]
    assert Report().warnings([row | BRANCHED for row in ROWS]) == Report().warnings(ROWS) == []


def test_a_run_without_steps_learned_nothing() -> None:
    rows = [row | {"train/optimizer_steps": 0.0, "train/skipped_steps": 2.0} for row in ROWS[:1]]
    said = account(rows, {})
    assert said[0] == "learned nothing: no optimizer step was taken"
    assert "2 skipped optimizer steps: the loss or the gradient was not finite" in said[3]
    assert account([], {0: 0.5}) == []


def test_dropped_rollouts_and_untrained_tokens_of_a_run_are_counted() -> None:
    rows = [row | {"rollouts/dropped": 2.0, "samples/untrained_tokens": 7.0} for row in ROWS[:2]]
    said = "\n".join(account(rows, {}))
    assert "4 dropped rollouts" in said
    assert "14 tokens in segments that are not trained on" in said
