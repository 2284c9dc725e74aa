"""A prefix that rows share is read once for all of them, without changing their results."""

from typing import Any

import numpy as np
import pytest
import torch

from agentgym.engines.transformers import shared_prefix
from agentgym.engines.transformers.kv_slots import Slots
from agentgym.engines.transformers.model import InferenceModel
from agentgym.engines.transformers.shared_prefix import groups
from tests.engines.transformers.test_fast_decoder import CONTEXT, MODELS, build

SAME = np.zeros(6, np.int64)
"""All rows are computed under the same weights."""


@pytest.fixture(autouse=True)
def worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make saving even a single column worthwhile."""
    monkeypatch.setattr(shared_prefix, "_WORTH", 1)


def prompts(*texts: str) -> np.ndarray:
    """Return a row of ids for each text, one letter per id."""
    return np.array([[ord(letter) - ord("a") for letter in text] for text in texts])


def test_rows_are_grouped_so_that_most_columns_are_saved() -> None:
    found = groups(prompts("aaaaaab", "ccccccd", "aaaaaae", "aaaaaaf", "ccccccg", "ahhhhhh"), SAME)
    assert found is not None
    # Six ids in each of three groups save 3 x 6 columns; one id shared by four rows saves 4.
    assert found.length == 6
    together = {frozenset(members) for members in found.members.tolist()}
    assert together == {frozenset({0, 2, 3}), frozenset({1, 4}), frozenset({5})}
    assert found.members.ravel()[found.places].tolist() == list(range(6))
    assert all(leader in members for leader, members in zip(found.leaders, found.members, strict=True))


def test_a_prefix_that_all_rows_share_is_one_group() -> None:
    found = groups(prompts("aaaab", "aaaac", "aaaad", "aaaae", "aaaaf", "aaaag"), SAME)
    assert found is not None
    assert found.length == 4
    assert found.members.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_short_prefix_shared_by_all_is_preferred_to_a_longer_one_shared_by_two() -> None:
    found = groups(prompts("aabbbc", "aabbbd", "aacccc", "aadddd", "aaeeee", "aaffff"), SAME)
    assert found is not None
    # Two ids of all six rows save 5 x 2 columns; five ids of two rows save 5.
    assert found.length == 2
    assert found.members.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_two_rows_share_a_prefix_that_just_pays_off() -> None:
    found = groups(prompts("a", "a"), SAME[:2])
    assert found is not None
    assert (found.length, found.members.tolist()) == (1, [[0, 1]])


def test_rows_that_share_nothing_form_no_groups() -> None:
    assert groups(prompts("ab", "bb", "cb", "db", "eb", "fb"), SAME) is None


def test_a_single_row_forms_no_group() -> None:
    assert groups(prompts("aaaa"), SAME[:1]) is None


def test_rows_under_different_weights_share_nothing() -> None:
    found = groups(prompts(*["aaaa"] * 6), np.array([1, 2, 1, 2, 1, 2]))
    assert found is not None
    assert {frozenset(members) for members in found.members.tolist()} == {frozenset({0, 2, 4}), frozenset({1, 3, 5})}
    assert groups(prompts(*["aaaa"] * 6), np.arange(6)) is None


def test_sampled_ids_are_never_shared() -> None:
    slots = Slots(3, 16)
    rows = np.arange(3)
    for row in rows:
        slots.begin(int(row), prompts("aaaaa")[0])
    slots.filled[rows] = 4
    found = slots.groups(rows)
    assert found is not None
    assert found.length == 4
    slots.append(rows, np.array([7, 7, 7]), np.zeros(3, np.float32))
    assert slots.groups(rows) is found
    slots.begin(1, prompts("abaaa")[0])
    changed = slots.groups(rows)
    assert changed is not None
    assert sorted(map(set, changed.members.tolist()), key=min) == [{0, 2}, {1}]


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5, 7], [0, 4, 8, 12, 16, 20]], ids=str)
@pytest.mark.parametrize(("kind", "changes"), MODELS)
def test_hidden_states_equal_those_of_rows_read_alone(kind: str, changes: dict[str, Any], rows: list[int]) -> None:
    """Adjacent rows, rows with idle ones in between, and rows far apart."""
    policy = InferenceModel(build(kind, **changes), slots=21, context=CONTEXT, threads=1)
    at, texts = np.array(rows), prompts("aaaaaab", "ccccccd", "aaaaaae", "aaaaaaf", "aaaaaag", "ahhhhhh")
    policy.forward(at, texts, SAME, SAME + 7)
    lengths = np.array([3, 1, 2, 1, 1, 2])  # then they continue with different numbers of ids
    for column in range(3):
        some = lengths > column
        policy.forward(at[some], texts[some, :1] + column, SAME[some] + 7 + column, SAME[some] + 1)
    ids, one = texts[:, :1] + 9, SAME + 1
    found = groups(texts[:, :6], SAME)
    assert found is not None
    assert found.members.shape == (3, 4)
    alone = policy.forward(at, ids, 7 + lengths, one)
    torch.testing.assert_close(policy.forward(at, ids, 7 + lengths, one, found), alone, atol=1e-5, rtol=1e-4)
