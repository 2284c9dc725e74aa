"""Engine and trainer compute in the same data type, or the run says which setting to change."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.run.preflight import check_data_types

CPU: dict[str, Any] = {"device": "cpu"}
RUN = ag.RunConfig(
    recipe="types",
    env="tests.docs.metrics_env:Look",
    model="tiny",
    prompts_per_step=2,
    group_size=2,
    max_steps=1,
    max_turn_tokens=10,
)


async def test_a_trainer_in_16_bits_beside_an_engine_in_float32_is_refused_before_the_first_rollout(
    tmp_path: Path,
) -> None:
    train, engine = ag.TrainConfig(dtype="bfloat16", **CPU), ag.TransformersConfig(dtype="float32", **CPU)
    run = replace(RUN, output_dir=tmp_path / "run", train=train, engine=engine)
    with pytest.raises(ValueError, match=r"^train.dtype: .* set --train.dtype float32, or --engine.dtype bfloat16"):
        await ag.train_policy(run)
    assert not (tmp_path / "run/metrics.jsonl").read_text()


def test_an_engine_in_16_bits_beside_a_trainer_in_float32_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_data_types("float32", "bfloat16")
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "set --train.dtype bfloat16, or --engine.dtype float32 (for SGLang, " in said


@pytest.mark.parametrize(("trained", "sampled"), [("bfloat16", "bfloat16"), ("float32", ""), ("bfloat16", "fp8")])
def test_equal_and_unknown_data_types_are_accepted(
    trained: str, sampled: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_data_types(trained, sampled)
    assert caplog.records == []


def test_the_defaults_of_engine_and_trainer_agree() -> None:
    assert ag.TrainConfig().dtype == ag.TransformersConfig().dtype == "auto"
    assert ag.TrainConfig().device == ag.TransformersConfig().device == "auto"
