"""The benchmark of credit by branches runs what it describes, at equal numbers of turns."""

import numpy as np
import pytest

from benchmarks import branches
from benchmarks.branches import BATCH, CREDITS, ENVS, TURNS, Batch, logits_at


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("credit", CREDITS)
def test_batches_of_each_kind_have_equal_turns_and_a_gradient_to_the_right_action(env: str, credit: str) -> None:
    total, turns = np.zeros((TURNS, 4)), 0
    for number in range(8):
        batch = Batch(env, logits_at(0.4), np.random.default_rng(number))
        batch.play(CREDITS[credit])
        total += batch.gradient
        turns += batch.turns
    assert turns / 8 == pytest.approx(BATCH, rel=0.1)
    assert total[:, 0].sum() > 0
    assert np.abs(total.sum(1)).max() < 1e-9 * np.abs(total).max() + 1e-9


def test_the_flag_workloads_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["branches", "--workloads", "other.py"])
    with pytest.raises(SystemExit, match="2"):
        branches.main()
    assert "unrecognized arguments: --workloads" in capsys.readouterr().err
