"""Collating samples into one left-padded block that is no wider than needed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from agentgym.samples import build_samples
from agentgym.train.batching.batch import Batch, collate
from agentgym.train.batching.layouts import Layout, PaddedInputs
from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from agentgym.types.sample import Sample


def row(prompt: list[int] | int, response: list[int] | int, **fields: Any) -> Sample:
    """Return a sample with these ids, or with that many."""
    prompt = [1] * prompt if isinstance(prompt, int) else prompt
    response = [2] * response if isinstance(response, int) else response
    defaults: dict[str, Any] = {
        "prompt_ids": prompt,
        "response_ids": response,
        "group_id": "g",
        "rollout_id": "r",
        "segment": 0,
        "step": 0,
        "loss_mask": [True] * len(response),
        "logprobs": [-1.0] * len(response),
        "advantages": [1.0] * len(response),
        "weight": 1.0,
    }
    return Sample(**(defaults | fields))


def block(batch: Batch) -> PaddedInputs:
    assert isinstance(batch.inputs, PaddedInputs)
    return batch.inputs


def width(*shapes: tuple[int, int]) -> int:
    return block(collate([row(p, r) for p, r in shapes], pad_id=0)).input_ids_BT.shape[1]


def test_rows_form_one_left_padded_block() -> None:
    batch = collate([row([1, 2], [10, 11, 12]), row([3, 4, 5, 6], [20, 21])], pad_id=0)
    assert block(batch).input_ids_BT.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 6, 20, 21]]
    assert block(batch).attention_BT.int().tolist() == [[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert block(batch).positions_BT.tolist() == [[0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


def test_mask_and_positions_of_a_block_are_derived_from_its_rows_starts() -> None:
    inputs = block(collate([row(2, 1), row(4, 2), row(1, 5)], pad_id=0))
    assert inputs.start_B.tolist() == [3, 0, 0]
    arguments = inputs.arguments()
    assert arguments["attention_mask"].dtype == torch.bool
    assert torch.equal(arguments["attention_mask"], inputs.attention_BT)
    assert arguments["position_ids"].dtype == torch.int64
    assert arguments["position_ids"].tolist() == [[0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]


def test_ids_are_int32_in_the_block_and_int64_for_the_model() -> None:
    inputs = block(collate([row([1, 2**31 - 1], [3])], pad_id=0))
    assert inputs.input_ids_BT.dtype == torch.int32
    assert inputs.arguments()["input_ids"].dtype == torch.int64
    assert inputs.arguments()["input_ids"].tolist() == [[1, 2**31 - 1, 3]]


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
@pytest.mark.parametrize("bad", [2**31, 2**32 + 5, -1, -(2**31) - 1])
def test_an_invalid_id_is_refused_by_its_sample_and_field(bad: int, layout: Layout) -> None:
    sound = row([1], [2])
    with pytest.raises(ValueError, match=f"^samples: rollout 'r', .*: prompt_ids: id {bad} at position 1"):
        collate([sound, row([1, bad], [2])], pad_id=0, layout=layout)
    with pytest.raises(ValueError, match=f"^samples: rollout 'r', .*: response_ids: id {bad} at position 0"):
        collate([sound, row([1], [bad])], pad_id=0, layout=layout)


def test_response_tensors_are_right_aligned() -> None:
    batch = collate([row([1, 1, 1], [9]), row([1], [7, 8, 9], weight=0.5)], pad_id=0)
    assert batch.loss_mask_BR.int().tolist() == [[0, 0, 1], [1, 1, 1]]
    assert batch.advantages_BR.tolist() == [[0, 0, 1], [1, 1, 1]]
    assert batch.logprobs_BR.tolist() == [[0, 0, -1], [-1, -1, -1]]
    assert batch.weight_B.tolist() == [1.0, 0.5]


def test_a_loss_mask_stays_right_aligned() -> None:
    batch = collate([row(1, 3, loss_mask=[True, True, False]), row(1, 5)], pad_id=0)
    assert batch.loss_mask_BR[0].int().tolist() == [0, 0, 1, 1, 0]


def test_width_is_the_longest_sum_and_not_the_sum_of_the_longest() -> None:
    assert width((5, 18), (23, 5)) == 28
    assert width((10, 90), (90, 10)) == 100


def test_each_row_gets_its_advantage_under_its_own_mask() -> None:
    masks = [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    worth = [1, 1, -1, -1]
    rows = [row(1, 6, loss_mask=m, advantages=[float(w)] * 6) for m, w in zip(masks, worth, strict=True)]
    expected = np.array(masks) * np.array(worth)[:, None]
    np.testing.assert_array_equal(collate(rows, pad_id=0).advantages_BR, expected)


def steps(name: str, reward: float, sampled: list[int]) -> Rollout:
    """Return a rollout whose turns sample that many tokens, each turn after one context token."""
    stops = np.cumsum([n + 1 for n in sampled]).tolist()
    mask = np.ones(stops[-1], np.bool_)
    mask[[stop - n - 1 for stop, n in zip(stops, sampled, strict=True)]] = False
    turns = tuple(
        Turn(
            start=stop - n,
            stop=stop,
            finish_reason="stop",
            versions=(Version(0, 0),),
            message={"role": "assistant", "content": ""},
        )
        for stop, n in zip(stops, sampled, strict=True)
    )
    segment = Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=np.arange(stops[-1]),
        sampled=mask,
        logprobs=np.where(mask, -1, 0),
        turns=turns,
    )
    return Rollout(rollout_id=name, group_id="g", segments=(segment,), reward=reward, stop_reason="done")


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_every_step_of_a_rollout_has_its_own_mask_and_advantage(layout: Layout) -> None:
    group = Group(group_id="g", rollouts=(steps("A", 2.0, [4, 1]), steps("B", 0.0, [3, 2])))
    batch = collate(list(build_samples([group], merge=False)), pad_id=0, layout=layout)
    assert batch.advantages_BR.tolist() == [[1, 1, 1, 1], [0, 0, 0, 1], [0, -1, -1, -1], [0, 0, -1, -1]]


def test_a_masked_batch_has_its_tokens_but_trains_none() -> None:
    batch = collate([row([1, 2], [3])], pad_id=0, masked=True)
    assert block(batch).input_ids_BT.tolist() == [[1, 2, 3]]
    assert not batch.loss_mask_BR.any()
    assert not batch.advantages_BR.any()


def test_inputs_are_neither_changed_nor_shared() -> None:
    sample = row([1, 2], [3, 4])
    batch = collate([sample], pad_id=0)
    block(batch).input_ids_BT.zero_()
    batch.logprobs_BR.zero_()
    assert sample.prompt_ids.tolist() == [1, 2]
    assert sample.logprobs.tolist() == [-1, -1]


def test_an_empty_list_of_samples_cannot_be_collated() -> None:
    with pytest.raises(ValueError, match="nothing to collate"):
        collate([], pad_id=0)


@pytest.mark.parametrize("field", ["loss_mask", "logprobs", "advantages"])
def test_a_mismatched_list_never_becomes_a_sample(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        row(2, 3, **{field: [1, 1]})


def test_moving_a_batch_keeps_it() -> None:
    batch = collate([row([1, 2], [3, 4])], pad_id=0)
    assert torch.equal(block(batch.to("cpu")).input_ids_BT, block(batch).input_ids_BT)
    assert len(batch) == 1


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Draw any segment: turns of at least one token, any context around them, and context at the front."""
    ids, spans = draw(st.lists(st.integers(1, 500), min_size=1, max_size=5)), []
    for _ in range(draw(st.integers(1, 4))):
        ids += draw(st.lists(st.integers(1, 500), max_size=3))
        turn = draw(st.lists(st.integers(1, 500), min_size=1, max_size=5))
        spans.append((len(ids), len(ids) + len(turn)))
        ids += turn
    ids += draw(st.lists(st.integers(1, 500), max_size=3))
    mask = np.zeros(len(ids), np.bool_)
    for start, stop in spans:
        mask[start:stop] = True
    return Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=np.array(ids),
        sampled=mask,
        logprobs=np.where(mask, -np.arange(len(ids)) / 7, 0),
        turns=tuple(
            Turn(
                start=a,
                stop=b,
                finish_reason="stop",
                versions=(Version(0, 0),),
                message={"role": "assistant", "content": ""},
            )
            for a, b in spans
        ),
    )


