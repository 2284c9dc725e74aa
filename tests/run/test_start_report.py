"""What a run prints before its first step, and at its end: on the real engine and the real trainer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.launch.train import train_policy
from agentgym.run import start_report as reports
from agentgym.run.start_report import Speed, measure_speed, start_report
from agentgym.train import memory
from agentgym.train.trainer import Trainer
from tests.run.test_resume import SETTINGS, Terse

CONFIG = replace(SETTINGS, model="tiny", max_steps=1, eval_tasks=0)


async def report_of(run: ag.RunConfig, speed: Speed | None = None) -> Any:
    async with Trainer(run.model, run.train) as trainer, ag.TransformersEngine(run.model, run.engine) as engine:  # type: ignore[arg-type]
        return start_report(run, trainer, engine, [Terse], speed or Speed())


async def test_a_run_says_what_it_will_do_before_its_first_step() -> None:
    lines = (await report_of(CONFIG)).lines
    assert lines[0].startswith(
        "model     tiny, 381,792 weights; adapter of rank 16 with 87,552 trained (22.9%), on 100%"
    )
    assert lines[1] == (
        "training  float32 on cpu, learning rate 0.002 after 3 steps of warm-up, temperature 0.7, padded micro-batches "
        "of at most 16,384 tokens"
    )
    assert lines[2] == "engine    TransformersEngine, contexts of at most 1,024 tokens, float32"
    assert lines[3].startswith("chat      format of calls: hermes")
    assert lines[3].endswith("a turn ends at <|im_end|>")
    assert lines[4] == "a step    6 rollouts of 2 tasks, at most 12 tokens a turn"
    assert lines[5].startswith("memory    about ")


async def test_all_weights_are_named_as_trained_with_method_full() -> None:
    run = replace(CONFIG, train=replace(CONFIG.train, method="full"))
    assert (await report_of(run)).lines[0] == "model     tiny, 381,792 weights; 381,792 trained (100.0%)"


async def test_measured_speeds_give_the_seconds_of_a_step() -> None:
    told = "; each 100 tokens in every rollout take about "
    for speed, said in {
        Speed(sampled=60.0, trained=30.0): f"{told}10 s to sample (60 tokens/s) and 20 s to train (30 tokens/s)",
        Speed(trained=30.0): f"{told}20 s to train (30 tokens/s)",
        Speed(): "at most 12 tokens a turn",
    }.items():
        assert (await report_of(CONFIG, speed)).lines[4].endswith(said)


async def test_a_run_that_may_not_fit_is_warned_of_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await report_of(CONFIG)).warnings == []
    monkeypatch.setattr(memory, "usable_memory", lambda: 1 << 20)
    [said] = (await report_of(CONFIG)).warnings
    assert "but there are 0.0; set train.max_tokens_per_microbatch 128, train.gradient_checkpointing, a smaller" in said


async def test_only_a_large_models_speed_is_measured_and_its_samples_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def drawn(engine: ag.TransformersEngine) -> list[int]:
        sampling = ag.Sampling(temperature=1.0)
        done = await engine.generate([5, 6, 7], session="s", max_tokens=8, sampling=sampling, seed=3)
        return list(map(int, done.token_ids))

    async with Trainer("tiny", CONFIG.train) as trainer, ag.TransformersEngine("tiny") as engine:
        assert await measure_speed(trainer, engine) == Speed()
        before = await drawn(engine)
        await engine.release("s")
        monkeypatch.setattr(memory, "LARGE", 1000)
        monkeypatch.setattr(reports, "PROBE_S", 300.0)  # so that a busy machine samples all of the tokens
        speed = await measure_speed(trainer, engine)
        assert (speed.sampled or 0) > 0
        assert (speed.trained or 0) > 0
        assert await drawn(engine) == before


@pytest.mark.parametrize("context", [2, 8, 23])
async def test_the_speed_is_measured_within_a_short_context(context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE", 1000)
    monkeypatch.setattr(reports, "PROBE_S", 300.0)
    engine = ag.TransformersEngine("tiny", ag.TransformersConfig(context_tokens=context, slots=2))
    async with Trainer("tiny", CONFIG.train) as trainer, engine:
        assert ((await measure_speed(trainer, engine)).sampled or 0) > 0


async def test_the_memory_of_the_teacher_and_of_model_roles_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = replace(CONFIG, teacher="tiny", teacher_engine=CONFIG.engine, output_dir=tmp_path / "run")
    await train_policy(run)
    assert ", other models 0." in capsys.readouterr().err
    kept = json.loads((tmp_path / "run/environment.json").read_text())["model"]["memory"]
    assert kept["other models"] == kept["engine's weights"] + kept["KV cache"]


async def test_the_report_is_printed_and_stored_and_the_end_says_where_time_and_memory_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = await train_policy(replace(CONFIG, output_dir=tmp_path / "run"))
    printed = capsys.readouterr().err
    assert printed.index("model     tiny") < printed.index("memory    about") < printed.index("step 0")
    assert "time: " in printed
    assert "collect " in printed.rpartition("time: ")[2]
    assert "peak memory" in printed.rpartition("time: ")[2]
    assert summary["peak_memory_gib"] > 0.1
    model = json.loads((tmp_path / "run/environment.json").read_text())["model"]
    assert (model["weights"], model["trained"], model["coverage"]) == (381_792, 87_552, 1.0)
    assert set(model["memory"]) == {"weights", "optimizer", "activations", "engine's weights", "KV cache"}
