"""A token sees its own past and no other's, by every way of computing it."""

import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentgym.samples import build_samples
from agentgym.train.batching.layouts import PackedInputs, lay_out
from agentgym.train.policy import attention
from agentgym.train.policy.attention import BLOCK, NAME, attend_in_rows, block_mask, row_attention, runs
from agentgym.types import Group, Ints

CPU = torch.device("cpu")


@st.composite
def ends(draw: st.DrawFn, most: int = 100) -> Ints:
    """The `end_T` of any forest: branches of any length, nested to any depth."""
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
    """Which key (across) a query (down) sees, by the definition."""
    place = torch.arange(len(end))
    return (place <= place[:, None]) & (place[:, None] < torch.from_numpy(end))


def by_runs(end: Ints) -> Tensor:
    """The same, out of the runs."""
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
def test_runs_hold_each_pair_that_is_seen_and_no_other(end: Ints) -> None:
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
def test_a_full_block_is_seen_whole_and_no_seen_pair_is_outside_of_the_blocks(end: Ints) -> None:
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
    """The blocks of each row of blocks; what stands behind the first `count` means nothing."""
    assert count is not None
    assert indices is not None
    return [set(row[:n].tolist()) for n, row in zip(count[0, 0].tolist(), indices[0, 0], strict=True)]


@pytest.mark.parametrize("heads", [2, 4])
@given(end=ends(40))
@settings(max_examples=20, deadline=None)
def test_attention_and_its_gradient_are_those_of_the_dense_mask(heads: int, end: Ints) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(n: int) -> Tensor:
        return torch.randn(1, n, len(end), 8, generator=generator, dtype=torch.float64).requires_grad_()

    query, key, value, weight = drawn(heads), drawn(2), drawn(2), drawn(heads).detach()
    share = heads // 2
    keys, values = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    expected = scaled_dot_product_attention(query, keys, values, attn_mask=dense(end)[None, None], scale=0.3)
    arguments: dict[str, Any] = {**row_attention(end, CPU)}
    got = attention._attend(torch.nn.Identity(), query, key, value, None, 0.3, **arguments)[0]
    torch.testing.assert_close(got.transpose(1, 2), expected)
    for mine, theirs in zip(
        torch.autograd.grad((got.transpose(1, 2) * weight).sum(), (query, key, value)),
        torch.autograd.grad((expected * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_queries_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (torch.randn(1, 1, n, 4) for n in (9, 14, 14))
    whole = torch.cat(list(attention._causal(query, key, value, None)), 2)
    monkeypatch.setattr(attention, "QUERIES", 2)
    parts = attention._causal(query, key, value, None)
    assert len(parts) == 5
    torch.testing.assert_close(torch.cat(list(parts), 2), whole)


# Models


def tiny(kind: str, **fields: Any) -> Any:
    """A random model of this kind."""
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
    """The hidden states that predict trained tokens, sample by sample."""
    hidden = model.get_decoder()(**row.arguments(), use_cache=False).last_hidden_state
    picked: Tensor = hidden.flatten(0, 1)[row.trained.source_N][row.trained.index_M]
    return picked


def rows_of(groups: list[Group], layout: Any) -> Any:
    return lay_out(build_samples(groups, merge=False), layout=layout, pad_id=0)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "mixtral"])
def test_rotary_and_learned_positions_and_experts_give_the_states_of_padded_rows(
    kind: str, grown: Callable[..., list[Group]]
) -> None:
    model = tiny(kind, **({"sliding_window": None} if kind == "mixtral" else {}))
    expected = states(model, rows_of(grown(1), "padded"))
    attend_in_rows(model)
    for layout in ("packed", "tree"):
        torch.testing.assert_close(states(model, rows_of(grown(1), layout)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "sliding_attention layers",
        ),
        ("starcoder2", {"sliding_window": 8}, "sliding_attention layers"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers"),
        ("mamba", {}, "layers"),
        ("bloom", {}, "attention layers of its own"),
    ],
)
def test_layers_that_are_not_plain_causal_attention_are_refused_by_name(
    kind: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=rf"^layout: {kind} has .*{named}.*use layout padded"):
        attend_in_rows(tiny(kind, **fields))


def test_a_model_that_does_not_hand_on_what_a_token_sees_is_refused() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="not handed which tokens to attend to; use layout padded"):
        attention._attend(torch.nn.Identity(), x, x, x, None)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"dropout": 0.1}, {"s_aux": torch.zeros(1)}])
def test_scores_with_something_added_are_refused(extra: dict[str, Any]) -> None:
    x = torch.zeros(1, 1, 2, 4)
    arguments: dict[str, Any] = row_attention(np.array([2, 2]), CPU) | extra
    with pytest.raises(ValueError, match=f"the model's attention has {next(iter(extra))}"):
        attention._attend(torch.nn.Identity(), x, x, x, None, **arguments)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(shutil.which("g++") is None, reason="FlexAttention on a CPU is compiled by g++")
def test_flex_attention_gives_the_states_of_the_cpu_path(grown: Callable[..., list[Group]]) -> None:
    model = tiny("qwen3", head_dim=16, max_position_embeddings=512)
    attend_in_rows(model)
    row = rows_of(grown(2, groups=6, size=6), "tree")
    assert isinstance(row, PackedInputs)
    assert row.tokens > 2 * BLOCK
    with torch.no_grad():
        arguments = row.arguments() | {NAME: block_mask(row.end_T, CPU)}
        flex = model.get_decoder()(**arguments, use_cache=False).last_hidden_state
        plain = model.get_decoder()(**row.arguments(), use_cache=False).last_hidden_state
    torch.testing.assert_close(flex, plain, atol=1e-4, rtol=1e-4)
