"""The benchmark of a whole step: what it plays, and what its goals compare."""

from pathlib import Path

import pytest

from benchmarks.train import ours
from benchmarks.train.__main__ import SHAPES, goals
from benchmarks.train.ours import BATCH, GROUP, STEPS, Chatter, make_model, prompts, steps

OURS = {
    f"{shape}_ours_{name}": value
    for shape in SHAPES
    for name, value in (("samples_per_cpu_s", 80.0), ("peak_mib", 500.0))
}


def test_every_group_has_a_prompt_that_fits() -> None:
    texts = prompts(None, 0)
    assert len(texts) == STEPS * BATCH // GROUP
    assert all(4 <= len(text.split()) <= 32 for text in texts)


def test_goals_are_against_what_was_measured_of_the_same_work() -> None:
    measured = {"64x2_trl_lora_samples_per_cpu_s": 50.0, "64x2_trl_lora_peak_mib": 1000.0}
    other = {"64x2_trl_full_samples_per_cpu_s": 10.0, "64x2_trl_full_peak_mib": 10_000.0}
    found = goals(OURS | measured | other)
    assert found["64x2: samples per CPU s / trl's, the same adapter"] == {"value": 1.6, "goal": 3.0, "met": False}
    assert found["64x2: peak memory / trl's, the same adapter"] == {"value": 0.5, "goal": 0.7, "met": True}


def test_a_run_of_other_work_stands_in_for_nothing() -> None:
    other = {"64x2_trl_full_samples_per_cpu_s": 10.0, "128x4_trl_lora_peak_mib": 1000.0}
    found = goals(OURS | other)
    measured = {name for name, goal in found.items() if goal["met"] is not None}
    assert measured == {"128x4: peak memory / trl's, the same adapter"}
    assert all(goal["value"] is None for name, goal in found.items() if name not in measured)


async def test_the_real_loop_trains_on_every_token_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "STEPS", 2)
    monkeypatch.setattr(Chatter, "texts", prompts(None, 0))
    make_model(tmp_path, 64, 1)
    assert len(await steps(tmp_path)) == 2  # it raises where a token is missing
