"""Samples of single turns are joined if each prompt extends the previous turn."""

from typing import Any

import numpy as np

from agentgym.types.sample import Sample
from benchmarks.layout.merging import merge


def step(
    prompt: list[int], response: list[int], logprobs: list[float] | None = None, *, at: int = 0, **more: Any
) -> Sample:
    fields: dict[str, Any] = {
        "group_id": "g",
        "rollout_id": "r",
        "segment": 0,
        "step": at,
        "prompt_ids": prompt,
        "response_ids": response,
        "loss_mask": [True] * len(response),
        "logprobs": logprobs or [-1.0] * len(response),
        "advantages": [1.0] * len(response),
        "weight": 0.25,
    }
    return Sample(**(fields | more))


def test_steps_that_extend_the_previous_one_merge_into_one() -> None:
    (merged,) = merge([step([10], [20], [-0.5]), step([10, 20, 30], [40, 41], [-0.3, -0.4], at=1)])
    assert (merged.prompt_ids.tolist(), merged.response_ids.tolist()) == ([10], [20, 30, 40, 41])
    assert merged.loss_mask.astype(int).tolist() == [1, 0, 1, 1]
    np.testing.assert_allclose(merged.logprobs, [-0.5, 0, -0.3, -0.4])
    np.testing.assert_array_equal(merged.advantages, [1, 0, 1, 1])
    assert (merged.weight, merged.step) == (0.5, 0)


def test_a_prompt_that_does_not_extend_the_previous_step_starts_a_new_sample() -> None:
    samples = merge([step([10], [20]), step([99, 88], [40, 41], at=1), step([99, 88, 40, 41], [5], at=2)])
    assert [(r.prompt_ids.tolist(), r.response_ids.tolist()) for r in samples] == [
        ([10], [20]),
        ([99, 88], [40, 41, 5]),
    ]


def test_a_prompt_that_differs_in_the_last_response_starts_a_new_sample() -> None:
    samples = merge([step([10], [20, 21]), step([10, 20, 99, 30], [40], at=1)])
    assert len(samples) == 2


def test_a_prompt_that_differs_in_the_first_prompt_starts_a_new_sample() -> None:
    assert len(merge([step([10, 11], [20]), step([10, 99, 20, 30], [40], at=1)])) == 2


def test_three_turns_merge_into_one_sample() -> None:
    steps = [step([1], [2]), step([1, 2, 3], [4], at=1), step([1, 2, 3, 4, 5], [6], at=2)]
    for order in (steps, steps[::-1]):  # neighbors are found by step, not by position
        (merged,) = merge(order)
        assert merged.response_ids.tolist() == [2, 3, 4, 5, 6]
        assert merged.loss_mask.astype(int).tolist() == [1, 0, 1, 0, 1]


def test_steps_of_different_rollouts_or_segments_never_merge() -> None:
    samples = merge([step([1], [2]), step([1, 2], [3], at=1, rollout_id="s"), step([1, 2], [3], at=1, segment=1)])
    assert len(samples) == 3


def test_merging_a_single_sample_returns_it() -> None:
    merged = step([1], [2])
    assert merge([merged]) == [merged]