def back(batch: Batch, i: int) -> tuple[list[int], list[int], list[float]]:
    """Return row i's ids, its trained ids and their log-probabilities, read back from the tensors."""
    ids = block(batch).input_ids_BT[i][block(batch).attention_BT[i]].tolist()
    response = batch.loss_mask_BR.shape[1]
    trained = block(batch).input_ids_BT[i, -response:][batch.loss_mask_BR[i]].tolist()
    return ids, trained, batch.logprobs_BR[i][batch.loss_mask_BR[i]].tolist()


@given(st.lists(segments(), min_size=2, max_size=4), st.booleans())
@settings(max_examples=50, deadline=None)
def test_ids_are_the_same_from_segment_to_batch_and_back(drawn: list[Segment], merged: bool) -> None:
    rollouts = [
        Rollout(rollout_id=str(i), group_id="g", segments=(s,), reward=float(i), stop_reason="done")
        for i, s in enumerate(drawn)
    ]
    rows = build_samples([Group(group_id="g", rollouts=tuple(rollouts))], merge=merged)
    batch = collate(rows, pad_id=0)
    found: dict[str, tuple[list[int], list[float]]] = {}
    for i, sample in enumerate(rows):
        ids, trained, logprobs = back(batch, i)
        segment = drawn[int(sample.rollout_id)]
        assert ids == segment.token_ids[: len(ids)].tolist()
        before = found.get(sample.rollout_id, ([], []))
        found[sample.rollout_id] = (before[0] + trained, before[1] + logprobs)
    for i, segment in enumerate(drawn):
        assert found[str(i)][0] == segment.token_ids[segment.sampled].tolist()
        assert found[str(i)][1] == segment.logprobs[segment.sampled].tolist()


def test_random_groups_are_no_wider_than_their_longest_sample(groups_of: Callable[..., list[Group]]) -> None:
    rows = build_samples(groups_of(5), merge=False)
    batch = collate(rows, pad_id=0)
    assert block(batch).input_ids_BT.shape[1] == max(map(len, rows))
    assert bool(block(batch).attention_BT[:, -1].all())
