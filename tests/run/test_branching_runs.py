"""Runs with branches: which are refused, what is trained, and what stays on disk."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.cli.output import RefusedWords
from agentgym.cli.recipe import settings
from agentgym.exports.atif import documents
from agentgym.exports.atif_reader import read_atif
from agentgym.exports.conversations import BRANCH, why_not
from agentgym.store.reader import RolloutStore
from agentgym.store.suspicious import signs_of_group
from agentgym.store.writer import RolloutWriter
from agentgym.types.rollout import Group, Rollout
from agentgym.view.rollout_page import rollout_page
from recipes import bisect_branches, chase_grpo
from tests.rollouts.test_branches import Aided, Compares, play


def test_branches_are_configured_by_flags() -> None:
    assert bisect_branches.RECIPE.credit == "branches"
    words = ["--credit", "branches", "--branching.per-state", "3", "--branching.after", "tool_error"]
    run = settings(chase_grpo.RECIPE, [*words, "--branching.tokens", "100", "--branching.no-train"])
    assert run.branching == ag.BranchingConfig(per_state=3, after="tool_error", tokens=100, train=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"branching": ag.BranchingConfig(every=2)},
            "^branching: only used with credit branches; set credit to branches",
        ),
        ({"credit": "branches", "advantage_estimator": "grpo"}, "^advantage_estimator: grpo rescales rewards"),
        (
            {"credit": "branches", "train": ag.TrainConfig(loss="gspo_rollout")},
            "^train.loss: gspo_rollout needs whole rollouts",
        ),
        ({"merge": False, "train": ag.TrainConfig(loss="gspo")}, "^merge: gspo needs each whole segment"),
        (
            {"merge": False, "train": ag.TrainConfig(importance_sampling="sequence_mask")},
            "^merge: sequence_mask needs each whole segment",
        ),
    ],
)
def test_settings_that_conflict_with_branches_or_need_them_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(chase_grpo.RECIPE, **changes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--branching.every", "2"], "--branching.every: only used with credit branches; set credit to branches, or"),
        (["--branching.no-train"], "--branching.no-train: only used with credit branches"),
        (["--gae.lam=0.5"], "--gae.lam: only used with a critic; set credit to value, or"),
        (["--credit", "value", "--no-merge"], "--no-merge: a critic reads whole segments; leave merge on"),
        (["--train.loss", "gspo", "--no-merge"], "--no-merge: gspo needs each whole segment in one sample; leave"),
    ],
)
def test_a_refusal_on_the_command_line_names_the_flags_as_typed(words: list[str], said: str) -> None:
    with pytest.raises(RefusedWords, match=f"^{said}"):
        settings(chase_grpo.RECIPE, words)


async def test_an_env_that_cannot_branch_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    class Tasked(Compares):
        @classmethod
        def tasks(cls, split: ag.Split) -> Sequence[ag.Task]:
            return [ag.Task(id=f"{split}{i}", prompt="Go.") for i in range(8)]

    ag.register("test-compares")(Tasked)
    run = replace(bisect_branches.RECIPE, env="test-compares", model="no/such-model", output_dir=tmp_path / "run")
    with pytest.raises(ValueError, match=r"branching: Tasked.group_reward compares whole rollouts"):
        await ag.train_policy(run)


async def test_a_step_trains_every_sampled_token_and_stores_every_branch(tmp_path: Path) -> None:
    run = replace(
        bisect_branches.RECIPE,
        max_steps=1,
        prompts_per_step=2,
        group_size=2,
        eval_tasks=0,
        sandbox="unsafe",
        output_dir=tmp_path / "run",
    )
    summary = await ag.train_policy(run)
    assert (summary["rollouts"], summary["failed"]) == (4, 0)
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["rollout/branches"] > 0
    assert metrics["rollout/branch_tokens"] > 0
    assert metrics["samples/untrained_tokens"] == 0
    with RolloutStore(tmp_path / "run") as store:
        found = list(store.find())
    branches = sum(len(one.rollout.branches) for one in found)
    assert branches == 4 * metrics["rollout/branches"]
    if not metrics["samples/groups_without_signal"]:
        sampled = sum(one.rollout.sampled_tokens for one in found)
        assert metrics["samples/trained_tokens"] == sampled
        assert all(given is not None for one in found for given in one.advantages)


def fields(rollout: Rollout) -> Any:
    segments = [
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(s).items()}
        for s in rollout.segments
    ]
    return json.loads(json.dumps([segments, [asdict(branch) for branch in rollout.branches], rollout.reward]))


async def test_a_rollout_with_branches_is_restored_from_a_store_and_from_atif(tmp_path: Path) -> None:
    played = await play(Aided, ag.BranchingConfig(per_state=2))
    with RolloutWriter(tmp_path) as writer:
        writer.add([Group(group_id="t", rollouts=(played,))], phase="train", step=0)
    with RolloutStore(tmp_path) as store:
        (stored,) = store.find()
        shown = rollout_page(store, stored.number, ["Aided"])["segments"]
        assert shown[0]["branch"] is None
        assert shown[-1]["branch"] == str(played.branches[-1])
    assert fields(stored.rollout) == fields(played)
    for name, document in documents(stored, "played", None).items():
        (tmp_path / name).write_text(json.dumps(document))
    back = read_atif(tmp_path / "played.json").rollout
    assert [asdict(b) for b in back.branches] == [asdict(b) for b in stored.rollout.branches]
    for one, other in zip(back.segments, played.segments, strict=True):
        assert (one.kind, one.parent, one.branch) == (other.kind, other.parent, other.branch)
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert [t.number for t in one.turns] == [t.number for t in other.turns]


async def test_branches_do_not_count_in_signs_messages_or_imitation(tmp_path: Path) -> None:
    played = await play(Aided, ag.BranchingConfig(per_state=2))
    plain = await play(Aided)
    assert played.messages == plain.messages
    assert signs_of_group(Group(group_id="t", rollouts=(played,))) == signs_of_group(
        Group(group_id="t", rollouts=(plain,))
    )
    left_out = [why_not(segment, images=False) for segment in played.segments]
    assert [why == BRANCH for why in left_out] == [segment.branch is not None for segment in played.segments]
