"""Evaluations on the way, the best adapter, and where figures go: hooks, sinks and trackers that may break."""

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import agentgym as ag
from agentgym.evals.evaluation import Evaluation
from agentgym.run import loop
from agentgym.run.trackers.tracker import open_tracker
from tests.run.test_resume import SETTINGS, adapter


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def weights(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "adapter_model.safetensors"))


async def test_every_k_steps_and_at_the_end_a_run_is_evaluated_and_the_best_adapter_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.2, 0.9, 0.9, 0.4])
    figures = Evaluation.figures
    monkeypatch.setattr(Evaluation, "figures", lambda self: figures(self) | {"eval/reward": next(scores)})
    run = replace(SETTINGS, out=tmp_path, steps=4, eval_every=1, eval_rollouts=3, save_every=1, keep=9)
    adapters: list[dict[str, Any]] = []

    def after(step: int, groups: ag.Groups, figures: Mapping[str, float]) -> None:
        adapters.append(weights(tmp_path / "best") if (tmp_path / "best").exists() else {})

    summary = await ag.train_policy(run, on_step=after)
    evaluated = [row for row in rows(tmp_path) if "eval/reward" in row]
    held_out = [(row["step"], row["eval/reward"], row["eval/rollouts"]) for row in evaluated]
    assert held_out == [(0, 0.1, 6), (1, 0.2, 6), (2, 0.9, 6), (3, 0.9, 6), (4, 0.4, 6)]
    assert (summary["best_step"], summary["best_reward"], summary["eval_after"]) == (2, 0.9, 0.4)
    kept, last = weights(tmp_path / "best"), adapter(tmp_path)
    assert [bool(found) for found in adapters] == [False, True, True, True]
    assert all(np.array_equal(kept[name], adapters[3][name]) for name in kept)
    assert any(not np.array_equal(kept[name], last[name]) for name in kept)
    assert {"eval/pass@1", "eval/pass@3"} <= rows(tmp_path)[0].keys()


async def test_a_resumed_run_knows_its_best_evaluation_and_has_each_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = Evaluation.figures
    scores = iter([0.1, 0.8, 0.3])
    monkeypatch.setattr(Evaluation, "figures", lambda self: figures(self) | {"eval/reward": next(scores)})
    run = replace(SETTINGS, out=tmp_path, steps=2, eval_every=1, save_every=1)
    await ag.train_policy(run)
    again = iter([0.3, 0.2])
    monkeypatch.setattr(Evaluation, "figures", lambda self: figures(self) | {"eval/reward": next(again)})
    summary = await ag.train_policy(replace(run, out=None, resume=tmp_path, steps=3))
    assert (summary["best_step"], summary["best_reward"]) == (1, 0.8)
    held_out = [(row["step"], row["eval/reward"]) for row in rows(tmp_path) if "eval/reward" in row]
    assert held_out == [(0, 0.1), (1, 0.8), (2, 0.3), (3, 0.2)]


async def test_the_best_policy_of_a_finished_run_stays_when_that_is_resumed_and_gets_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = Evaluation.figures
    scores = iter([0.1, 0.9, 0.6])
    monkeypatch.setattr(Evaluation, "figures", lambda self: figures(self) | {"eval/reward": next(scores)})
    run = replace(SETTINGS, out=tmp_path, steps=1, eval_every=2)
    await ag.train_policy(run)  # its best evaluation came behind its last checkpoint
    best = weights(tmp_path / "best")
    summary = await ag.train_policy(replace(run, out=None, resume=tmp_path, steps=2))
    assert (summary["best_step"], summary["best_reward"], summary["eval_after"]) == (1, 0.9, 0.6)
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text()) == {"step": 1, "reward": 0.9}
    kept = weights(tmp_path / "best")
    assert all(np.array_equal(kept[name], best[name]) for name in best)


def test_a_cluster_without_ray_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cluster: only a run on Ray has a cluster; set ray"):
        ag.RunConfig(recipe="r", env="nim", model="m", cluster=ag.ClusterConfig(trainers=2))


def test_evaluations_without_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^eval_every: there are no held-out tasks; set eval_tasks"):
        replace(SETTINGS, eval_every=2, eval_tasks=0)


