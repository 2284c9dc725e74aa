"""Evaluations that are stored, killed, resumed and compared, with models, adapters and endpoints."""

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import AgentGymError
from agentgym.evals.evaluation import Evaluation
from agentgym.evals.opening import name_of, open_engine
from agentgym.store.reader import RolloutStore
from agentgym.store.run_settings import write_settings
from agentgym.train import Trainer
from tests.evals.killed_script import AT_ONCE, TASKS, K

ROOT = Path(__file__).parents[2]


class Even(ag.ToolEnv[ag.Task]):
    """An env with reward 1 if the answer has an even number of characters."""

    limits = ag.Limits(turns=1, turn_tokens=6, context_tokens=512)

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        first = 0 if split == "train" else 100
        return [ag.Task(id=str(first + i), prompt=f"Say {i}") for i in range(4)]

    @ag.reward
    def even(self) -> float:
        return float(len(self.answer or "") % 2 == 0)


class Vowel(Even):
    """An env with reward 1 if the answer has a vowel before any consonant."""

    @ag.reward
    def even(self) -> float:
        letters = [letter for letter in (self.answer or "").lower() if letter.isalpha()]
        return float(bool(letters) and letters[0] in "aeiou")


def stored(folder: Path) -> dict[str, list[float | None]]:
    """Return each task's rewards in the store, in the order of the rollout names."""
    found: dict[str, list[float | None]] = {}
    with RolloutStore(folder) as store:
        for row in sorted(store.summaries(), key=lambda row: row.rollout_id):
            found.setdefault(row.group_id, []).append(row.reward)
    return found


@pytest.mark.parametrize("env", [Even, Vowel])
async def test_pass_rates_of_the_tiny_model_match_a_count_by_hand_from_the_store(
    env: type[Even], tmp_path: Path
) -> None:
    sampling = ag.Sampling(temperature=1.5)
    evaluation = await ag.evaluate(env, "tiny", n=4, k=4, sampling=sampling, output_dir=tmp_path / "one")
    rewards = stored(tmp_path / "one")
    assert {name: list(of) for name, of in evaluation.rewards.items()} == rewards
    for k in (1, 2, 3, 4):
        drawn = [list(combinations([reward == 1 for reward in of], k)) for of in rewards.values()]
        assert evaluation.pass_at(k) == pytest.approx(sum(sum(map(any, d)) / len(d) for d in drawn) / 4)
        assert evaluation.pass_hat(k) == pytest.approx(sum(sum(map(all, d)) / len(d) for d in drawn) / 4)
    summary = json.loads((tmp_path / "one/summary.json").read_text())
    assert summary["pass_at"]["4"] == pytest.approx(evaluation.pass_at(4))
    assert summary["reward_interval"]["low"] <= evaluation.reward <= summary["reward_interval"]["high"]
    assert summary["tasks"]["100"] == {
        "scored": 4,
        "solved": sum(r == 1 for r in rewards["100"]),
        "reward": pytest.approx(sum(r or 0 for r in rewards["100"]) / 4),
    }


async def test_an_adapter_folder_can_be_used_as_a_model(tmp_path: Path) -> None:
    async with Trainer("tiny", ag.TrainConfig()) as trainer:
        trainer.save(tmp_path / "run/adapter")  # its weights equal the base's
    of_base = await ag.evaluate(Even, "tiny", k=2)
    async with open_engine(tmp_path / "run") as engine:
        assert name_of(engine).endswith(f" with {tmp_path / 'run/adapter'}")
    for folder in (tmp_path / "run/adapter", str(tmp_path / "run")):
        evaluation = await ag.evaluate(Even, folder, k=2)
        assert [r.messages for r in evaluation.rollouts] == [r.messages for r in of_base.rollouts]


class Selfish(Even):
    """An env that cancels the task in which it runs, for its tasks 100 and 101."""

    async def setup(self) -> None:
        await cancel_where(self.task.id in ("100", "101"))


class SelfishJudge(Even):
    """An env that cancels the task in which the rewards of its task 101 are computed."""

    @classmethod
    async def group_reward(cls, task: ag.Task, rollouts: Sequence[ag.Rollout], model: Any) -> Sequence[float]:
        await cancel_where(task.id == "101")
        return [1.0] * len(rollouts)


async def cancel_where(cancels: bool) -> None:
    task = asyncio.current_task()
    if cancels and task is not None:
        task.cancel()
    await asyncio.sleep(0)


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_an_env_that_cancels_its_own_task_fails_only_its_own_rollouts(
    concurrency: int, tmp_path: Path, no_leaks: None
) -> None:
    engine = Scripted(lambda text: say("ab"))
    evaluation = await ag.evaluate(Selfish, engine, k=2, concurrency=concurrency, output_dir=tmp_path)
    assert list(evaluation.rewards.values()) == [(None, None), (None, None), (1.0, 1.0), (1.0, 1.0)]
    assert evaluation.failures == [("AgentGymError: its task was cancelled from outside", 4)]
    assert stored(tmp_path) == {name: list(of) for name, of in evaluation.rewards.items()}


