"""Baselines count rollouts; samples contain each sampled token once."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentgym.errors import Failure
from agentgym.samples import SampleBatch, build_samples, teacher_samples
from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout, Segment, Turn


def segment(index: int, *parts: tuple[str, Sequence[int]], version: int = 0) -> Segment:
    """Return a segment of ("context", ids) and ("turn", ids) parts."""
    ids: list[int] = []
    sampled: list[bool] = []
    turns: list[Turn] = []
    for kind, more in parts:
        if kind == "turn":
            turns.append(
                Turn(
                    start=len(ids),
                    stop=len(ids) + len(more),
                    finish_reason="stop",
                    versions=(Version(0, version + len(turns)),),
                    message={"role": "assistant", "content": ""},
                )
            )
        ids += more
        sampled += [kind == "turn"] * len(more)
    return Segment(
        index=index,
        parent=None if index == 0 else 0,
        kind="root" if index == 0 else "fork",
        token_ids=ids,  # type: ignore[arg-type]
        sampled=sampled,  # type: ignore[arg-type]
        logprobs=-np.array(ids, np.float32) / 10 * np.array(sampled),
        turns=tuple(turns),
    )


def rollout(name: str, reward: float | None, *segments: Segment, group: str = "g") -> Rollout:
    return Rollout(
        rollout_id=name,
        group_id=group,
        segments=segments or (segment(0, ("context", [1, 2]), ("turn", [3])),),
        reward=reward,
        stop_reason="error" if reward is None else "done",
        failure=Failure(type="SandboxError", message="the sandbox died") if reward is None else None,
    )


def group(*rollouts: Rollout, name: str = "g") -> Group:
    return Group(group_id=name, rollouts=rollouts)


def ids_and_masks(rows: SampleBatch) -> list[tuple[list[int], list[int], list[int]]]:
    return [(r.prompt_ids.tolist(), r.response_ids.tolist(), r.loss_mask.astype(int).tolist()) for r in rows]


# Rollouts to samples


TWO_TURNS = segment(0, ("context", [1, 2]), ("turn", [3, 4]), ("context", [5]), ("turn", [6]), version=4)


def test_a_turn_is_a_sample_whose_prompt_is_everything_before_it() -> None:
    rows = build_samples([group(rollout("a", 2.0, TWO_TURNS), rollout("b", 0.0))], merge=False)
    assert ids_and_masks(rows)[:2] == [([1, 2], [3, 4], [1, 1]), ([1, 2, 3, 4, 5], [6], [1])]
    assert [row.advantages.tolist() for row in rows] == [[1, 1], [1], [-1]]
    assert [row.weight for row in rows] == pytest.approx([2 / 3, 1 / 3, 1])


def test_merged_turns_are_one_sample_with_the_context_between_them_masked() -> None:
    rows = build_samples([group(rollout("a", 2.0, TWO_TURNS), rollout("b", 0.0))])
    assert ids_and_masks(rows)[0] == ([1, 2], [3, 4, 5, 6], [1, 1, 0, 1])
    assert rows[0].advantages.tolist() == [1, 1, 0, 1]
    np.testing.assert_allclose(rows[0].logprobs, [-0.3, -0.4, 0, -0.6])
    assert rows[0].weight == 1.0


def test_a_childs_carried_prefix_is_never_trained() -> None:
    child = segment(1, ("context", [1, 2, 3, 4]), ("turn", [9, 9]))
    rows = build_samples([group(rollout("a", 1.0, TWO_TURNS, child), rollout("b", 0.0))])
    assert ids_and_masks(rows)[1] == ([1, 2, 3, 4], [9, 9], [1, 1])
    assert [row.weight for row in rows] == pytest.approx([3 / 5, 2 / 5, 1])


@pytest.mark.parametrize("merged", [True, False])
def test_every_segment_gets_its_rollouts_advantage_which_counts_once_in_the_baseline(merged: bool) -> None:
    fan = [segment(i, ("context", [1]), ("turn", [2]), ("context", [3]), ("turn", [4])) for i in range(5)]
    rows = build_samples([group(rollout("a", 3.0, *fan), rollout("b", 1.0))], merge=merged)
    trained = {
        name: {float(a) for r in rows if r.rollout_id == name for a in r.advantages[r.loss_mask]} for name in "ab"
    }
    assert trained == {"a": {1.0}, "b": {-1.0}}


def test_a_failed_rollout_is_excluded_from_baseline_and_loss_and_is_counted() -> None:
    rows = build_samples([group(rollout("a", 100.0), rollout("b", None), rollout("c", 50.0))])
    assert [(row.rollout_id, row.advantages.tolist()) for row in rows] == [("a", [25.0]), ("c", [-25.0])]
    assert (rows.rollouts, rows.rollouts_failed, rows.rollouts_trained) == (3, 1, 2)


def test_groups_without_a_signal_are_dropped_and_counted() -> None:
    groups = [
        group(rollout("a", 1.0), rollout("b", 1.0)),
        group(rollout("c", 1.0, group="h"), rollout("d", 0.0, group="h"), name="h"),
        group(rollout("e", None, group="i"), rollout("f", 1.0, group="i"), name="i"),
        group(rollout("k", None, group="j"), name="j"),
    ]
    rows = build_samples(groups)
    assert {row.rollout_id for row in rows} == {"c", "d"}
    assert (rows.groups, rows.groups_without_signal, rows.rollouts, rows.rollouts_failed) == (4, 3, 7, 2)
    assert rows.trained_tokens == 2
    assert rows.metrics()["samples/groups_without_signal"] == 3


def test_a_group_whose_scores_differ_only_by_rounding_is_dropped() -> None:
    groups = [
        group(rollout("a", 0.1 + 0.2 + 0.3), rollout("b", 0.3 + 0.2 + 0.1)),
        group(rollout("c", 1.0, group="h"), rollout("d", 0.0, group="h"), name="h"),
    ]
    rows = build_samples(groups, advantage_estimator="reinforce++")
    assert {row.rollout_id for row in rows} == {"c", "d"}
    assert rows.groups_without_signal == 1
    assert rows[0].advantages == pytest.approx(np.sqrt(0.5), rel=1e-5)


def test_a_batch_counts_trained_tokens_and_rollouts_rather_than_responses_and_rows() -> None:
    two = [segment(i, ("context", [1]), ("turn", [2, 3]), ("context", [4]), ("turn", [5])) for i in range(2)]
    rows = build_samples([group(rollout("a", 1.0, *two), rollout("b", 0.0))])
    assert (len(rows), sum(len(row.response_ids) for row in rows)) == (3, 9)
    assert (rows.rollouts_trained, rows.trained_tokens) == (2, 7)


def test_no_groups_give_no_samples() -> None:
    rows = build_samples([])
    assert len(rows) == 0
    assert set(rows.metrics().values()) == {0.0}


def test_a_rollout_id_that_appears_twice_is_an_error() -> None:
    for other in (group(rollout("a", 1.0, group="h"), name="h"), group(rollout("a", 1.0))):
        with pytest.raises(ValueError, match="rollout 'a' appears 2 times"):
            build_samples([group(rollout("a", 1.0)), other])


def test_a_sample_is_a_view_of_its_segment() -> None:
    rows = build_samples([group(rollout("a", 1.0, TWO_TURNS), rollout("b", 0.0))], merge=False)
    for mine, theirs in [(rows[1].prompt_ids, TWO_TURNS.token_ids), (rows[1].logprobs, TWO_TURNS.logprobs)]:
        assert np.shares_memory(mine, theirs)


def test_a_batch_of_samples_is_a_sequence() -> None:
    rows = build_samples([group(rollout("a", 1.0, TWO_TURNS), rollout("b", 0.0))], merge=False)
    assert [row.step for row in rows] == [0, 1, 0]
    assert [row.step for row in rows[:2]] == [0, 1]


# Merging


parts = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4), min_size=1, max_size=3
)


@given(parts)
@settings(max_examples=50, deadline=None)
def test_a_merged_sample_equals_its_segment_and_turn_samples_are_its_prefixes(
    shape: list[list[tuple[int, int]]],
) -> None:
    count = iter(range(10_000))
    segments = [
        segment(
            i,
            *(
                (kind, [next(count) for _ in range(n)])
                for pair in turns
                for kind, n in zip(("context", "turn"), pair, strict=True)
            ),
        )
        for i, turns in enumerate(shape)
    ]
    groups = [group(rollout("a", 1.0, *segments), rollout("b", 0.0))]
    stepped, merged = build_samples(groups, merge=False), build_samples(groups)
    for sample in (*stepped, *merged):
        if sample.rollout_id == "a":
            whole = segments[sample.segment]
            start, stop = len(sample.prompt_ids), len(sample)
            assert [*sample.prompt_ids, *sample.response_ids] == whole.token_ids[:stop].tolist()
            np.testing.assert_array_equal(sample.loss_mask, whole.sampled[start:stop])
            np.testing.assert_array_equal(sample.logprobs, whole.logprobs[start:stop])
            np.testing.assert_array_equal(sample.advantages, whole.sampled[start:stop] * np.float32(0.5))
    assert [(s.segment, len(s)) for s in merged if s.rollout_id == "a"] == [
        (s.index, s.turns[-1].stop) for s in segments
    ]
    assert {s.step for s in merged} == {0}
    for samples in (stepped, merged):
        trained = [i for s in samples if s.rollout_id == "a" for i in s.response_ids[s.loss_mask].tolist()]
        assert sorted(trained) == [i for s in segments for i in s.token_ids[s.sampled].tolist()]
        assert sum(s.weight for s in samples if s.rollout_id == "a") == pytest.approx(1)


def test_a_sample_batch_cannot_be_changed() -> None:
    rows = build_samples([group(rollout("a", 1.0), rollout("b", 0.0))])
    assert replace(rows, groups=5).groups == 5
    with pytest.raises(AttributeError):
        rows.groups = 5  # type: ignore[misc]


TAUGHT = (("context", [1, 2]), ("turn", [3, 4]), ("context", [5]), ("turn", [6]))


@pytest.mark.parametrize("merge", [True, False])
def test_each_sampled_token_has_the_teachers_advantage_in_exactly_one_sample(merge: bool) -> None:
    played = [group(rollout("a", 0.0, segment(0, *TAUGHT)), rollout("b", 0.0, segment(0, *TAUGHT)))]
    values = np.array([9, 9, 0.5, -1, 9, 2], np.float32)  # values of context tokens are ignored
    batch = teacher_samples(played, {("a", 0): values, ("b", 0): -values}, merge=merge)
    for name, sign in (("a", 1), ("b", -1)):
        rows = [row for row in batch if row.rollout_id == name]
        trained = np.concatenate([row.advantages[row.loss_mask] for row in rows])
        assert trained.tolist() == [sign * 0.5, sign * -1.0, sign * 2.0]
        assert all(not row.advantages[~row.loss_mask].any() for row in rows)
    assert batch.groups_without_signal == 0  # equal rewards are not a reason to drop a group


def test_a_failed_rollout_is_not_taught_and_missing_advantages_are_named() -> None:
    played = [group(rollout("a", 1.0, segment(0, *TAUGHT)), rollout("b", None, segment(0, *TAUGHT)))]
    batch = teacher_samples(played, {("a", 0): np.ones(6, np.float32)})
    assert {row.rollout_id for row in batch} == {"a"}
    assert batch.rollouts_failed == 1
    with pytest.raises(ValueError, match=r"^advantages: rollout 'a' has 6 tokens in segment 0, but no advantages"):
        teacher_samples(played, {})
    with pytest.raises(ValueError, match="but 5 advantages; pass one for each token"):
        teacher_samples(played, {("a", 0): np.ones(5, np.float32)})
