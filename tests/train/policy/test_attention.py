"""A token sees only its own past, in every implementation of attention."""

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch import Tensor

from agentgym.samples import build_samples
from agentgym.train.batching.layouts import PackedInputs, lay_out
from agentgym.train.policy import attention
from agentgym.train.policy.attention import BLOCK, block_mask
from agentgym.train.policy.opening import attend_in_rows
from agentgym.train.policy.row import MaskFunction, Row, RowMask, runs
from agentgym.types.arrays import Ints
from agentgym.types.rollout import Group

CPU = torch.device("cpu")


@st.composite
def ends(draw: st.DrawFn, most: int = 100) -> Ints:
    """Draw the `end_T` of any forest: branches of any length, nested to any depth."""
    end: list[int] = []

    def grow(depth: int) -> None:
        start = len(end)
        end.extend([0] * draw(st.integers(1, most)))
        stop = len(end)
        for _ in range(draw(st.integers(0, 2)) if depth < 2 else 0):
            grow(depth + 1)
        end[start:stop] = [len(end)] * (stop - start)

    for _ in range(draw(st.integers(1, 3))):
        grow(0)
    return np.array(end)


def dense(end: Ints) -> Tensor:
    """Return which key (column) a query (row) sees, by the definition."""
    place = torch.arange(len(end))
    return (place <= place[:, None]) & (place[:, None] < torch.from_numpy(end))


def by_runs(end: Ints) -> Tensor:
    """Return the same, reconstructed from the runs."""
    row, seen = runs(end), torch.zeros(len(end), len(end), dtype=torch.bool)
    keys = torch.arange(len(end)) if row.keys is None else row.keys
    first = 0
    for count, some in zip(row.queries, torch.split(keys, row.sizes), strict=True):
        for i in range(count):
            seen[first + i, some[: len(some) - count + i + 1]] = True
        first += count
    return seen


@given(ends(20))
@settings(max_examples=50, deadline=None)
def test_runs_hold_exactly_the_visible_pairs(end: Ints) -> None:
    assert torch.equal(by_runs(end), dense(end))


def test_samples_side_by_side_need_no_gather() -> None:
    row = runs(np.array([3, 3, 3, 5, 5]))
    assert (row.queries, row.keys, row.sizes) == ([3, 2], None, [3, 2])


