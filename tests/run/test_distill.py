"""A run that learns from a teacher: its settings, and that the student gets closer to the teacher."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.cli.output import RefusedWords
from agentgym.cli.recipe import settings
from agentgym.engines.custom import CustomEngineConfig
from agentgym.run.teacher import open_teacher
from agentgym.samples import demonstrations
from agentgym.train import Trainer
from recipes import chase_distill, chase_grpo
from recipes.base import TRAIN
from recipes.chase_sft import demonstrated
from tests.engines.sglang.peer import Peer, giving, sglang

SMALL = replace(
    chase_distill.RECIPE,
    model="tiny",
    sandbox="unsafe",
    max_steps=6,
    eval_tasks=0,
    train=replace(TRAIN, device="cpu"),
    teacher_engine=ag.TransformersConfig(device="cpu"),
    engine=ag.TransformersConfig(device="cpu"),
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"teacher": None, "teacher_engine": ag.TransformersConfig(slots=2)}, "^teacher_engine: there is no teacher"),
        ({"advantage_estimator": "grpo"}, "^advantage_estimator: with a teacher, advantages don't come from rewards"),
        ({"credit": "turn"}, "^credit: with a teacher, advantages don't come from rewards"),
        (
            {"oversample": ag.OversampleConfig(replace=1)},
            r"^oversample\.replace: with a teacher, equal rewards are a signal",
        ),
        (
            {"teacher_engine": ag.SGLangConfig(colocate="keep")},
            r"^teacher_engine\.colocate: a teacher's servers can't lend",
        ),
        (
            {"engine": ag.SGLangConfig(), "teacher_engine": ag.SGLangConfig()},
            r"^teacher_engine\.gpus: without it, the teacher would use the policy's GPUs",
        ),
        (
            {"teacher": None, "teacher_engine": ag.TransformersConfig(), "group_size": 1},
            "^group_size: a single rollout can't be compared",
        ),
    ],
)
def test_settings_that_conflict_with_a_teacher_or_need_one_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(SMALL, **changed)


def test_the_teacher_is_set_by_a_flag_and_allows_groups_of_one() -> None:
    run = settings(
        chase_distill.RECIPE, ["--teacher", "owner/name", "--group-size", "1", "--teacher-engine.slots", "3"]
    )
    assert (str(run.teacher), run.group_size, run.teacher_engine) == ("owner/name", 1, ag.TransformersConfig(slots=3))


def test_the_teachers_engine_is_chosen_on_the_command_line_with_separate_flags() -> None:
    run = settings(chase_distill.RECIPE, ["--teacher-engine", "sglang", "--teacher-engine.urls", "http://127.0.0.1:1"])
    assert (run.teacher_engine, run.engine) == (
        ag.SGLangConfig(urls=("http://127.0.0.1:1",)),
        chase_distill.RECIPE.engine,
    )
    both = ["--engine", "sglang", "--engine.gpus", "0", "--teacher-engine", "sglang", "--teacher-engine.gpus", "1"]
    run = settings(chase_grpo.RECIPE, ["--teacher", "owner/name", *both])
    assert (run.engine, run.teacher_engine) == (ag.SGLangConfig(gpus=(0,)), ag.SGLangConfig(gpus=(1,)))
    assert settings(chase_distill.RECIPE, ["--teacher-engine", "mine:Engine"]).teacher_engine == CustomEngineConfig(
        name="mine:Engine"
    )


@pytest.mark.parametrize(
    ("recipe", "flags", "said"),
    [
        (
            chase_grpo.RECIPE,
            ["--teacher-engine", "sglang"],
            "--teacher-engine: there is no teacher; set teacher",
        ),
        (
            chase_distill.RECIPE,
            ["--engine", "sglang", "--teacher-engine", "sglang"],
            "--teacher-engine.gpus: without it, the teacher would use the policy's GPUs",
        ),
    ],
)
def test_an_invalid_engine_of_the_teacher_gives_one_line(recipe: ag.RunConfig, flags: list[str], said: str) -> None:
    with pytest.raises(RefusedWords, match=f"^{said}"):
        settings(recipe, flags)


@pytest.mark.parametrize("flag", ["--teacher-engine.threads", "--engine.threads"])
def test_a_refused_flag_of_either_engine_is_named(flag: str) -> None:
    with pytest.raises(RefusedWords, match=f"^{flag}: must be at least 1, got '0'"):
        settings(chase_distill.RECIPE, [flag, "0"])


def steps_of(run: ag.RunConfig) -> list[dict[str, float]]:
    assert run.output_dir is not None
    return [json.loads(line) for line in (run.output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("takes_adapters", [True, False])
async def test_a_running_server_may_teach_with_or_without_adapter_support(takes_adapters: bool) -> None:
    info = {"max_req_input_len": 401, "model_path": "unknown", "enable_lora": takes_adapters}
    async with Peer(sglang(server_info=giving(info))) as peer, Trainer("tiny", SMALL.train) as trainer:
        run = replace(SMALL, teacher="tiny", teacher_engine=ag.SGLangConfig(urls=(peer.url,)))
        async with open_teacher(run, trainer, print) as teacher:
            assert teacher is not None
            assert teacher.context_tokens == 400


async def test_a_student_that_is_its_own_teacher_does_not_diverge(tmp_path: Path) -> None:
    run = replace(SMALL, teacher="tiny", max_steps=1, prompts_per_step=1, group_size=1, output_dir=tmp_path / "run")
    await ag.train_policy(run)
    [row] = steps_of(run)
    assert abs(row["teacher/divergence"]) < 1e-4
    assert row["train/trained_tokens"] > 0
    assert row["time/teacher"] > 0


@pytest.mark.slow
async def test_the_students_divergence_from_its_teacher_falls(tmp_path: Path) -> None:
    """The teacher is the tiny model after some steps of imitation, as in `recipes.chase_sft`."""
    rollout = await demonstrated(chat_tokenizer("tiny"), range(64), seed=0)
    async with Trainer("tiny", ag.TrainConfig(loss="sft", device="cpu")) as trainer:
        for _ in range(10):
            await trainer.step(demonstrations(rollout))
        trainer.merge(tmp_path / "teacher")
    run = replace(SMALL, teacher=tmp_path / "teacher", output_dir=tmp_path / "run")
    summary = await ag.train_policy(run)
    rows = steps_of(run)
    far = [row["teacher/divergence"] for row in rows]
    assert summary["optimizer_steps"] == 6
    assert all(row["samples/groups_without_signal"] == 0 for row in rows)
    assert sum(far[:2]) > 0.2
    assert sum(far[-2:]) < 0.5 * sum(far[:2]), far
