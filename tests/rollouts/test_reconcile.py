"""Prompts that come back as ids: clean, realigned or a new segment, and each sampled id trained once (vectors T8)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.engines.scripted import say
from agentgym.rollouts.reconcile import Drift, PromptSegments
from agentgym.types import Completion, Segment


def sampled(*ids: int) -> Completion:
    return Completion(token_ids=np.array(ids), logprobs=np.full(len(ids), -0.25), finish_reason="stop")


def transcript(*requests: tuple[Sequence[int], Sequence[int]], realign_tokens: int = 8) -> PromptSegments:
    made = PromptSegments(context_tokens=64, realign_tokens=realign_tokens)
    for prompt, out in requests:
        made.add(prompt, sampled(*out), say(""))
    return made


def rows(made: PromptSegments) -> list[tuple[list[int], list[int]]]:
    return [(s.token_ids.tolist(), s.sampled.astype(int).tolist()) for s in made.close()]


FIRST = ([1, 2, 3], [10, 11])


def test_a_prompt_that_extends_what_was_sampled_goes_on_in_its_row() -> None:
    made = transcript(FIRST, ([1, 2, 3, 10, 11, 20, 21], [30, 31]))
    assert rows(made) == [([1, 2, 3, 10, 11, 20, 21, 30, 31], [0, 0, 0, 1, 1, 0, 0, 1, 1])]
    assert made.counts == {Drift.CLEAN: 1, Drift.REALIGN: 0, Drift.FORK: 0}


def test_a_short_drift_is_taken_over_and_not_trained() -> None:
    made = transcript(FIRST, ([1, 2, 3, 10, 12], [30, 31]))
    assert rows(made) == [([1, 2, 3, 10, 12, 30, 31], [0, 0, 0, 1, 0, 1, 1])]
    assert made.counts[Drift.REALIGN] == 1


@pytest.mark.parametrize("threshold", [0, 8, 1000])
def test_a_prompt_that_departs_before_the_last_response_is_a_new_row(threshold: int) -> None:
    made = transcript(FIRST, ([1, 9, 3, 10, 11], [30]), realign_tokens=threshold)
    assert rows(made) == [([1, 2, 3, 10, 11], [0, 0, 0, 1, 1]), ([1, 9, 3, 10, 11, 30], [0, 0, 0, 0, 0, 1])]
    assert [(s.kind, s.parent) for s in made.close()] == [("root", None), ("rerender", 0)]


def test_a_long_drift_is_a_new_row() -> None:
    made = transcript(([1], [5, 6, 7, 8]), ([1, 5, 9], [30]), realign_tokens=2)
    assert [mask for _, mask in rows(made)] == [[0, 1, 1, 1, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize(("threshold", "realigned"), [(2, 1), (1, 0)])
def test_as_many_ids_as_may_be_given_up_are_given_up(threshold: int, realigned: int) -> None:
    made = transcript(([1], [5, 6, 7]), ([1, 5, 9], [30]), realign_tokens=threshold)
    assert made.counts[Drift.REALIGN] == realigned


def test_a_row_that_goes_on_is_chosen_before_one_that_shares_more_and_drifts() -> None:
    made = transcript(([1], [5]), ([1, 5, 2, 3], [6, 7]))
    assert len(made.close()) == 1
    made = transcript(([1, 2, 3, 4], [5, 6]), ([1, 2], [3]))
    made.add([1, 2, 3, 4, 5, 9], sampled(30), say(""))
    assert [ids for ids, _ in rows(made)] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9, 30]]


def test_a_row_that_drifts_is_chosen_before_a_new_one_that_shares_more() -> None:
    made = transcript(([1, 2, 3, 4, 9], [8]), ([1], [2, 3, 5]))
    assert len(made.close()) == 2
    made.add([1, 2, 3, 4, 7], sampled(30), say(""))
    assert [ids for ids, _ in rows(made)] == [[1, 2, 3, 4, 9, 8], [1, 2, 3, 4, 7, 30]]
    assert made.counts == {Drift.CLEAN: 0, Drift.REALIGN: 1, Drift.FORK: 1}


def test_a_response_of_which_nothing_is_left_keeps_its_row() -> None:
    assert len(transcript(FIRST, ([1, 2, 3, 12], [30])).close()) == 2


def test_the_same_prompt_again_is_a_second_answer_in_a_row_of_its_own() -> None:
    assert rows(transcript(FIRST, ([1, 2, 3], [40]))) == [
        ([1, 2, 3, 10, 11], [0, 0, 0, 1, 1]),
        ([1, 2, 3, 40], [0, 0, 0, 1]),
    ]


def test_interleaved_conversations_each_go_on_in_their_own_row() -> None:
    made = transcript(([1], [2]), ([7], [8]), ([1, 2, 3], [4]), ([7, 8, 9], [10]))
    assert [ids for ids, _ in rows(made)] == [[1, 2, 3, 4], [7, 8, 9, 10]]
    assert [[turn.number for turn in segment.turns] for segment in made.close()] == [[0, 2], [1, 3]]


def test_versions_of_what_was_given_up_are_given_up_too() -> None:
    from agentgym.types import Version

    made = PromptSegments(context_tokens=64)
    moved = Completion(
        token_ids=np.array([10, 11, 12]),
        logprobs=np.full(3, -0.5),
        finish_reason="stop",
        versions=(Version(0, 4), Version(2, 5)),
    )
    made.add([1], moved, say(""))
    made.add([1, 10, 11, 13], sampled(30), say(""))
    (segment,) = made.close()
    assert segment.turns[0].versions == (Version(0, 4),)


def test_a_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^prompt: 64 ids and an answer do not fit 64 context_tokens"):
        transcript(([1] * 64, [2]))


def trained(segments: Sequence[Segment]) -> Counter[int]:
    return Counter(int(i) for s in segments for i in s.token_ids[s.sampled])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=8))
def test_no_sampled_token_is_trained_twice(plan: list[tuple[int, int, int]]) -> None:
    made = PromptSegments(context_tokens=4096, realign_tokens=2)
    held: list[list[int]] = [[1, 2, 3]]
    fresh = iter(range(100, 10_000))
    for which, cut, length in plan:
        before = held[which % len(held)]
        prompt = [*before[: max(1, len(before) - cut)], *([next(fresh)] if cut else [])]
        out = [next(fresh) for _ in range(length)]
        made.add(prompt, sampled(*out), say(""))
        held.append([*prompt, *out])
    counts = trained(made.close())
    assert max(counts.values()) == 1
    assert all(len(s.token_ids) == len(s.sampled) == len(s.logprobs) for s in made.close())


def test_a_prompt_and_its_answer_may_fill_the_context_and_one_id_more_is_refused() -> None:
    full = PromptSegments(context_tokens=5)
    full.add([1, 2, 3], sampled(10, 11), say(""))
    assert rows(full) == [([1, 2, 3, 10, 11], [0, 0, 0, 1, 1])]
    with pytest.raises(ValueError, match=r"^prompt: 3 ids and an answer do not fit 4 context_tokens"):
        PromptSegments(context_tokens=4).add([1, 2, 3], sampled(10, 11), say(""))
