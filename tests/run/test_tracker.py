"""Evaluations during a run, the best adapter, and callbacks and trackers, which may raise."""

import asyncio
import importlib.util
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import agentgym as ag
from agentgym.evals.evaluation import Evaluation
from agentgym.run import callbacks, loop
from agentgym.run.trackers import Tracker, open_tracker
from agentgym.scheduling import Groups
from tests.run.test_resume import SETTINGS, adapter


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def weights(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "adapter_model.safetensors"))


async def test_a_run_is_evaluated_every_k_steps_and_keeps_the_best_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter([0.1, 0.2, 0.9, 0.9, 0.4])
    metrics = Evaluation.metrics
    monkeypatch.setattr(Evaluation, "metrics", lambda self: metrics(self) | {"eval/reward": next(scores)})
    run = replace(
        SETTINGS, output_dir=tmp_path, max_steps=4, eval_every=1, eval_rollouts=3, save_every=1, keep_checkpoints=9
    )
    adapters: list[dict[str, Any]] = []

    class After(ag.Callback):
        def on_step(self, *_: object) -> None:
            adapters.append(weights(tmp_path / "best") if (tmp_path / "best").exists() else {})

    summary = await ag.train_policy(run, callbacks=[After()])
    evaluated = [row for row in rows(tmp_path) if "eval/reward" in row]
    held_out = [(row["step"], row["eval/reward"], row["eval/rollouts"]) for row in evaluated]
    assert held_out == [(0, 0.1, 6), (1, 0.2, 6), (2, 0.9, 6), (3, 0.9, 6), (4, 0.4, 6)]
    assert (summary["best_step"], summary["best_reward"], summary["eval_after"]) == (2, 0.9, 0.4)
    kept, last = weights(tmp_path / "best"), adapter(tmp_path)
    assert [bool(found) for found in adapters] == [False, True, True, True]
    assert all(np.array_equal(kept[name], adapters[3][name]) for name in kept)
    assert any(not np.array_equal(kept[name], last[name]) for name in kept)
    assert {"eval/pass@1", "eval/pass@3"} <= rows(tmp_path)[0].keys()


async def test_a_resumed_run_keeps_its_best_evaluation_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Evaluation.metrics
    scores = iter([0.1, 0.8, 0.3])
    monkeypatch.setattr(Evaluation, "metrics", lambda self: metrics(self) | {"eval/reward": next(scores)})
    run = replace(SETTINGS, output_dir=tmp_path, max_steps=2, eval_every=1, save_every=1)
    await ag.train_policy(run)
    again = iter([0.3, 0.2])
    monkeypatch.setattr(Evaluation, "metrics", lambda self: metrics(self) | {"eval/reward": next(again)})
    summary = await ag.train_policy(replace(run, output_dir=None, resume=tmp_path, max_steps=3))
    assert (summary["best_step"], summary["best_reward"]) == (1, 0.8)
    held_out = [(row["step"], row["eval/reward"]) for row in rows(tmp_path) if "eval/reward" in row]
    assert held_out == [(0, 0.1), (1, 0.8), (2, 0.3), (3, 0.2)]


async def test_a_finished_runs_best_policy_stays_if_the_resumed_run_gets_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Evaluation.metrics
    scores = iter([0.1, 0.9, 0.6])
    monkeypatch.setattr(Evaluation, "metrics", lambda self: metrics(self) | {"eval/reward": next(scores)})
    run = replace(SETTINGS, output_dir=tmp_path, max_steps=1, eval_every=2)
    await ag.train_policy(run)  # the best evaluation was after the last checkpoint
    best = weights(tmp_path / "best")
    summary = await ag.train_policy(replace(run, output_dir=None, resume=tmp_path, max_steps=2))
    assert (summary["best_step"], summary["best_reward"], summary["eval_after"]) == (1, 0.9, 0.6)
    assert json.loads((tmp_path / "best" / "evaluation.json").read_text()) == {"step": 1, "reward": 0.9}
    kept = weights(tmp_path / "best")
    assert all(np.array_equal(kept[name], best[name]) for name in best)


def test_a_cluster_without_ray_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cluster: these settings apply only to a run on Ray; set ray"):
        ag.RunConfig(recipe="r", env="nim", model="m", cluster=ag.ClusterConfig(trainers=2))


