"""Runs with a critic: which settings are refused, and that a stopped run resumes as if it hadn't been stopped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.advantages.gae import GAEConfig
from agentgym.cli.recipe import settings
from recipes import bisect_long, chase_long

CLOCKS = ("train/seconds", "rollout/seconds", "oversample/length_bias", "time/", "throughput/", "sync/")
"""Prefixes of metrics that depend on wall time, or on the sync check, which starts over in each process."""


def test_a_critic_is_configured_by_flags() -> None:
    words = ["--credit", "value", "--gae.lam", "0.5", "--gae.gamma", "0.9", "--train.value-lr", "0.01"]
    run = settings(chase_long.RECIPE, [*words, "--train.value-epochs", "3", "--train.value-clip", "0.2"])
    assert run.gae == GAEConfig(gamma=0.9, lam=0.5)
    assert (run.train.value_lr, run.train.value_epochs, run.train.value_clip) == (0.01, 3, 0.2)


def test_a_critic_allows_groups_of_one() -> None:
    assert replace(chase_long.RECIPE, credit="value", group_size=1).group_size == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gae": GAEConfig(lam=0.5)}, "^gae: only used with a critic; set credit to value"),
        ({"train": ag.TrainConfig(value_lr=0.1)}, r"^train\.value_lr: only used with a critic"),
        ({"train": ag.TrainConfig(value_clip=0.1)}, r"^train\.value_clip: only used with a critic"),
        ({"credit": "value", "advantage_estimator": "grpo"}, "^advantage_estimator: grpo compares rollouts of a group"),
        ({"credit": "value", "merge": False}, "^merge: a critic reads whole segments"),
        ({"credit": "value", "branching": ag.BranchingConfig(every=2)}, "^branching: only used with credit branches"),
        ({"credit": "value", "oversample": ag.OversampleConfig(replace=2)}, r"^oversample\.replace: with a critic"),
        ({"credit": "value", "engine": ag.SGLangConfig(colocate="keep")}, r"^engine\.colocate: a critic"),
        ({"credit": "value", "teacher": "tiny"}, "^credit: with a teacher"),
    ],
)
def test_settings_that_conflict_with_a_critic_or_need_one_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(chase_long.RECIPE, **changes)


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCKS)} for row in rows]


async def test_a_resumed_run_continues_with_its_critic(tmp_path: Path) -> None:
    small = replace(
        bisect_long.RECIPE,
        credit="value",
        max_steps=4,
        prompts_per_step=2,
        group_size=2,
        eval_tasks=0,
        sandbox="unsafe",
        engine=ag.TransformersConfig(slots=1),  # one rollout at a time, so that float noise is the same
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    await ag.train_policy(replace(small, output_dir=whole))
    await ag.train_policy(replace(small, output_dir=cut, max_steps=2))
    await ag.train_policy(replace(small, resume=cut))
    assert metrics(cut) == metrics(whole)
    assert all(row["train/value_mean"] != 0 for row in metrics(whole)[1:])
