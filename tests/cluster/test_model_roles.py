"""An env's model roles on cluster workers: counted and stored as in one process."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.custom import CustomEngineConfig
from agentgym.store.reader import RolloutStore, StoredRollout
from tests.cluster.conftest import TwoNodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]
RUN = ag.RunConfig(
    recipe="named",
    env="tests.cluster.eval_env:Duel",
    model="tiny",
    engine=ag.TransformersConfig(slots=4),
    models={
        "opponent": ag.ModelRoleConfig(model="mine", engine=CustomEngineConfig(name="tests.cluster.eval_env:player"))
    },
    train=ag.TrainConfig(device="cpu"),
    max_steps=1,
    prompts_per_step=2,
    group_size=2,
    eval_tasks=2,
)


def kept(folder: Path) -> list[StoredRollout]:
    with RolloutStore(folder) as store:
        return sorted(store.find(), key=lambda found: (found.phase, found.step, found.rollout.rollout_id))


def said_by(found: list[StoredRollout], model: str) -> set[int]:
    """Return the ids of the tokens that a model has sampled."""
    segments = [segment for each in found for segment in each.rollout.segments if segment.model == model]
    return {i for segment in segments for i in segment.token_ids.tolist()}


def counts(found: list[StoredRollout]) -> list[dict[str, float]]:
    return [{k: v for k, v in each.rollout.metrics.items() if "seconds" not in k} for each in found]


def metrics(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("rollouts/", "requests/", "tokens/", "rollout/model_", "samples/")
    return [{k: v for k, v in row.items() if k.startswith(names) and "seconds" not in k} for row in rows]


def test_a_user_defined_models_output_on_workers_is_counted_and_stored(two_nodes: TwoNodes, tmp_path: Path) -> None:
    asyncio.run(ag.train_policy(replace(RUN, output_dir=tmp_path / "alone")))
    asyncio.run(ag.train_policy(replace(RUN, output_dir=tmp_path / "ray", ray=two_nodes.address)))
    alone, on_ray = kept(tmp_path / "alone"), kept(tmp_path / "ray")
    assert counts(on_ray) == counts(alone)
    assert metrics(tmp_path / "ray") == metrics(tmp_path / "alone")
    assert said_by(on_ray, "opponent") == said_by(alone, "opponent") != set()
    for model in ("", "opponent"):
        ids = said_by(alone, model)
        with RolloutStore(tmp_path / "alone") as one, RolloutStore(tmp_path / "ray") as other:
            assert other.token_bytes(model, ids) == one.token_bytes(model, ids)
            assert other.token_bytes(model, ids).keys() == ids
