"""Runs on two real processes equal those on one: a mixture's tasks, and a teacher's scores."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer, Qwen3ForCausalLM

import agentgym as ag
from agentgym.run.resume import read_best
from agentgym.train.checkpoint import last_checkpoint
from tests.run.test_resume import SETTINGS
from tests.torchrun import run_on_ranks

pytestmark = pytest.mark.slow

SMALL = replace(
    SETTINGS, prompts_per_step=4, max_steps=2, eval_tasks=3, train=replace(SETTINGS.train, rollouts_per_minibatch=None)
)
NAMES = ("mixture", "teacher")


def runs(folder: Path) -> dict[str, ag.RunConfig]:
    """Return the runs by name; the teacher is in the folder."""
    mixture = {"tests.run.test_resume:Terse": 3.0, "tests.environments.test_mixture:Ones": 1.0}
    taught = replace(SMALL, env="tests.run.test_resume:Terse", teacher=folder / "model", group_size=1, eval_tasks=0)
    return {
        "mixture": replace(SMALL, env=mixture, env_args={"Ones.worth": 2.0}),
        "teacher": replace(taught, teacher_engine=ag.TransformersConfig(device="cpu", dtype="float32")),
    }


def make_teacher(folder: Path) -> None:
    """Write the student's model with other weights."""
    model = Qwen3ForCausalLM.from_pretrained(SMALL.model)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(SMALL.model).save_pretrained(folder)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run everything on two processes and return the folder of each run."""
    folder = tmp_path_factory.mktemp("two")
    make_teacher(folder / "model")
    given = [replace(run, output_dir=folder / name) for name, run in runs(folder).items()]
    run_on_ranks(Path(__file__).with_name("ranks_script.py"), given, folder)
    return {name: folder / name for name in NAMES}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the run's metrics, without wall times and without values that depend on how samples were distributed."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    apart = ("time/", "throughput/", "engine/")
    cut = ("rollout/seconds", "train/seconds", "train/padding", "train/micro_batches", "oversample/length_bias")
    return [
        {name: value for name, value in row.items() if not name.startswith(apart) and name not in cut} for row in rows
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_two_processes_equals_one_on_a_single_process(name: str, two: dict[str, Path], tmp_path: Path) -> None:
    asyncio.run(ag.train_policy(replace(runs(two[name].parent)[name], output_dir=tmp_path)))
    alone, shared = metrics(tmp_path), metrics(two[name])
    assert [row.keys() for row in shared] == [row.keys() for row in alone]
    for mine, theirs in zip(shared, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    trained, other = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (two[name], tmp_path))
    for weight, values in other.items():
        assert trained[weight] == pytest.approx(values, abs=2e-3), weight


def test_mixture_members_keep_their_shares_on_two_processes(two: dict[str, Path]) -> None:
    rows = metrics(two["mixture"])
    steps = [row for row in rows if "reward" in row]
    assert [(row["env/Terse/groups"], row["env/Ones/groups"], row["env/Ones/reward"]) for row in steps] == [
        (3, 1, 2)
    ] * 2
    assert all("eval/env/Ones/reward" in row for row in rows if "eval/reward" in row)


def test_files_removed_while_a_checkpoint_is_written_block_no_rank(tmp_path: Path) -> None:
    small = replace(SMALL, env="tests.run.test_resume:Terse", max_steps=3, save_every=1, eval_every=1, eval_tasks=2)
    given = [replace(small, output_dir=tmp_path / name) for name in ("run", "best", "checkpoints")]
    run_on_ranks(Path(__file__).with_name("gone_script.py"), given, tmp_path)
    for run in given:
        assert run.output_dir is not None
        assert last_checkpoint(run.output_dir / "checkpoints").step == 3
        assert read_best(run.output_dir) is not None
        assert len([row for row in metrics(run.output_dir) if "reward" in row]) == 3
