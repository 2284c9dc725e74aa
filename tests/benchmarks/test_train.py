"""The benchmark of a whole step: its rollouts, and the measurements that its goals compare."""

from pathlib import Path

import pytest

from benchmarks.train import ours
from benchmarks.train.__main__ import SHAPES, goals, require_same
from benchmarks.train.ours import BATCH, GROUP, NEW_TOKENS, STEPS, Chatter, Done, make_model, prompts, steps

OURS = {
    f"{shape}_ours_{name}": value
    for shape in SHAPES
    for name, value in (("samples_per_cpu_s", 80.0), ("peak_mib", 500.0))
}


def test_every_group_has_a_prompt_of_suitable_length() -> None:
    texts = prompts(None, 0)
    assert len(texts) == STEPS * BATCH // GROUP
    assert all(4 <= len(text.split()) <= 32 for text in texts)


def test_goals_are_compared_with_measurements_of_the_same_work() -> None:
    measured = {"64x2_trl_lora_samples_per_cpu_s": 50.0, "64x2_trl_lora_peak_mib": 1000.0}
    other = {"64x2_trl_full_samples_per_cpu_s": 10.0, "64x2_trl_full_peak_mib": 10_000.0}
    found = goals(OURS | measured | other)
    assert found["64x2: samples per CPU s / trl's, the same adapter"] == {"value": 1.6, "goal": 3.0, "met": False}
    assert found["64x2: peak memory / trl's, the same adapter"] == {"value": 0.5, "goal": 0.7, "met": True}


def test_measurements_of_other_work_are_not_used_for_a_goal() -> None:
    other = {"64x2_trl_full_samples_per_cpu_s": 10.0, "128x4_trl_lora_peak_mib": 1000.0}
    found = goals(OURS | other)
    measured = {name for name, goal in found.items() if goal["met"] is not None}
    assert measured == {"128x4: peak memory / trl's, the same adapter"}
    assert all(goal["value"] is None for name, goal in found.items() if name not in measured)


async def test_the_real_loop_trains_on_every_requested_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "STEPS", 2)
    monkeypatch.setattr(Chatter, "texts", prompts(None, 0))
    make_model(tmp_path, 64, 1)
    spent, done = await steps(tmp_path)
    assert len(spent) == done.optimizer_steps == 2
    assert done.tokens > sum(done.sampled_tokens)
    assert done.sampled_tokens == [BATCH * NEW_TOKENS] * 2


def test_different_work_is_not_compared() -> None:
    asked = BATCH * NEW_TOKENS
    mine = Done(100, ["torch.float32"], [asked, asked], 2 * asked + 50, 2, 1)
    require_same(mine, mine, lora=True)
    others = {
        "trained_weights": 50,
        "dtypes": ["torch.bfloat16"],
        "sampled_tokens": [asked, asked - 1],
        "tokens": 2 * asked + 49,
        "optimizer_steps": 1,
        "threads": 2,
    }
    for field, other in others.items():
        with pytest.raises(RuntimeError, match=field):
            require_same(mine, mine._replace(**{field: other}), lora=True)  # type: ignore[arg-type]
    require_same(mine, mine._replace(trained_weights=50), lora=False)


def test_two_runs_that_both_stop_early_are_not_compared() -> None:
    short = Done(100, ["torch.float32"], [7], 9, 1, 1)
    with pytest.raises(RuntimeError, match="sampled_tokens"):
        require_same(short, short, lora=True)