async def test_a_group_reward_that_cancels_its_own_task_fails_only_its_group(no_leaks: None) -> None:
    evaluation = await ag.evaluate(SelfishJudge, Scripted(lambda text: say("ab")), k=2, concurrency=1)
    assert list(evaluation.rewards.values()) == [(2.0, 2.0), (None, None), (2.0, 2.0), (2.0, 2.0)]
    assert evaluation.failures == [("AgentGymError: group_reward: its task was cancelled from outside", 2)]


async def test_a_cancelled_evaluation_ends_its_rollouts(no_leaks: None) -> None:
    begun, ended = asyncio.Event(), list[str]()

    class Waits(Even):
        async def setup(self) -> None:
            begun.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            ended.append(self.task.id)

    running = asyncio.create_task(ag.evaluate(Waits, Scripted([]), n=1))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == ["100"]


def run_until(folder: Path, rollouts: int) -> tuple[list[str], str]:
    """Let an evaluation run that many rollouts and kill it in the next; return the started ones and its last line."""
    command = [sys.executable, "-m", "tests.evals.killed_script", str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    began: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("reward"):
                return began, line
            began.append(line.strip())
            if len(began) > rollouts:
                process.kill()
                break
            process.stdin.write("\n")
            process.stdin.flush()
    return began, ""


def test_an_evaluation_that_is_killed_again_and_again_runs_no_stored_rollout_twice(tmp_path: Path) -> None:
    rng = random.Random(3)
    kept: set[str] = set()
    last = ""
    for _ in range(4):
        began, last = run_until(tmp_path, rng.randint(1, 4))
        assert not kept & set(began)
        with RolloutStore(tmp_path) as store:
            kept = {row.rollout_id for row in store.summaries()}
        assert set(began[:-1]) <= kept  # everything before the start of the next rollout is on disk
    began, last = run_until(tmp_path, TASKS * K)
    assert not kept & set(began)
    assert last == f"reward 1.0 rollouts {TASKS * K}\n"
    assert stored(tmp_path) == {f"t{i}": [1.0] * K for i in range(TASKS)}


def signaled(folder: Path, tasks: int, begun: int, number: int) -> tuple[list[str], str]:
    """Let an evaluation run and send it a signal once it has started that many rollouts.

    Returns:
        The started rollouts, and the evaluation's last line.
    """
    command = [sys.executable, "-m", "tests.evals.killed_script", str(folder), str(tasks)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    began: list[str] = []
    last = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:  # to the end: rollouts that start before the signal arrives count, too
            if line.startswith("reward"):
                last = line
                continue
            began.append(line.strip())
            if len(began) == begun:
                process.send_signal(number)
    return began, last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "tasks"), [(2, 40), pytest.param(10, 400, marks=pytest.mark.proof)], ids=["few", "ten"]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_an_evaluation_killed_while_it_runs_repeats_nothing_and_loses_nothing(
    tmp_path: Path, kills: int, tasks: int, number: int
) -> None:
    rng = random.Random(kills)
    kept: dict[str, int] = {}
    cut_short = 0
    for _ in range(kills):
        began, last = signaled(tmp_path, tasks, rng.randint(AT_ONCE, tasks * K // (2 * kills)), number)
        cut_short += not last
        assert not kept.keys() & set(began)
        with RolloutStore(tmp_path) as store:
            rows = {row.rollout_id: row.number for row in store.summaries()}
            assert len(rows) == len(store)
        assert kept.items() <= rows.items()
        # Each of these workers starts its next rollout once the previous one is on disk.
        assert len(rows) - len(kept) >= len(began) - AT_ONCE
        kept = rows
    assert cut_short
    began, last = signaled(tmp_path, tasks, -1, number)
    assert not kept.keys() & set(began)
    assert last == f"reward 1.0 rollouts {tasks * K}\n"
    assert stored(tmp_path) == {f"t{i}": [1.0] * K for i in range(tasks)}


async def test_a_finished_evaluation_is_resumed_without_running_the_model(tmp_path: Path) -> None:
    engine = Scripted(lambda text: say("ab"))
    first = await ag.evaluate(Even, engine, k=2, output_dir=tmp_path)

    def never(text: str) -> str:
        raise AssertionError("a stored rollout was run again")

    again = await ag.evaluate(Even, Scripted(never), k=2, output_dir=tmp_path, resume=True)
    assert again.rewards == first.rewards
    assert again.rollouts[0].text() == first.rollouts[0].text()
    more = await ag.evaluate(Even, engine, k=3, output_dir=tmp_path, resume=True)
    assert [len(of) for of in more.rewards.values()] == [3] * 4
    assert len(stored(tmp_path)["100"]) == 3
    assert (first.resumed, again.resumed, more.resumed) == (None, 8, 8)


class Digging(ag.ToolEnv[ag.Task]):
    """An env whose first attempt at a task scores low with a failing tool, and whose second one scores high."""

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return [ag.Task(id="a", prompt="Dig."), ag.Task(id="b", prompt="Dig.")]

    @ag.tool
    async def dig(self) -> str:
        """Dig."""
        raise ag.ToolError("stone")

    @ag.reward
    async def found(self) -> float:
        return 0.15 if self.metrics["tool_errors"] else 1.0


async def test_warning_signs_of_an_evaluations_rollouts_consider_the_whole_task(tmp_path: Path) -> None:
    poor = Scripted([call("dig"), say("nothing")])
    await ag.evaluate(Digging, poor, k=1, output_dir=tmp_path)
    with RolloutStore(tmp_path) as store:
        assert {row.rollout_id: row.suspicious for row in store.summaries(suspicious=True)} == {
            "a/0": ("tool-fails",),
            "b/0": ("tool-fails",),
        }
    await ag.evaluate(Digging, Scripted([say("gold")]), k=2, output_dir=tmp_path, resume=True)
    with RolloutStore(tmp_path) as store:
        assert {row.rollout_id: row.suspicious for row in store.summaries(suspicious=True)} == {
            "a/1": ("no-tool-call",),
            "b/1": ("no-tool-call",),
        }


async def test_failed_rollouts_are_run_again_only_on_request(tmp_path: Path) -> None:
    broken = Scripted([])
    with pytest.raises(AgentGymError, match=rf"all 4 rollouts failed.*; `.*show {tmp_path} --failed` shows them"):
        await ag.evaluate(Even, broken, output_dir=tmp_path)
    engine = Scripted(lambda text: say("ab"))
    with pytest.raises(AgentGymError, match=r"all 4 rollouts failed"):
        await ag.evaluate(Even, engine, output_dir=tmp_path, resume=True)
    evaluation = await ag.evaluate(Even, engine, output_dir=tmp_path, resume=True, retry_failed=True)
    assert (evaluation.reward, evaluation.failed) == (1.0, 0)
    again = await ag.evaluate(Even, broken, output_dir=tmp_path, resume=True)
    assert again.reward == 1.0
    assert (evaluation.resumed, again.resumed) == (0, 4)


async def test_a_folder_is_resumed_with_its_original_settings_and_tasks(tmp_path: Path) -> None:
    engine = Scripted(lambda text: say("ab"))
    await ag.evaluate(Even, engine, output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"resume it with resume=True \(--resume\), also with retry_failed=True "):
        await ag.evaluate(Even, engine, output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"^env: .* was started with '.*:Even'"):
        await ag.evaluate(Vowel, engine, output_dir=tmp_path, resume=True)
    with pytest.raises(ValueError, match=r"^seed: .* was started with 0, but this is 1"):
        await ag.evaluate(Even, engine, output_dir=tmp_path, resume=True, seed=1)
    with pytest.raises(ValueError, match=r"^sampling: "):
        await ag.evaluate(Even, engine, output_dir=tmp_path, resume=True, sampling=ag.Sampling(temperature=0.5))
    given = tmp_path / "given"
    await ag.evaluate(Even, engine, output_dir=given, tasks=[ag.Task(id="a", prompt="x")])
    with pytest.raises(ValueError, match=r"^tasks: task 'a' has changed since"):
        await ag.evaluate(Even, engine, output_dir=given, tasks=[ag.Task(id="a", prompt="y")], resume=True)


@pytest.mark.parametrize("resume", [False, True])
async def test_the_folder_of_a_training_run_is_refused_as_an_evaluations(resume: bool, tmp_path: Path) -> None:
    write_settings(tmp_path / "run 1", ag.RunConfig(recipe="even", env="even:Even", model="tiny"))
    refused = r"^output_dir: .* is the folder of a training run, not of an evaluation; .* with --resume '.*/run 1'\)"
    with pytest.raises(ValueError, match=refused):
        await ag.evaluate(Even, Scripted(lambda text: say("ab")), output_dir=tmp_path / "run 1", resume=resume)


async def test_a_changed_env_causes_a_warning_and_unreadable_settings_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, settings = Scripted(lambda text: say("ab")), tmp_path / "settings.json"
    await ag.evaluate(Even, engine, output_dir=tmp_path)
    await ag.evaluate(Even, engine, output_dir=tmp_path, resume=True)
    assert caplog.messages == []
    begun = json.loads(settings.read_text())
    begun["envs"]["Even"]["sha256"] = "0" * 64
    settings.write_text(json.dumps(begun))
    await ag.evaluate(Even, engine, output_dir=tmp_path, resume=True)
    [said] = caplog.messages
    assert said.startswith("resume: the env Even has changed since the start: it was (")
    assert "sha256 000000000000), and is now (" in said
    settings.write_text("{")
    with pytest.raises(ValueError, match=r"^output_dir: .*settings\.json cannot be read \("):
        await ag.evaluate(Even, engine, output_dir=tmp_path, resume=True)


async def test_options_that_need_a_folder_are_refused_without_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^retry_failed: only a resumed evaluation has failed rollouts"):
        await ag.evaluate(Even, Scripted([say("x")]), n=1, output_dir=tmp_path, retry_failed=True)
    with pytest.raises(ValueError, match=r"^resume, retry_failed: need the folder of the evaluation; set output_dir"):
        await ag.evaluate(Even, Scripted([]), resume=True)
    with pytest.raises(ValueError, match=r"^split: must be one of train, test"):
        await ag.evaluate(Even, Scripted([]), split="dev")  # type: ignore[arg-type]


async def test_the_training_tasks_are_run_if_that_split_is_requested() -> None:
    evaluation = await ag.evaluate(Even, Scripted(lambda text: say("ab")), split="train", n=2)
    assert list(evaluation.rewards) == ["0", "1"]


async def test_two_evaluations_are_compared_task_by_task(tmp_path: Path) -> None:
    def by_task(text: str) -> ag.Message:
        return say("abc" if "Say 0" in text else "ab")

    one = await ag.evaluate(Even, Scripted(lambda text: say("abc")), k=2, output_dir=tmp_path / "one")
    other = await ag.evaluate(Even, Scripted(by_task), k=2, output_dir=tmp_path / "other", n=3)
    folders = tmp_path / "one", tmp_path / "other"
    for given in ((one, other), folders):
        with pytest.raises(
            ValueError, match=r"different tasks: 1 are only in the first and 0 only in the second, such as '103'"
        ):
            ag.compare(*given)
    for found in (ag.compare(one, other, common=True), ag.compare(*folders, common=True)):
        assert found.differences == {"100": 0.0, "101": 1.0, "102": 1.0}
        assert found.left_out == 1
        assert found.means == pytest.approx((0.0, 2 / 3))
        assert found.p == pytest.approx(0.5)  # of the sign flips of two differences, half give a mean that large
        assert found.interval.low < 2 / 3 < found.interval.high + 1e-9
    assert ag.compare(one, one).p == 1.0


async def test_different_tasks_are_not_compared(tmp_path: Path) -> None:
    engine = Scripted(lambda text: say("ab"))
    for name, prompt in (("one", "x"), ("other", "y")):
        await ag.evaluate(Even, engine, output_dir=tmp_path / name, tasks=[ag.Task(id="a", prompt=prompt)])
    with pytest.raises(ValueError, match=r"^other: task 'a' differs from"):
        ag.compare(tmp_path / "one", tmp_path / "other")
    with pytest.raises(ValueError, match=r"^other: no task has a scored rollout in both"):
        ag.compare(tmp_path / "one", await ag.evaluate(Even, engine))
    for field, sides in (("one", (tmp_path, tmp_path / "one")), ("other", (tmp_path / "one", tmp_path))):
        with pytest.raises(AgentGymError, match=rf"^{field}: {tmp_path} contains no rollouts.sqlite"):
            ag.compare(*sides)


async def test_the_progress_bar_shows_finished_rollouts_and_their_mean_reward(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats the captured stderr as a terminal
    monkeypatch.setenv("COLUMNS", "120")
    await ag.evaluate(Even, Scripted(lambda text: say("ab")), progress=True)
    shown = capsys.readouterr().err
    assert "reward 1.000" in shown
    assert "4/4" in shown


async def test_without_a_terminal_a_few_lines_report_rate_and_remaining_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await ag.evaluate(Even, Scripted(lambda text: say("ab")), k=12, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert 1 < len(lines) <= 10
    assert re.fullmatch(r"finished 48 of 48  reward 1\.000  \d+ s, [\d.]+ rollouts/s, about 0 s left", lines[-1])


async def test_at_most_concurrency_evaluation_rollouts_run_at_once() -> None:
    running = most = 0

    class Counting(Even):
        async def reset(self, **given: Any) -> tuple[list[ag.Message], dict[str, Any]]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            return await super().reset(**given)

        async def close(self) -> None:
            nonlocal running
            running -= 1

    evaluation: Evaluation = await ag.evaluate(Counting, Scripted(lambda text: say("ab")), k=5, concurrency=3)
    assert evaluation.reward == 1.0
    assert most == 3
