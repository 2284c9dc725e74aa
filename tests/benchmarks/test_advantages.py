"""A run's credit assignment reaches its training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.samples import CreditLevel
from recipes import bisect_turns


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unsafe sandboxes")
async def test_per_turn_credit_gives_another_gradient_for_the_same_rollouts(tmp_path: Path) -> None:
    async def first_step(credit: CreditLevel) -> dict[str, Any]:
        small = replace(
            bisect_turns.RECIPE,
            max_steps=1,
            prompts_per_step=4,
            group_size=4,
            eval_tasks=0,
            sandbox="unsafe",
            output_dir=tmp_path / credit,
        )
        await ag.train_policy(replace(small, credit=credit))
        row: dict[str, Any] = json.loads((tmp_path / credit / "metrics.jsonl").read_text())
        return row

    turns, outcome = await first_step("turn"), await first_step("outcome")
    assert turns["reward"] == outcome["reward"]
    assert turns["samples/trained_tokens"] == outcome["samples/trained_tokens"] > 0
    assert turns["train/grad_norm"] != pytest.approx(outcome["train/grad_norm"], rel=1e-3)
