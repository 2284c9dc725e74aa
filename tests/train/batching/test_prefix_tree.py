"""A prefix tree stores each shared prefix once and returns each sample's own tokens."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentgym.samples import build_samples
from agentgym.train.batching.prefix_tree import (
    PrefixTree,
    SortedSamples,
    build_prefix_tree,
    pack,
    sort_samples,
    unique_tokens,
)
from agentgym.types.rollout import Group
from agentgym.types.sample import Sample

Grown = Callable[..., list[Group]]


def sample(prompt: Sequence[int], response: Sequence[int]) -> Sample:
    n = len(response)
    return Sample(
        group_id="g",
        rollout_id="r",
        segment=0,
        step=0,
        prompt_ids=np.array(prompt),
        response_ids=np.array(response),
        loss_mask=np.ones(n, np.bool_),
        logprobs=np.full(n, -1.0, np.float32),
        advantages=np.ones(n, np.float32),
        weight=1.0,
    )


ids = st.lists(st.integers(0, 2), min_size=1, max_size=6)
some_samples = st.lists(st.builds(sample, ids, ids), min_size=1, max_size=9)


def prefixes(samples: Sequence[Sample]) -> set[tuple[int, ...]]:
    """Return the tree by its definition: every prefix of every sample."""
    whole = [(*row.prompt_ids.tolist(), *row.response_ids.tolist()) for row in samples]
    return {ids[: n + 1] for ids in whole for n in range(len(ids))}


def history(tree: PrefixTree, node: int) -> list[int]:
    """Return the ids from a root to the node by following the parents."""
    found = []
    while node >= 0:
        found.append(int(tree.token_ids_T[node]))
        node = int(tree.parent_T[node])
    return found[::-1]


def test_a_small_prefix_tree_by_hand() -> None:
    samples = [sample([10, 10], [1, 2]), sample([10, 10], [1, 3, 4]), sample([20], [5])]
    tree = build_prefix_tree(samples)
    assert tree.token_ids_T.tolist() == [10, 10, 1, 2, 3, 4, 20, 5]
    assert tree.depth_T.tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert tree.parent_T.tolist() == [-1, 0, 1, 2, 2, 4, -1, 6]
    assert tree.end_T.tolist() == [6, 6, 6, 4, 6, 6, 8, 8]
    assert tree.responses.tolist() == [2, 3, 2, 4, 5, 7]


def test_packed_samples_are_side_by_side_with_separate_positions() -> None:
    tree = pack([sample([1], [2, 3]), sample([1], [2])])
    assert tree.token_ids_T.tolist() == [1, 2, 3, 1, 2]
    assert tree.depth_T.tolist() == [0, 1, 2, 0, 1]
    assert tree.parent_T.tolist() == [-1, 0, 1, -1, 3]
    assert tree.end_T.tolist() == [3, 3, 3, 5, 5]
    assert tree.responses.tolist() == [1, 2, 4]


@given(some_samples)
@settings(max_examples=100, deadline=None)
def test_a_tree_has_one_node_for_each_prefix(samples: list[Sample]) -> None:
    assert len(build_prefix_tree(samples)) == unique_tokens(samples) == len(prefixes(samples))


@pytest.mark.parametrize("build", [build_prefix_tree, pack])
@given(samples=some_samples)
@settings(max_examples=100, deadline=None)
def test_every_response_token_has_its_samples_own_history(
    build: Callable[..., PrefixTree], samples: list[Sample]
) -> None:
    tree = build(samples)
    nodes = iter(tree.responses.tolist())
    for row in samples:
        ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        for depth in range(len(row.prompt_ids), len(row)):
            node = next(nodes)
            assert history(tree, node) == ids[: depth + 1]
            assert tree.depth_T[node] == depth


@pytest.mark.parametrize("build", [build_prefix_tree, pack])
@given(samples=some_samples)
@settings(max_examples=100, deadline=None)
def test_a_node_sees_only_its_ancestors_and_itself(build: Callable[..., PrefixTree], samples: list[Sample]) -> None:
    tree = build(samples)
    for query in range(len(tree)):
        seen = [key for key in range(query + 1) if query < tree.end_T[key]]
        assert tree.token_ids_T[seen].tolist() == history(tree, query)


def test_rollouts_turns_and_forks_share_prefixes(grown: Grown) -> None:
    samples = list(build_samples(grown(3), merge=False))
    assert unique_tokens(samples) < 0.6 * sum(map(len, samples))


@given(some_samples, st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_cuts_respect_the_budget_and_lose_no_sample(samples: list[Sample], budget: int) -> None:
    order = sort_samples(samples)
    parts = [order.indices[start:stop] for start, stop in order.cuts(budget)]
    assert sorted(i for part in parts for i in part.tolist()) == list(range(len(samples)))
    for part in parts:
        assert len(part) == 1 or unique_tokens([samples[i] for i in part]) <= budget


def repeated(order: SortedSamples, starts: Sequence[int]) -> tuple[int, int]:
    """Return the number of tokens computed twice by trees that start at these samples, and the number of trees."""
    return int(order.shared[list(starts)].sum()), len(starts)


@given(st.lists(st.builds(sample, ids, ids), min_size=1, max_size=7), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_no_other_cut_of_neighbors_repeats_fewer_tokens(samples: list[Sample], budget: int) -> None:
    order = sort_samples(samples)
    best = None
    for bits in range(1 << (len(samples) - 1)):
        starts = [0, *(i + 1 for i in range(len(samples) - 1) if bits >> i & 1)]
        parts = [order.indices[a:b] for a, b in pairwise([*starts, len(samples)])]
        if all(len(part) == 1 or unique_tokens([samples[i] for i in part]) <= budget for part in parts):
            best = min(best or (10**9, 0), repeated(order, starts))
    assert repeated(order, [start for start, _ in order.cuts(budget)]) == best


def test_a_cut_falls_between_rollouts_rather_than_between_their_turns() -> None:
    prompt = [7] * 4
    first = [sample(prompt, [1] * 4), sample(prompt + [1] * 4, [2] * 4)]
    second = [sample(prompt, [3] * 4), sample(prompt + [3] * 4, [4] * 4)]
    order = sort_samples(first + second)
    assert [order.indices[start:stop].tolist() for start, stop in order.cuts(16)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("build", [build_prefix_tree, pack])
def test_no_samples_are_refused(build: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="samples: nothing"):
        build([])


def test_no_samples_have_no_tokens() -> None:
    assert unique_tokens([]) == 0
    assert sort_samples([]).cuts(4) == []
