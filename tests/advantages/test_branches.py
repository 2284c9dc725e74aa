"""Rollouts with branches as samples: each token is trained once, and each rollout counts once in its baseline."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentgym.advantages.group import has_signal
from agentgym.errors import Failure
from agentgym.samples import build_samples, demonstrations
from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout, RolloutBranch, Segment, SegmentKind, Turn

FAILED = Failure(type="EngineError", message="it is gone")


def segment(
    index: int, kind: SegmentKind, *, shared: int, numbers: Sequence[int], branch: int | None = None
) -> Segment:
    """Return a segment with a prompt id, `shared` inherited turns, and a turn of two ids for each of these numbers."""
    opened = 1 + 3 * shared
    mask = np.array([False] * opened + [True, True, False] * len(numbers))
    turns = tuple(
        Turn(
            start=opened + 3 * i,
            stop=opened + 3 * i + 2,
            finish_reason="stop",
            versions=(Version(0, 0),),
            message={"role": "assistant", "content": ""},
            number=number,
        )
        for i, number in enumerate(numbers)
    )
    return Segment(
        index=index,
        parent=None if kind == "root" else 0,
        kind=kind,
        token_ids=np.arange(len(mask)),
        sampled=mask,
        logprobs=np.where(mask, -1.0, 0.0),
        turns=turns,
        branch=branch,
    )


def played(name: str, reward: float, turns: int, *branches: tuple[int, float | None, int], group: str = "g") -> Rollout:
    """Return a rollout with that many turns.

    A branch is the turn after which it starts, its reward, and its number of turns.
    """
    segments = [segment(0, "root", shared=0, numbers=range(turns))]
    ends = []
    for place, (turn, worth, own) in enumerate(branches):
        segments.append(
            segment(place + 1, "branch", shared=turn, numbers=range(turn, turn + own), branch=place),
        )
        failure = FAILED if worth is None else None
        ends.append(RolloutBranch(turn=turn, reward=worth, stop_reason="done", failure=failure))
    return Rollout(
        rollout_id=name,
        group_id=group,
        segments=tuple(segments),
        reward=reward,
        stop_reason="done",
        branches=tuple(ends),
        metrics={"branches": len(ends)},
    )


def worth(batch: Sequence[object], name: str) -> dict[tuple[int, int], list[float]]:
    return {
        (row.segment, row.step): [round(float(x), 6) for x in row.advantages]  # type: ignore[attr-defined]
        for row in batch
        if row.rollout_id == name  # type: ignore[attr-defined]
    }


def test_each_part_of_a_rollout_and_each_branch_has_its_own_advantage() -> None:
    one = played("a", 1.0, 3, (1, 0.0, 2), (1, 1.0, 1), (2, 0.5, 1))
    group = Group(group_id="g", rollouts=(one, played("b", 0.0, 2)))
    rows = build_samples([group], credit="branches", merge=False)
    found = worth(rows, "a")
    # seen from the states: 1, 0, 1 after turn 0; 0.5, 1 after turn 1
    assert found[0, 0] == pytest.approx([2 / 3 - 0] * 2, abs=1e-6)
    # Turn 1 was sampled for three paths, and turn 2 for four.
    assert found[0, 1] == pytest.approx([(0.75 - 0.5) / 3] * 2, abs=1e-6)
    assert found[0, 2] == pytest.approx([(1 - 0.5) / 4] * 2)
    assert found[1, 0] == pytest.approx([-1 / 3] * 2, abs=1e-6)
    assert found[1, 1] == pytest.approx([-1 / 4] * 2)
    assert found[2, 0] == pytest.approx([0.5 / 3] * 2, abs=1e-6)
    assert found[3, 0] == pytest.approx([-0.5 / 4] * 2)
    assert worth(rows, "b") == {(0, 0): [-1.0, -1.0], (0, 1): [-1.0, -1.0]}


def test_a_branchs_inherited_tokens_are_trained_only_in_the_rollout() -> None:
    one = played("a", 1.0, 3, (2, 0.0, 1))
    rows = build_samples([Group(group_id="g", rollouts=(one,))], credit="branches")
    assert [(row.segment, len(row.prompt_ids), row.loss_mask.tolist()) for row in rows] == [
        (0, 1, [True, True, False] * 2 + [True, True]),
        (1, 7, [True, True]),
    ]
    assert rows.trained_tokens == one.sampled_tokens == 8
    assert sum(row.weight for row in rows) == pytest.approx(1)


RETURNS = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))
BRANCHES = st.lists(st.tuples(st.integers(1, 3), RETURNS, st.integers(1, 3)), max_size=4)
ROLLOUTS = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(3, 5), BRANCHES), min_size=1, max_size=4)


@settings(deadline=None)
@given(ROLLOUTS, st.booleans())
def test_every_sampled_token_of_scored_rollouts_is_trained_once(
    made: list[tuple[float, int, list[tuple[int, float | None, int]]]], merge: bool
) -> None:
    rollouts = tuple(played(f"r{i}", reward, turns, *branches) for i, (reward, turns, branches) in enumerate(made))
    group = Group(group_id="g", rollouts=rollouts)
    batch = build_samples([group], credit="branches", merge=merge)
    # A running group determines its signal like its samples.
    assert bool(len(batch)) == has_signal(rollouts)
    sampled = sum(rollout.sampled_tokens for rollout in rollouts)
    failed = sum(2 * own for _, _, branches in made for _, reward, own in branches if reward is None)
    assert batch.untrained_tokens == failed
    if len(batch):
        assert batch.trained_tokens == sampled - failed
        for rollout in rollouts:
            assert sum(row.weight for row in batch if row.rollout_id == rollout.rollout_id) == pytest.approx(1)
    # Branches are in no other level's samples and don't change them.
    bare = Group(group_id="g", rollouts=tuple(replace(r, branches=(), segments=r.segments[:1]) for r in rollouts))
    for level in ("outcome", "turn"):
        with_branches = build_samples([group], credit=level, merge=merge)
        without = build_samples([bare], credit=level, merge=merge)
        assert [(r.advantages.tolist(), r.weight) for r in with_branches] == [
            (r.advantages.tolist(), r.weight) for r in without
        ]
        assert with_branches.untrained_tokens == sampled - sum(r.sampled_tokens for r in bare.rollouts)


def test_a_token_has_the_same_advantage_merged_or_not() -> None:
    rollouts = (played("a", 1.0, 4, (1, 0.0, 2), (3, 1.0, 1)), played("b", 0.0, 2, (1, 1.0, 1)))
    group = Group(group_id="g", rollouts=rollouts)
    merged = build_samples([group], credit="branches")
    apart = build_samples([group], credit="branches", merge=False)
    for row in merged:
        pieces = [p for p in apart if (p.rollout_id, p.segment) == (row.rollout_id, row.segment)]
        assert np.concatenate([p.advantages for p in pieces]).tolist() == row.advantages[row.loss_mask].tolist()
        assert sum(p.weight for p in pieces) == pytest.approx(row.weight)


def test_a_rollout_counts_once_in_the_baseline_however_many_branches_it_has() -> None:
    many = played("a", 0.0, 2, (1, 0.0, 1), (1, 0.0, 1), (1, 0.0, 1))
    rows = build_samples(
        [Group(group_id="g", rollouts=(many, played("b", 1.0, 1), played("c", 0.5, 1)))], credit="branches"
    )
    assert worth(rows, "b") == {(0, 0): [0.75, 0.75]}


def test_equal_rewards_with_unequal_branches_give_a_signal() -> None:
    tied = (played("a", 1.0, 2, (1, 0.0, 1)), played("b", 1.0, 2))
    assert has_signal(tied)
    group = Group(group_id="g", rollouts=tied)
    assert worth(build_samples([group], credit="branches"), "a") == {
        (0, 0): [-0.5, -0.5, 0.0, 0.5, 0.5],
        (1, 0): [-0.5, -0.5],
    }
    equal = Group(group_id="g", rollouts=(played("a", 0.1, 2, (1, 0.1, 1), (1, 0.1, 1)), played("b", 0.1, 2)))
    batch = build_samples([equal], credit="branches")
    assert not len(batch)
    assert batch.groups_without_signal == 1


def test_untrained_branches_only_improve_the_estimate() -> None:
    one = played("a", 1.0, 2, (1, 0.0, 1))
    one = replace(one, segments=(one.segments[0], replace(one.segments[1], trained=False)))
    group = Group(group_id="g", rollouts=(one, played("b", 1.0, 2)))
    assert worth(build_samples([group], credit="branches"), "a") == {(0, 0): [-0.5, -0.5, 0.0, 1.0, 1.0]}


def test_demonstrations_exclude_branches() -> None:
    rows = demonstrations([played("a", 1.0, 2, (1, 0.0, 3))])
    assert [(row.segment, row.weight) for row in rows] == [(0, 1.0)]


def test_rollouts_run_without_branches_are_refused() -> None:
    asked = played("a", 1.0, 2)
    forgotten = replace(asked, metrics={})
    with pytest.raises(ValueError, match=r"^credit: none of these rollouts was run with branches"):
        build_samples([Group(group_id="g", rollouts=(forgotten,))], credit="branches")
    build_samples([Group(group_id="g", rollouts=(asked, replace(forgotten, rollout_id="b")))], credit="branches")
    assert not build_samples([Group(group_id="g", rollouts=())], credit="branches")


def test_an_estimator_that_divides_by_a_unit_is_refused() -> None:
    group = Group(group_id="g", rollouts=(played("a", 1.0, 2), played("b", 0.0, 2)))
    with pytest.raises(ValueError, match=r"^advantage_estimator: 'grpo' divides by a unit.*use dr_grpo"):
        build_samples([group], advantage_estimator="grpo", credit="branches")
    rows = [build_samples([group], advantage_estimator=name, credit="branches") for name in ("dr_grpo", "rloo")]
    assert worth(rows[0], "a") == worth(rows[1], "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn": 0}, "turn: a branch starts after a turn"),
        ({"reward": None}, "reward: must be None if, and only if"),
        ({"reward": float("nan")}, "reward: nan is not finite"),
        ({"stop_reason": ""}, "stop_reason: empty"),
    ],
)
def test_an_invalid_branch_is_refused(change: dict[str, object], message: str) -> None:
    whole = {"turn": 1, "reward": 1.0, "stop_reason": "done"}
    with pytest.raises(ValueError, match=message):
        RolloutBranch(**whole | change)  # type: ignore[arg-type]


def test_segments_without_a_valid_branch_are_refused() -> None:
    one = played("a", 1.0, 2, (1, 0.0, 1))
    with pytest.raises(ValueError, match="branch: there is no such branch"):
        replace(one, branches=())
    with pytest.raises(ValueError, match="branch: must not be None in a segment that starts a branch"):
        replace(one.segments[1], branch=None)
    role = replace(one.segments[1], role="black")
    with pytest.raises(ValueError, match=r"branches\[0\].role_rewards: no reward for black"):
        replace(one, segments=(one.segments[0], role))


def test_a_transcript_shows_where_a_branch_started_and_how_it_ended() -> None:
    shown = str(played("a", 1.0, 2, (1, 0.0, 1)))
    assert "segment 1: branch of segment 0, from turn 1, reward 0, stopped by done" in shown
