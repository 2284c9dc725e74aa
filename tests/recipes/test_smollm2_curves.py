"""The runs of SmolLM2's recipes: which are done, and their table. Runs of a tiny model take their place."""

from dataclasses import replace
from pathlib import Path

import pytest

import agentgym as ag
from recipes import smollm2_curves
from recipes.smollm2_curves import RECIPES, SmolCurves, main
from tests.run.test_resume import SETTINGS


def test_recipes_set_no_hyper_parameter() -> None:
    for recipe in RECIPES:
        assert recipe.train == ag.TrainConfig()
        assert recipe.engine == ag.TransformersConfig()
        assert (recipe.prompts_per_step, recipe.group_size) == (8, 8)


def test_missing_runs_are_done_once_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2_curves, "RECIPES", (replace(SETTINGS, max_steps=1),))
    main(SmolCurves(folder=tmp_path, seeds=1))
    head, _, row = capsys.readouterr().out.splitlines()
    assert head.count("|") == row.count("|")
    assert row.startswith("| `terse` | 0 | 1 | -")
    assert (tmp_path / "terse.png").stat().st_size > 1000
    made = (tmp_path / "terse/0/metrics.jsonl").stat()
    main(SmolCurves(folder=tmp_path, seeds=1))
    assert (tmp_path / "terse/0/metrics.jsonl").stat() == made


def test_a_number_of_seeds_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="seeds: expected at least 1, got 0"):
        main(SmolCurves(folder=tmp_path, seeds=0))