@given(ends())
@example(np.array([BLOCK] * BLOCK + [BLOCK + 2] * 2))
@example(np.array([BLOCK + 1] * (BLOCK + 1) + [BLOCK + 3] * 2))
@example(np.array([2 * BLOCK] * 2 * BLOCK))
@settings(max_examples=15, deadline=None)
def test_the_block_mask_is_the_dense_mask(end: Ints) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    mask = block_mask(end, CPU)
    length = len(end)
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0], dense(end))
    expected = create_block_mask(mask.mask_mod, 1, 1, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    assert mask.shape == expected.shape
    for mine, theirs in (
        ((mask.kv_num_blocks, mask.kv_indices), (expected.kv_num_blocks, expected.kv_indices)),
        ((mask.full_kv_num_blocks, mask.full_kv_indices), (expected.full_kv_num_blocks, expected.full_kv_indices)),
        ((mask.q_num_blocks, mask.q_indices), (expected.q_num_blocks, expected.q_indices)),
        ((mask.full_q_num_blocks, mask.full_q_indices), (expected.full_q_num_blocks, expected.full_q_indices)),
    ):
        assert listed(*mine) == listed(*theirs)


@given(ends(11))
@settings(max_examples=100, deadline=None)
def test_full_blocks_are_fully_visible_and_all_visible_pairs_are_in_blocks(end: Ints) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", 4)  # small blocks have every kind of border
        mask = block_mask(end, CPU)
    count = -(-len(end) // 4)
    padded = torch.zeros(count * 4, count * 4, dtype=torch.bool)
    padded[: len(end), : len(end)] = dense(end)
    tiles = padded.reshape(count, 4, count, 4).transpose(1, 2).flatten(2)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    some = listed(mask.kv_num_blocks, mask.kv_indices)
    for query in range(count):
        assert not full[query] & some[query]
        assert all(tiles[query, key].all() for key in full[query])
        assert {key for key in range(count) if tiles[query, key].any()} <= full[query] | some[query]


def listed(count: Tensor | None, indices: Tensor | None) -> list[set[int]]:
    """Return the blocks of each row of blocks; indices after the first `count` are meaningless."""
    assert count is not None
    assert indices is not None
    return [set(row[:n].tolist()) for n, row in zip(count[0, 0].tolist(), indices[0, 0], strict=True)]


def test_a_row_knows_the_depth_of_each_token() -> None:
    assert Row(np.array([6, 6, 6, 4, 6, 6, 7]), CPU).depth_T.tolist() == [0, 1, 2, 3, 3, 4, 0]


@given(ends(20))
@settings(max_examples=50, deadline=None)
def test_the_sequences_of_a_row_hold_every_token_after_those_it_follows(end: Ints) -> None:
    row = Row(end, CPU)
    tokens = row.sequences.spread(torch.arange(len(end))[None])
    assert torch.equal(row.sequences.collect(tokens), torch.arange(len(end))[None])
    seen = dense(end)
    for token, place in enumerate(row.sequences.place_N.tolist()):
        sequence, depth = divmod(place, tokens.shape[1])
        assert sorted(tokens[sequence, : depth + 1].tolist()) == seen[token].nonzero()[:, 0].tolist()


def by_window(width: int) -> MaskFunction:
    """Return a layer's sliding-window mask as transformers creates it."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    mask: MaskFunction = sliding_window_causal_mask_function(width)
    return mask


def by_chunk(width: int) -> MaskFunction:
    """Return a layer's chunked mask as transformers creates it."""
    from transformers.masking_utils import chunked_causal_mask_function

    mask: MaskFunction = chunked_causal_mask_function(width, torch.zeros(1, dtype=torch.int64))
    return mask


def shown(end: Ints, mask: MaskFunction) -> Tensor:
    """Return which key (column) a query (row) sees under a layer's mask, by the definition, at a row's depths."""
    depth = torch.from_numpy(Row(end, CPU).depth_T)
    zero = torch.zeros((), dtype=torch.int64)
    return dense(end) & mask(zero, zero, depth[:, None], depth[None])


@given(ends(20), st.integers(1, 9), st.sampled_from([by_window, by_chunk]))
@settings(max_examples=60, deadline=None)
def test_a_layers_own_mask_is_applied_at_the_depths_of_a_tree(
    end: Ints, width: int, kind: Callable[[int], MaskFunction]
) -> None:
    row, mask = Row(end, CPU), kind(width)
    starts = row.starts(mask)
    first = np.zeros(len(end)) if starts is None else starts[row.depth_T]
    near = torch.from_numpy(row.depth_T[None] >= first[:, None])
    assert torch.equal(dense(end) & near, shown(end, mask))


def test_a_mask_that_is_not_an_unbroken_range_of_last_tokens_is_refused() -> None:
    row = Row(np.full(6, 6), CPU)
    for mask in (
        lambda _b, _h, query, key: key <= query + 1,
        lambda _b, _h, query, key: (key <= query) & (key % 2 == query % 2),
    ):
        with pytest.raises(ValueError, match="an unbroken range of tokens right before it, and to no others"):
            row.starts(mask)


@given(ends(11), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_a_block_mask_of_a_window_holds_exactly_the_visible_pairs(end: Ints, width: int) -> None:
    from torch.nn.attention.flex_attention import create_mask

    row = Row(end, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK", 4)
        mask = block_mask(end, CPU, row.depth_T, row.starts(by_window(width)))
    expected = shown(end, by_window(width))
    assert torch.equal(create_mask(mask.mask_mod, 1, 1, len(end), len(end), device="cpu")[0, 0], expected)
    count = -(-len(end) // 4)
    padded = torch.zeros(count * 4, count * 4, dtype=torch.bool)
    padded[: len(end), : len(end)] = expected
    tiles = padded.reshape(count, 4, count, 4).transpose(1, 2).flatten(2)
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    some = listed(mask.kv_num_blocks, mask.kv_indices)
    for query in range(count):
        assert all(tiles[query, key].all() for key in full[query])
        assert {key for key in range(count) if tiles[query, key].any()} <= full[query] | some[query]


def plainly(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, change: dict[str, Any]) -> Tensor:
    """Compute attention by its formula."""
    score = query @ key.transpose(2, 3) * 0.3
    if "softcap" in change:
        score = change["softcap"] * torch.tanh(score / change["softcap"])
    weight = score.masked_fill(~seen, -torch.inf).exp()
    total = weight.sum(-1, keepdim=True)
    if "s_aux" in change:
        total = total + change["s_aux"].reshape(1, -1, 1, 1).exp()
    return (weight / total) @ value


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("extra", ["nothing", "softcap", "s_aux"])
@given(end=ends(40), width=st.integers(1, 50))
@settings(max_examples=12, deadline=None)
def test_attention_and_its_gradient_equal_those_of_the_dense_mask(
    heads: int, extra: str, end: Ints, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(n: int) -> Tensor:
        return torch.randn(1, n, len(end), 8, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value, weight = drawn(heads), drawn(2), drawn(2), drawn(heads).detach()
    share = heads // 2
    keys, values = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    changes: dict[str, dict[str, Any]] = {
        "nothing": {},
        "softcap": {"softcap": 1.5},
        "s_aux": {"s_aux": torch.linspace(-1, 2, heads, dtype=torch.float64)},
    }
    change, row = changes[extra], Row(end, CPU)
    expected = plainly(query, keys, values, shown(end, by_window(width)), change)
    mask = RowMask(row, by_window(width))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERIES", 7)
        got = attention._attend(torch.nn.Identity(), query, key, value, mask, 0.3, **change)[0]
    # The weights are float32 with a softcap or with sinks.
    torch.testing.assert_close(got.transpose(1, 2), expected, atol=1e-6, rtol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad((got.transpose(1, 2) * weight).sum(), (query, key, value)),
        torch.autograd.grad((expected * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


# Models


def tiny(kind: str, **fields: Any) -> Any:
    """Return a random model of this kind."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4 if kind == "gpt2" else 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | fields)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return model


@torch.no_grad()
def states(model: Any, row: Any) -> Tensor:
    """Return the hidden states that predict trained tokens, sample by sample."""
    hidden = model.get_decoder()(**row.arguments(), use_cache=False).last_hidden_state
    picked: Tensor = hidden.flatten(0, 1)[row.source_N][row.index_M]
    return picked


def rows_of(groups: list[Group], layout: Any) -> Any:
    return lay_out(build_samples(groups, merge=False), layout=layout, pad_id=0)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "mixtral"])
def test_packed_rows_give_the_hidden_states_of_padded_rows(kind: str, grown: Callable[..., list[Group]]) -> None:
    model = tiny(kind, **({"sliding_window": None} if kind == "mixtral" else {}))
    expected = states(model, rows_of(grown(1), "padded"))
    attend_in_rows(model)
    for layout in ("packed", "tree"):
        torch.testing.assert_close(states(model, rows_of(grown(1), layout)), expected, atol=1e-5, rtol=1e-5)


def test_a_model_that_bypasses_the_attention_interface_is_refused_and_unchanged() -> None:
    model = tiny("bloom", n_head=4, n_layer=2)
    ids = torch.arange(2, 9)[None]
    before = model(input_ids=ids).logits
    with pytest.raises(ValueError, match=r"^layout: bloom gives wrong results in layout packed .*use layout padded"):
        attend_in_rows(model)
    assert torch.equal(model(input_ids=ids).logits, before)


def test_a_layer_without_information_about_visible_tokens_is_refused() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="does not tell its layers which tokens to attend to; use layout padded"):
        attention._attend(torch.nn.Identity(), x, x, x, None)


@pytest.mark.parametrize("extra", [{"dropout": 0.1}, {"position_bias": torch.zeros(1)}])
def test_attention_with_additional_score_terms_is_refused(extra: dict[str, Any]) -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=f"the model's attention has {next(iter(extra))}"):
        attention._attend(torch.nn.Identity(), x, x, x, RowMask(Row(np.array([2, 2]), CPU)), **extra)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="FlexAttention on a CPU is compiled by g++")
def test_flex_attention_gives_the_hidden_states_of_the_cpu_path(
    grown: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("qwen3", head_dim=16, max_position_embeddings=512)
    attend_in_rows(model)
    row = rows_of(grown(2, groups=6, size=6), "tree")
    assert isinstance(row, PackedInputs)
    assert row.tokens > 2 * BLOCK
    with torch.no_grad():
        plain = model.get_decoder()(**row.arguments(), use_cache=False).last_hidden_state
        monkeypatch.setattr(attention, "RUNS", False)
        flex = model.get_decoder()(**row.arguments(), use_cache=False).last_hidden_state
    torch.testing.assert_close(flex, plain, atol=1e-4, rtol=1e-4)
