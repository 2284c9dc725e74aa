"""Four credit assignments at equal token budgets: their comparison, reuse of finished runs, and all ten seeds."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentgym.files.folder_lock import FolderInUse, hold_folder
from recipes.credit_curves import (
    BINS,
    ENVS,
    METHODS,
    Credit,
    curve,
    finished,
    main,
    play,
    run_of,
    show,
    table,
    tokens_and_rewards,
    with_error,
)

SMALL = Credit(folder=Path(), seeds=1, tokens=3000, stride=1, sandbox="unsafe", envs=("bisect_long",))


def test_rewards_are_compared_by_tokens_whatever_the_batch_size() -> None:
    few = curve(np.cumsum(np.full(40, 10.0)), np.repeat([0.0, 1.0], 20), 400)
    many = curve(np.cumsum(np.full(4, 100.0)), np.repeat([0.0, 1.0], 2), 400)
    np.testing.assert_allclose(few, np.repeat([0.0, 1.0], BINS // 2))
    np.testing.assert_allclose(many, few)
    longer = curve(np.cumsum(np.full(80, 10.0)), np.repeat([0.0, 1.0, 9.0, 9.0], 20), 400)
    np.testing.assert_allclose(longer, few)  # tokens beyond the budget do not count


def test_differences_compare_equal_seeds() -> None:
    levels = {"outcome": (0.1, 0.5), "value": (0.2, 0.6)}
    curves = {name: {seed: np.full(BINS, level) for seed, level in enumerate(of)} for name, of in levels.items()}
    assert list(table(curves))[2:] == [
        "| outcome | 2 | 0.300 ± 0.200 | 0.300 ± 0.200 |  |",
        "| value | 2 | 0.400 ± 0.200 | 0.400 ± 0.200 | 0.100 ± 0.000 |",
    ]
    assert (with_error([]), with_error([0.5])) == ("none", "0.500")


@pytest.mark.parametrize("env", ENVS)
def test_methods_differ_only_in_their_credit_assignment(env: str) -> None:
    runs = {method: run_of(SMALL, env, method, 3) for method in METHODS}
    assert {method: run.credit for method, run in runs.items()} == {method: method for method in METHODS}
    base = replace(runs["outcome"], output_dir=None, credit="value")
    assert replace(runs["value"], output_dir=None) == base
    assert (base.seed, base.env, base.group_size, runs["branches"].group_size) == (3, env, 4, 2)


def test_a_run_that_another_process_holds_is_left_alone(tmp_path: Path) -> None:
    run = run_of(replace(SMALL, folder=tmp_path), "bisect_long", "turn", 0)
    assert run.output_dir is not None
    run.output_dir.mkdir(parents=True)
    (run.output_dir / "metrics.jsonl").write_text("")
    with hold_folder(run.output_dir), pytest.raises(FolderInUse):
        play(run, 1)
    assert (run.output_dir / "metrics.jsonl").exists()


def test_an_unknown_env_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="envs: unknown env 'bisect_lnog'; did you mean 'bisect_long'"):
        main(replace(SMALL, folder=tmp_path, envs=("bisect_lnog",)))


@pytest.mark.parametrize(
    ("field", "credit"),
    [("seeds", replace(SMALL, seeds=0)), ("tokens", replace(SMALL, tokens=0)), ("stride", replace(SMALL, stride=0))],
)
def test_a_number_below_one_is_refused_by_name(field: str, credit: Credit) -> None:
    with pytest.raises(SystemExit, match=f"{field}: expected at least 1, got 0"):
        main(credit)


@pytest.mark.slow
def test_finished_runs_are_kept_and_started_ones_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    credit = replace(SMALL, folder=tmp_path)  # a budget that takes more than one step
    begun = tmp_path / "bisect_long" / "turn" / "0"  # stopped before its first checkpoint
    begun.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text("")
    main(credit)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")}
    assert len(written) == len(METHODS)
    for path in written:
        tokens, _ = tokens_and_rewards(path.parent)
        assert [*(tokens >= 3000)] == [False] * (len(tokens) - 1) + [True], path  # up to the step that reaches it
    assert len(tokens_and_rewards(tmp_path / "bisect_long" / "outcome" / "0")[0]) > 1
    main(credit)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("metrics.jsonl")} == written
    assert (tmp_path / "bisect_long.png").stat().st_size > 10_000
    assert {method: len(seeds) for method, seeds in finished(credit, "bisect_long").items()} == dict.fromkeys(
        METHODS, 1
    )
    assert capsys.readouterr().out.count("| value | 1 |") == 2


@pytest.mark.slow
@pytest.mark.proof
def test_every_credit_assignment_learns_over_ten_seeds() -> None:
    """Takes hours on one core. The folder is reused, so a test that was stopped resumes there."""
    credit = Credit(folder=Path(os.environ.get("AGENTGYM_CREDIT_RUNS", "runs/credit")))
    main(credit)
    for env in credit.envs:
        for method, of_seed in show(credit, env).items():
            assert len(of_seed) == credit.seeds, (env, method)
            gained = [float(found[-4:].mean() - found[:4].mean()) for found in of_seed.values()]
            assert np.mean(gained) > 3 * np.std(gained, ddof=1) / len(gained) ** 0.5, (env, method)