async def test_a_hook_a_sink_and_a_tracker_that_raise_are_counted_and_said_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def log(self, step: int, figures: Mapping[str, float]) -> None:
            raise OSError("disk full")

        def close(self, summary: Mapping[str, Any]) -> None:
            raise OSError("disk full")

    def refuse(*_: Any) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(loop, "open_tracker", lambda *_: Broken())
    run = replace(SETTINGS, out=tmp_path, steps=2, eval_tasks=0, track=("wandb",))
    seen: list[str] = []

    def note(played: ag.Rollout) -> None:
        seen.append(played.rollout_id)
        raise ValueError("no room")

    summary = await ag.train_policy(run, sinks=[refuse], on_step=refuse, on_rollout=note)
    assert len(seen) == 12
    assert summary["steps"] == 2
    assert summary["outlet_errors"] == {"on_rollout": 12, "sink 0": 2, "on_step": 2, "tracker wandb": 3}
    said = capsys.readouterr().err
    assert said.count("tracker wandb raised OSError: disk full") == 1
    assert said.count("on_rollout raised ValueError: no room") == 1


async def test_hooks_that_would_have_to_be_awaited_are_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def never(*_: Any) -> None:
        pytest.fail("nobody awaits it")

    run = replace(SETTINGS, out=tmp_path, steps=1, eval_tasks=0)
    summary = await ag.train_policy(run, sinks=[never], on_step=never, on_rollout=never)
    assert summary["outlet_errors"] == {"on_rollout": 6, "sink 0": 1, "on_step": 1}
    assert "on_step raised TypeError: it is async, and is called and not awaited" in capsys.readouterr().err


async def test_a_runs_folder_holds_what_it_ran_on_and_every_step_its_figures(tmp_path: Path) -> None:
    summary = await ag.train_policy(replace(SETTINGS, out=tmp_path, steps=1))
    names = names_in(tmp_path)
    assert {"environment.json", "settings.json", "summary.json"} <= names
    assert ("reward.png" in names) == (importlib.util.find_spec("matplotlib") is not None)
    step = next(row for row in rows(tmp_path) if "reward" in row)
    wanted = {"time/collect", "time/train", "time/sync", "time/eval", "time/step", "throughput/sampled_tokens_per_s"}
    wanted |= {"throughput/trained_tokens_per_s", "mismatch/mean", "mismatch/p99", "mismatch/ess", "reward/std"}
    assert wanted | {"length/turn_p50", "groups/solved_by_none"} <= step.keys()
    assert step["mismatch/p99"] < 1e-3
    assert step["mismatch/ess"] == pytest.approx(1, abs=1e-3)
    assert summary["outlet_errors"] == {}


def test_a_tracker_that_is_not_installed_is_refused_with_the_line_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^track: nowhere is not installed; `pip install nowhere`"):
        open_tracker("nowhere", tmp_path, "recipe", {})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_keeps_the_figures_of_a_run_without_a_network(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which its import reads
    pytest.importorskip(name, reason=f"{name} is not installed")
    tracker = open_tracker(name, tmp_path, "my_recipe", {"steps": 2, "train.lr": 1e-3})
    tracker.log(0, {"reward": 0.25, "train/loss": 1.0})
    tracker.log(1, {"reward": 0.5})
    tracker.log(1, {"eval/reward": 0.75})
    tracker.close({"reward_last": 0.5})
    wanted = {("reward", 0, 0.25), ("train/loss", 0, 1.0), ("reward", 1, 0.5), ("eval/reward", 1, 0.75)}
    assert KEPT[name](tmp_path) >= wanted


def in_tensorboard(folder: Path) -> set[tuple[str, int, float]]:
    """The name of each figure, its step and its value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    named = [(tag, event) for tag in events.Tags()["tensors"] for event in events.Tensors(tag)]
    return {(tag, event.step, event.tensor_proto.float_val[0]) for tag, event in named}


def in_trackio(folder: Path) -> set[tuple[str, int, float]]:
    """The same."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("my_recipe")
    logs = SQLiteStorage.get_logs("my_recipe", run)
    return {(name, log["step"], value) for log in logs for name, value in log.items() if isinstance(value, float)}


def in_wandb(folder: Path) -> set[tuple[str, int, float]]:
    """The same, read out of the records of its file, where names and values are plain text."""
    (file,) = folder.rglob("run-*.wandb")
    found, items = set[tuple[str, int, float]](), list[tuple[str, float]]()
    for name, value in re.findall(rb"(reward|train/loss|eval/reward|_step|step)[^\w.]{1,4}([\d.]+)", file.read_bytes()):
        if name == b"step":
            found |= {(of, int(float(value)), number) for of, number in items}
            items = []
        elif name != b"_step":
            items.append((name.decode(), float(value)))
    return found


KEPT = {"tensorboard": in_tensorboard, "trackio": in_trackio, "wandb": in_wandb}