def test_evaluations_without_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^eval_every: there are no held-out tasks; set eval_tasks"):
        replace(SETTINGS, eval_every=2, eval_tasks=0)


class Hears(ag.Callback):
    """Records its calls, and the threads in which it is called."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def on_run_start(self, *told: Any) -> None:
        self.heard.append(("start", *told))
        self.threads.add(threading.get_ident())

    def on_rollout(self, rollout: ag.Rollout) -> None:
        self.heard.append(("rollout", rollout))

    def on_step(self, *told: Any) -> None:
        self.heard.append(("step", *told))
        self.threads.add(threading.get_ident())

    def on_evaluation(self, *told: Any) -> None:
        self.heard.append(("evaluation", *told))

    def on_run_end(self, *told: Any) -> None:
        self.heard.append(("end", *told))


class Aside(Hears):
    in_thread = True


async def test_a_callback_gets_the_start_each_rollout_step_and_evaluation_and_the_end(tmp_path: Path) -> None:
    run, here, aside = replace(SETTINGS, output_dir=tmp_path, max_steps=1), Hears(), Aside()
    summary = await ag.train_policy(run, callbacks=[here, aside])
    assert [each[0] for each in here.heard] == ["start", "evaluation", *["rollout"] * 6, "step", "evaluation", "end"]
    assert [each[0] for each in aside.heard] == [each[0] for each in here.heard]
    (_, settings, folder), before, *rollouts, (_, step, groups, metrics), after, (_, end) = here.heard
    assert (settings.env, folder) == (run.env, tmp_path)
    assert {rollout for _, rollout in rollouts} == set(groups.rollouts)
    assert [{"step": step, **metrics}] == [row for row in rows(tmp_path) if "reward" in row]
    assert [(done, played.reward) for _, done, played, _ in (before, after)] == [
        (0, summary["eval_before"]),
        (1, summary["eval_after"]),
    ]
    assert after[3]["eval/reward"] == summary["eval_after"] == end["eval_after"]
    assert here.threads == {threading.get_ident()}
    assert threading.get_ident() not in aside.threads


async def test_for_a_failed_run_a_callback_gets_an_end_without_a_summary(tmp_path: Path) -> None:
    class Stops(Hears):
        def on_step(self, *told: Any) -> None:
            run.cancel()

    stops = Stops()
    run = asyncio.ensure_future(
        ag.train_policy(replace(SETTINGS, output_dir=tmp_path, max_steps=2, eval_tasks=0), callbacks=[stops])
    )
    with pytest.raises(asyncio.CancelledError):
        await run
    assert [told for told in stops.heard if told[0] == "end"] == [("end", {})]


async def test_errors_of_callbacks_and_trackers_are_counted_and_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Tracker):
        def __init__(self) -> None:
            pass

        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError("disk full")

        def on_run_end(self, summary: Mapping[str, Any]) -> None:
            raise OSError("disk full")

    class Note(ag.Callback):
        def on_rollout(self, rollout: ag.Rollout) -> None:
            seen.append(rollout.rollout_id)
            raise ValueError("no room")

        def on_run_start(self, *_: Any) -> None:
            raise asyncio.CancelledError

        def on_step(self, *_: Any) -> None:
            raise KeyError("mine")

    monkeypatch.setattr(loop, "open_tracker", lambda *_: Broken())
    run = replace(SETTINGS, output_dir=tmp_path, max_steps=2, eval_tasks=0, report_to=("wandb",))
    seen: list[str] = []
    summary = await ag.train_policy(run, callbacks=[Note()])
    assert len(seen) == 12
    assert summary["steps"] == 2
    assert summary["callback_errors"] == {
        "Note.on_run_start": 1,
        "Note.on_rollout": 12,
        "Note.on_step": 2,
        "Broken.on_step": 2,
        "Broken.on_run_end": 1,
    }
    said = capsys.readouterr().err
    assert said.count("Broken.on_step raised OSError: disk full") == 1
    assert said.count("Note.on_rollout raised ValueError: no room") == 1


async def test_a_callbacks_changes_to_metrics_and_summary_do_not_leak(tmp_path: Path) -> None:
    class Changes(ag.Callback):
        def on_step(self, step: int, groups: Groups, metrics: Any) -> None:
            metrics["reward"] = -9.0

        def on_evaluation(self, step: int, evaluation: Evaluation, metrics: Any) -> None:
            metrics.clear()

        def on_run_end(self, summary: Any) -> None:
            summary["callback_errors"]["Mine"] = 1

    run, hears = replace(SETTINGS, output_dir=tmp_path, max_steps=1), Hears()
    summary = await ag.train_policy(run, callbacks=[Changes(), hears])
    assert summary["callback_errors"] == hears.heard[-1][1]["callback_errors"] == {}
    (step,) = (row for row in rows(tmp_path) if "reward" in row)
    assert step["reward"] == next(told[3]["reward"] for told in hears.heard if told[0] == "step") != -9.0
    assert [row["eval/reward"] for row in rows(tmp_path) if "eval/reward" in row] == [
        summary["eval_before"],
        summary["eval_after"],
    ]


async def test_a_cancelled_run_reports_its_end_once_after_the_call_in_the_thread_returned(
    tmp_path: Path,
) -> None:
    class Slow(ag.Callback):
        in_thread = True

        def __init__(self) -> None:
            self.heard: list[str] = []
            self.inside, self.let = threading.Event(), threading.Event()

        def on_step(self, *_: Any) -> None:
            self.heard.append("step")
            self.inside.set()
            self.let.wait()
            self.heard.append("step returns")

        def on_run_end(self, *_: Any) -> None:
            self.heard.append("end")

    slow = Slow()
    run = asyncio.ensure_future(
        ag.train_policy(replace(SETTINGS, output_dir=tmp_path, max_steps=2, eval_tasks=0), callbacks=[slow])
    )
    await asyncio.to_thread(slow.inside.wait)
    run.cancel()
    asyncio.get_running_loop().call_later(0.05, slow.let.set)
    with pytest.raises(asyncio.CancelledError):
        await run
    assert slow.heard == ["step", "step returns", "end"]


async def test_a_callback_that_never_returns_does_not_block_a_stopped_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(callbacks, "GRACE_S", 0.1)
    inside, let = threading.Event(), threading.Event()

    class Blocks(ag.Callback):
        in_thread = True

        def on_step(self, *_: Any) -> None:
            inside.set()
            let.wait()

    class Hearing(ag.Callback):
        in_thread = True

        def on_run_end(self, summary: Mapping[str, Any]) -> None:
            heard.append(summary)
            ended.set()

    run, ended = replace(SETTINGS, output_dir=tmp_path, max_steps=2, eval_tasks=0), threading.Event()
    heard = list[Mapping[str, Any]]()
    training = asyncio.ensure_future(ag.train_policy(run, callbacks=[Blocks(), Hearing()]))
    await asyncio.to_thread(inside.wait)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    await asyncio.to_thread(ended.wait)  # the thread may be late
    assert heard == [{}]
    let.set()
    assert re.search(
        r"WARNING: .*Blocks\.on_step has not returned in 0\.1 seconds; ending the run", capsys.readouterr().err
    )
    assert (tmp_path / "checkpoints/step-000001").is_dir()


async def test_each_callback_gets_the_end_once_if_the_run_is_stopped_during_it(tmp_path: Path) -> None:
    class Slow(ag.Callback):
        in_thread = True

        def on_run_end(self, *_: Any) -> None:
            inside.set()
            let.wait()
            heard.append("slow")

    class Quick(ag.Callback):
        def on_run_end(self, *_: Any) -> None:
            heard.append("quick")

    inside, let, heard = threading.Event(), threading.Event(), list[str]()
    run = asyncio.ensure_future(
        ag.train_policy(replace(SETTINGS, output_dir=tmp_path, max_steps=0, eval_tasks=0), callbacks=[Slow(), Quick()])
    )
    await asyncio.to_thread(inside.wait)
    run.cancel()
    asyncio.get_running_loop().call_later(0.05, let.set)
    with pytest.raises(asyncio.CancelledError):
        await run
    assert sorted(heard) == ["quick", "slow"]


async def test_a_callbacks_changes_to_the_config_do_not_leak(tmp_path: Path) -> None:
    class Changes(ag.Callback):
        def on_run_start(self, run: ag.RunConfig, folder: Path) -> None:
            run.env_args["changed"] = 1

    run, hears = replace(SETTINGS, output_dir=tmp_path, max_steps=0, eval_tasks=0), Hears()
    await ag.train_policy(run, callbacks=[Changes(), hears])
    assert hears.heard[0][1].env_args == run.env_args == {}


async def test_values_that_are_not_callbacks_and_async_methods_are_refused_by_name() -> None:
    class Late(ag.Callback):
        async def on_step(self, *_: Any) -> None:  # type: ignore[override]
            pytest.fail("it is never awaited")

    with pytest.raises(ValueError, match=r"^callbacks: Late.on_step is async, but callbacks aren't awaited; make it a"):
        await ag.train_policy(SETTINGS, callbacks=[Late()])
    with pytest.raises(ValueError, match=r"^callbacks: Late is a class; pass an instance, Late\(\)$"):
        await ag.train_policy(SETTINGS, callbacks=[Late])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^callbacks: expected a list of ag.Callback, got "):
        await ag.train_policy(SETTINGS, callbacks=ag.Callback())  # type: ignore[arg-type]


async def test_a_method_without_an_event_or_with_a_yield_is_refused_by_name() -> None:
    class Misspelt(ag.Callback):
        def on_steps(self, *_: Any) -> None:
            pytest.fail("it is not an event")

    class Yields(ag.Callback):
        def on_step(self, *_: Any) -> Any:
            yield pytest.fail("it is never iterated")

    with pytest.raises(ValueError, match=r"^callbacks: Misspelt.on_steps isn't a run event; did you mean 'on_step'"):
        await ag.train_policy(SETTINGS, callbacks=[Misspelt()])
    with pytest.raises(ValueError, match=r"^callbacks: Yields.on_step is a generator, so calling it does nothing"):
        await ag.train_policy(SETTINGS, callbacks=[Yields()])


async def test_a_runs_folder_has_its_environment_and_the_metrics_of_every_step(tmp_path: Path) -> None:
    summary = await ag.train_policy(replace(SETTINGS, output_dir=tmp_path, max_steps=1))
    names = names_in(tmp_path)
    assert {"environment.json", "settings.json", "summary.json"} <= names
    assert ("reward.png" in names) == (importlib.util.find_spec("matplotlib") is not None)
    step = next(row for row in rows(tmp_path) if "reward" in row)
    wanted = {"time/collect", "time/train", "time/sync", "time/eval", "time/step", "throughput/sampled_tokens_per_s"}
    wanted |= {"throughput/trained_tokens_per_s", "mismatch/mean", "mismatch/p99", "mismatch/ess", "reward/std"}
    assert wanted | {"length/turn_p50", "groups/solved_by_none"} <= step.keys()
    assert step["mismatch/p99"] < 1e-3
    assert step["mismatch/ess"] == pytest.approx(1, abs=1e-3)
    assert summary["callback_errors"] == {}


def test_a_missing_tracker_package_is_refused_with_its_install_command(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^report_to: nowhere is not installed; install it with `pip install nowhere`"
    ):
        open_tracker("nowhere", tmp_path, "recipe", {})  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_stores_the_metrics_of_a_run_without_network(
    name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip(name, reason=f"{name} is not installed")
    tracker = open_tracker(name, tmp_path, "my_recipe", {"steps": 2, "train.lr": 1e-3})
    nothing = Groups([])
    tracker.on_step(0, nothing, {"reward": 0.25, "train/loss": 1.0})
    tracker.on_step(1, nothing, {"reward": 0.5})
    tracker.on_evaluation(1, ag.Evaluation(groups=nothing, k=1), {"eval/reward": 0.75})
    tracker.on_run_end({"reward_last": 0.5})
    wanted = {("reward", 0, 0.25), ("train/loss", 0, 1.0), ("reward", 1, 0.5), ("eval/reward", 1, 0.75)}
    assert KEPT[name](tmp_path) >= wanted


def in_tensorboard(folder: Path) -> set[tuple[str, int, float]]:
    """Return the name, step and value of each metric."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    named = [(tag, event) for tag in events.Tags()["tensors"] for event in events.Tensors(tag)]
    return {(tag, event.step, event.tensor_proto.float_val[0]) for tag, event in named}


def in_trackio(folder: Path) -> set[tuple[str, int, float]]:
    """Return the same for trackio."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("my_recipe")
    logs = SQLiteStorage.get_logs("my_recipe", run)
    return {(name, log["step"], value) for log in logs for name, value in log.items() if isinstance(value, float)}


def in_wandb(folder: Path) -> set[tuple[str, int, float]]:
    """Return the same, extracted from the records of wandb's file, where names and values are plain text."""
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
