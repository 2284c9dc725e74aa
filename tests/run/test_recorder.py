"""What a run stores about its rollouts, on the real engine and the real trainer."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import agentgym as ag
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.errors import AgentGymError
from agentgym.launch.train import train_policy
from agentgym.store.reader import RolloutStore, StoredRollout
from agentgym.store.schema import FILE
from agentgym.train.learner import Learner
from tests.run.test_resume import SETTINGS, Terse, folder, resumed, stop
from tests.torchrun import torchrun

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> ag.RunConfig:
    """Return a run with six rollouts and one mini-batch per step, and two held-out tasks."""
    return replace(
        SETTINGS, output_dir=tmp_path / "run", max_steps=2, train=replace(SETTINGS.train, rollouts_per_minibatch=6)
    )


def stored(path: Path) -> list[StoredRollout]:
    with RolloutStore(path) as store:
        return list(store.find())


def places(path: Path) -> list[tuple[str, int]]:
    return [(found.phase, found.step) for found in stored(path)]


async def test_a_run_stores_every_rollout_with_its_task_and_the_evaluations(run: ag.RunConfig) -> None:
    summary = await train_policy(run)
    rollout = [("eval_before", 0)] * 2 + [("train", 0)] * 6 + [("train", 1)] * 6 + [("eval_after", 2)] * 2
    assert places(folder(run)) == rollout
    assert (summary["rollouts_not_stored"], summary["store"]) == (0, str(folder(run) / FILE))
    with RolloutStore(folder(run)) as store:
        task = store.task(stored(folder(run))[2].rollout.group_id)
    assert task is not None
    assert task["prompt"][0]["content"].startswith("Start at key")


async def test_a_runs_store_has_its_tokens_bytes_and_the_time_of_each_turn(run: ag.RunConfig) -> None:
    await train_policy(run)
    tokenizer = chat_tokenizer("tiny")
    with RolloutStore(folder(run)) as store:
        for found in store.find():
            for segment in found.rollout.segments:
                ids = segment.token_ids.tolist()
                known = store.token_bytes("", ids)
                assert b"".join(known[token] for token in ids).decode() == tokenizer.decode(ids)
                assert all(turn.asked_at is not None for turn in segment.turns)


async def test_trainer_logprobs_and_advantages_are_stored_with_the_rollouts(run: ag.RunConfig) -> None:
    await train_policy(run)
    found = [of for of in stored(folder(run)) if of.phase == "train"]
    trained = [of for of in found if of.advantages[0] is not None]
    assert trained
    for of in trained:
        (logprobs,), (advantages,) = of.trainer_logprobs, of.advantages
        assert logprobs is not None
        assert advantages is not None
        segment = of.rollout.segments[0]
        assert np.abs(logprobs - segment.logprobs[segment.sampled]).max() < 1e-4
        assert len(advantages) == len(segment.turns)
        assert of.logprob_gap is not None
        assert of.logprob_gap < 1e-4
    by_group = {of.rollout.group_id: [] for of in trained}  # type: dict[str, list[float]]
    for of in trained:
        assert of.advantages[0]
        by_group[of.rollout.group_id].append(of.advantages[0][0])
    assert all(sum(values) == pytest.approx(0, abs=1e-4) for values in by_group.values())


async def test_samples_of_single_turns_are_joined_again(run: ag.RunConfig, tmp_path: Path) -> None:
    await train_policy(replace(run, max_steps=1))
    await train_policy(replace(run, max_steps=1, merge=False, output_dir=tmp_path / "turns"))
    pairs = list(zip(stored(folder(run)), stored(tmp_path / "turns"), strict=True))
    assert any(len(one.rollout.segments[0].turns) > 1 and one.advantages[0] for one, _ in pairs)
    for one, other in pairs:
        assert one.advantages == other.advantages
        for merged, by_turn in zip(one.trainer_logprobs, other.trainer_logprobs, strict=True):
            assert (merged is None) == (by_turn is None)
            assert merged is None or np.allclose(merged, by_turn, atol=1e-4)  # type: ignore[arg-type]


async def test_a_later_mini_batch_has_no_logprob_gap_to_the_engine(run: ag.RunConfig) -> None:
    await train_policy(replace(run, max_steps=1, train=replace(run.train, rollouts_per_minibatch=2)))
    trained = [of for of in stored(folder(run)) if of.trainer_logprobs[0] is not None]
    assert {of.logprob_gap is None for of in trained} == {True, False}


async def test_a_resumed_run_stores_each_rollout_once(run: ag.RunConfig) -> None:
    await stop(replace(run, save_every=1), 2 + 6 + 3)  # the evaluation, a step, and half of the next
    assert places(folder(run)) == [("eval_before", 0)] * 2 + [("train", 0)] * 6
    await train_policy(resumed(run))
    rollout = [("eval_before", 0)] * 2 + [("train", 0)] * 6 + [("train", 1)] * 6 + [("eval_after", 2)] * 2
    assert places(folder(run)) == rollout


async def test_a_run_that_was_stopped_in_its_first_step_stores_its_evaluation_once(run: ag.RunConfig) -> None:
    await stop(run, 2 + 3)
    await train_policy(resumed(replace(run, max_steps=1)))
    assert places(folder(run)) == [("eval_before", 0)] * 2 + [("train", 0)] * 6 + [("eval_after", 1)] * 2


async def test_a_failed_step_leaves_its_collected_rollouts(run: ag.RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Learner, samples: object) -> dict[str, float]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Learner, "train", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        await train_policy(replace(run, eval_tasks=0))
    assert places(folder(run)) == [("train", 0)] * 6


class Judged(Terse):
    """Its judge fails for every second rollout."""

    judged = itertools.count()

    @ag.reward
    def judge(self) -> float:
        if next(self.judged) % 2:
            raise ValueError("judge is down")
        return 0.0


async def test_failed_rollouts_are_stored_with_their_failure(
    run: ag.RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "record_envs", sys.modules[__name__])
    await train_policy(replace(run, env="record_envs:Judged", eval_tasks=0, max_steps=1))
    with RolloutStore(folder(run)) as store:
        failed = list(store.find(failed=True))
    assert failed
    assert all(of.rollout.failure is not None and "judge is down" in of.rollout.failure.message for of in failed)
    assert all(of.trainer_logprobs == (None,) for of in failed)


class Down(Terse):
    """Its judge always fails."""

    @ag.reward
    def judge(self) -> float:
        raise ValueError("judge is down")


@pytest.mark.parametrize(("held_out", "kept"), [(0, [("train", 0)] * 6), (2, [("eval_before", 0)] * 2)])
async def test_if_all_rollouts_fail_the_run_ends_and_they_can_be_inspected(
    run: ag.RunConfig, monkeypatch: pytest.MonkeyPatch, held_out: int, kept: list[tuple[str, int]]
) -> None:
    monkeypatch.setitem(sys.modules, "record_envs", sys.modules[__name__])
    with pytest.raises(
        AgentGymError, match=r"all \d rollouts failed.*judge is down.*; `.* show \S+ --failed` shows them$"
    ):
        await train_policy(replace(run, env="record_envs:Down", eval_tasks=held_out))
    assert places(folder(run)) == kept


SCRIPT = """
import asyncio, sys
from dataclasses import replace
import agentgym as ag
from tests.run.test_resume import SETTINGS
from pathlib import Path

train = replace(SETTINGS.train, rollouts_per_minibatch=6)
run = replace(SETTINGS, output_dir=Path(sys.argv[1]), max_steps=2, train=train)
asyncio.run(ag.train_policy(run))
"""


@pytest.mark.slow
def test_two_processes_write_one_store_with_both_processes_logprobs(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *torchrun(tmp_path / "logs"), str(script), str(tmp_path / "run")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = stored(tmp_path / "run")
    rollout = [("eval_before", 0)] * 2 + [("train", 0)] * 6 + [("train", 1)] * 6 + [("eval_after", 2)] * 2
    assert [(of.phase, of.step) for of in found] == rollout
    trained = [of for of in found if of.advantages[0] is not None]
    assert trained
    assert all(of.logprob_gap is not None and of.logprob_gap < 1e-4 for of in trained)
