"""The planning benchmark detects a bad plan."""

import numpy as np

from benchmarks.harness import load_workloads
from benchmarks.planning.judging import judge, uneven


def test_a_lost_sample_an_empty_rank_and_a_slow_one_are_detected() -> None:
    lengths = np.array([300, 100, 100, 100])
    lopsided = [[[0], [1]], [[2], []]]
    figures = judge("plan", lopsided, lengths, 0.0, load_workloads(None))
    assert figures["plan_lost_or_twice"] == 1
    assert figures["plan_masked_rows"] == 1
    assert figures["plan_most_tokens"] == 300
    assert 1.55 < figures["plan_straggler"] < 1.65  # 2 x (300 + 100) / 500, and a little for attention


def test_the_straggler_metric_is_the_slowest_ranks_time_over_an_even_share() -> None:
    assert uneven(np.array([[3.0, 1.0], [2.0, 2.0]])) == 1.25
