"""Prompts that come back as ids: clean, realigned or a new segment; each sampled id is trained once (vectors T8)."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest

from agentgym.engines.scripted import say
from agentgym.rollouts.reconcile import Drift, reconcile
from agentgym.rollouts.segment import OpenSegment
from agentgym.types.completion import Completion, Version


def sampled(*ids: int) -> Completion:
    return Completion(token_ids=np.array(ids), logprobs=np.full(len(ids), -0.25), finish_reason="stop")


def held(prompt: Sequence[int], completion: Completion) -> OpenSegment:
    """Return a segment that read a prompt and sampled an answer."""
    segment = OpenSegment(index=0, parent=None, kind="root", session="0", context_tokens=64)
    segment.extend(prompt)
    segment.append(completion, array("q", completion.token_ids.tolist()), say(""), seconds=0.0, number=0)
    return segment


FIRST = ([1, 2, 3], sampled(10, 11))


def test_a_prompt_that_extends_the_sampled_ids_is_clean() -> None:
    assert reconcile(held(*FIRST), [1, 2, 3, 10, 11, 20, 21]) == (Drift.CLEAN, 5)


def test_a_short_drift_is_adopted_and_not_trained() -> None:
    segment, prompt = held(*FIRST), [1, 2, 3, 10, 12]
    match = reconcile(segment, prompt)
    assert match == (Drift.REALIGN, 4)
    segment.realign(match.shared, prompt[match.shared :])
    closed = segment.close()
    assert (closed.token_ids.tolist(), closed.sampled.tolist()) == (prompt, [False, False, False, True, False])


@pytest.mark.parametrize("threshold", [0, 8, 1000])
def test_a_prompt_that_diverges_before_the_last_response_is_a_fork(threshold: int) -> None:
    assert reconcile(held(*FIRST), [1, 9, 3, 10, 11], realign_tokens=threshold) == (Drift.FORK, 1)


def test_a_long_drift_is_a_fork() -> None:
    assert reconcile(held([1], sampled(5, 6, 7, 8)), [1, 5, 9], realign_tokens=2).drift is Drift.FORK


@pytest.mark.parametrize(("threshold", "drift"), [(2, Drift.REALIGN), (1, Drift.FORK)])
def test_up_to_realign_tokens_ids_are_given_up(threshold: int, drift: Drift) -> None:
    assert reconcile(held([1], sampled(5, 6, 7)), [1, 5, 9], realign_tokens=threshold).drift is drift


@pytest.mark.parametrize("prompt", [[1, 2, 3, 12], [1, 2, 3]])
def test_a_prompt_that_keeps_none_of_the_response_is_a_fork(prompt: list[int]) -> None:
    assert reconcile(held(*FIRST), prompt) == (Drift.FORK, 3)


def test_versions_of_dropped_ids_are_dropped_too() -> None:
    versions = (Version(0, 4), Version(2, 5))
    moved = Completion(
        token_ids=np.array([10, 11, 12]), logprobs=np.full(3, -0.5), finish_reason="stop", versions=versions
    )
    segment = held([1], moved)
    segment.realign(3, [13])
    assert segment.close().turns[0].versions == (Version(0, 4),)
