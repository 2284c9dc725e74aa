"""Log-probabilities computed in tiles equal those of the whole softmax, which is never stored."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from agentgym.causal_lm.logit_map import LogitMap
from agentgym.samples import build_samples
from agentgym.train.batching.batch import collate
from agentgym.train.loss import linear_head, logprobs as module, tiles
from agentgym.train.loss.logprobs import token_logprobs
from agentgym.train.policy.fsdp import shard
from agentgym.train.policy.model import PolicyModel, load_policy
from agentgym.types.rollout import Group

N, H, V = 520, 24, 2100
"""More tokens and a larger vocabulary than one tile holds."""


def dense(states: Tensor, head: Callable[[Tensor], Tensor], targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
    """Compute the definition with all N x V logits."""
    log_p = torch.log_softmax(head(states) / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1).detach()


def case(*, bias: bool = False, deviation: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Return hidden states, output layer, targets and the upstream gradient of each log-probability."""
    torch.manual_seed(0)
    head = nn.Linear(H, V, bias=bias, dtype=dtype)
    nn.init.normal_(head.weight, std=deviation)
    states = torch.randn(N, H).to(dtype).requires_grad_()
    return states, head, torch.randint(0, V, (N,)), torch.randn(N)


def gradients(score: Callable[..., Any], states: Tensor, head: nn.Linear, *rest: Any) -> tuple[Tensor, ...]:
    targets, upstream, temperature = rest
    wanted = [states, *(weight for weight in head.parameters() if weight.requires_grad)]
    logprobs = score(states, head, targets, temperature)[0]
    return torch.autograd.grad(logprobs, wanted, upstream.to(logprobs.dtype))


def tiled(states: Tensor, head: Any, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    return token_logprobs(states, head, targets, temperature=temperature)


def called(states: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the same with an opaque output layer."""
    return token_logprobs(states, nn.Sequential(head), targets, temperature=temperature)


def relative(got: Tensor, true: Tensor) -> float:
    return float((got.double() - true.double()).detach().abs().max() / true.double().detach().abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("deviation", "limit"), [(0.02, 3e-6), (1.0, 3e-6), (10.0, 3e-5)])
def test_values_and_gradients_equal_those_of_the_whole_softmax(
    bias: bool, temperature: float, deviation: float, limit: float
) -> None:
    states, head, targets, upstream = case(bias=bias, deviation=deviation)
    precise = nn.Linear(H, V, bias=bias, dtype=torch.float64)
    precise.load_state_dict(head.state_dict())
    double = states.detach().double().requires_grad_()
    true = dense(double, precise, targets, temperature)
    for mine, expected in zip(tiled(states, head, targets, temperature), true, strict=True):
        assert mine.dtype == torch.float32
        assert relative(mine, expected) < limit
    got = gradients(tiled, states, head, targets, upstream, temperature)
    for mine, expected in zip(got, gradients(dense, double, precise, targets, upstream, temperature), strict=True):
        assert relative(mine, expected) < limit


def test_two_tokens_by_hand() -> None:
    """At temperature 0.5, the logits (1, 0) and (0, 2) become (2, 0) and (0, 4)."""
    head = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    states = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    for layer in (head, nn.Identity()):
        logprobs, entropy = token_logprobs(states, layer, torch.tensor([0, 1]), temperature=0.5)
        p, q = math.exp(2) / (math.exp(2) + 1), math.exp(4) / (math.exp(4) + 1)
        assert logprobs.tolist() == pytest.approx([math.log(p), math.log(q)], rel=1e-5)
        assert float(entropy[0]) == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)), rel=1e-5)


def test_temperature_zero_is_scored_as_temperature_one() -> None:
    states, head, targets, _ = case()
    assert torch.equal(tiled(states, head, targets, 0.0)[0], tiled(states, head, targets, 1.0)[0])


def test_a_token_that_is_nearly_certain_keeps_its_gradient() -> None:
    """1 - p is 0 in float32 here; the sum of the other probabilities is not."""
    head = nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[18.0], [0.0], [-1.0]]))
    (state, weight) = gradients(tiled, torch.ones(1, 1).requires_grad_(), head, torch.tensor([0]), torch.ones(1), 1.0)
    others = [math.exp(-18), math.exp(-19)]
    assert float(state) == pytest.approx(18 * others[0] + 19 * others[1], rel=1e-5)
    assert weight[:, 0].tolist() == pytest.approx([sum(others), -others[0], -others[1]], rel=1e-5)


def test_bfloat16_is_summed_in_float32() -> None:
    states, head, targets, upstream = case(deviation=0.5, dtype=torch.bfloat16)
    precise = nn.Linear(H, V, bias=False)
    precise.load_state_dict(head.state_dict())
    wide = states.detach().float().requires_grad_()
    for mine, true in zip(tiled(states, head, targets, 1.0), dense(wide, precise, targets, 1.0), strict=True):
        assert mine.dtype == torch.float32
        assert relative(mine, true) < 1e-5  # the factors are bfloat16 on both sides
    got = gradients(tiled, states, head, targets, upstream, 1.0)
    for mine, true in zip(got, gradients(dense, wide, precise, targets, upstream, 1.0), strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative(mine, true) < 8e-3  # bfloat16 has 8 bits


def test_autocast_rounds_nothing() -> None:
    states, head, targets, _ = case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, _ = token_logprobs(states, head, targets)
    assert torch.equal(logprobs, token_logprobs(states, head, targets)[0])


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the number of elements of the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("frozen", [True, False])
def test_no_tensor_grows_with_tokens_times_vocabulary(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_tile", lambda _: (64, 512))
    states, head, targets, upstream = case()
    head.requires_grad_(not frozen)
    with Largest() as largest:
        gradients(tiled, states, head, targets, upstream, 1.0)
    assert largest.elements == (64 * 512 if frozen else V * H)
    with Largest() as largest:
        gradients(dense, states, head, targets, upstream, 1.0)
    assert largest.elements == N * V


@pytest.mark.parametrize(("frozen", "times"), [(True, 2), (False, 4)])
def test_a_frozen_output_layer_is_multiplied_twice_and_a_trained_one_four_times(frozen: bool, times: int) -> None:
    states, head, targets, upstream = case()
    head.requires_grad_(not frozen)
    with FlopCounterMode(display=False) as counter:
        gradients(tiled, states, head, targets, upstream, 1.0)
    assert counter.get_total_flops() == times * 2 * N * V * H


class Known:
    """Announces the upstream gradient of each log-probability of the possible tokens, correctly or not."""

    def __init__(self, upstream: Tensor, possible: Tensor | None = None) -> None:
        self.upstream, self.asked = upstream, 0
        self.possible_N = torch.ones(len(upstream), dtype=torch.bool) if possible is None else possible

    def __call__(self, rows: Tensor, logprobs: Tensor) -> Tensor:
        assert logprobs.shape == rows.shape
        self.asked += len(rows)
        return self.upstream[rows]


def foreseen(known: Known, **how: Any) -> Callable[..., Any]:
    def score(states: Tensor, head: Any, targets: Tensor, temperature: float) -> Any:
        return token_logprobs(states, head, targets, temperature=temperature, upstream=known, **how)

    return score


def plain(**how: Any) -> Callable[..., Any]:
    def score(states: Tensor, head: Any, targets: Tensor, temperature: float) -> Any:
        return token_logprobs(states, head, targets, temperature=temperature, **how)

    return score


SOME = torch.arange(N) % 3 > 0
SHARE = int(SOME.sum()) / N


@pytest.mark.parametrize(
    ("frozen", "known", "back", "times"),
    [
        (False, lambda u: Known(u), lambda u: u, 3.0),
        (False, lambda u: Known(u * SOME, SOME), lambda u: u * SOME, 1 + 2 * SHARE),
        (False, lambda u: Known(u * SOME), lambda u: u * SOME, 2 + SHARE),
        (True, lambda u: Known(u * SOME, SOME), lambda u: u * SOME, 1 + SHARE),
    ],
)
def test_a_gradient_known_in_advance_takes_three_multiplications_for_its_tokens(
    frozen: bool, known: Any, back: Any, times: float
) -> None:
    states, head, targets, upstream = case()
    head.requires_grad_(not frozen)
    told = known(upstream)
    with FlopCounterMode(display=False) as counter:
        gradients(foreseen(told), states, head, targets, back(upstream), 1.0)
    assert counter.get_total_flops() == pytest.approx(times * 2 * N * V * H, rel=1e-9)
    assert told.asked == (0 if frozen else int(told.possible_N.sum()))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("logits", [LogitMap(), LogitMap(scale=0.5, cap=6.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "known",
    [
        lambda u: Known(u),
        lambda u: Known(u * SOME),
        lambda u: Known(u, SOME),
        lambda u: Known(2 * u, ~SOME),
        lambda u: Known(torch.zeros_like(u)),
    ],
    ids=["true", "some are not expected", "some are not possible", "wrong", "nothing"],
)
def test_gradients_are_the_same_whatever_upstream_gradient_is_announced(
    bias: bool, logits: LogitMap, dtype: torch.dtype, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_head, "kept_rows", lambda _: 200)
    states, head, targets, upstream = case(bias=bias, deviation=0.5, dtype=dtype)
    for trained in (True, False):
        head.requires_grad_(trained)
        expected = gradients(plain(logits=logits), states, head, targets, upstream, 0.7)
        got = gradients(foreseen(known(upstream), logits=logits), states, head, targets, upstream, 0.7)
        for mine, true in zip(got, expected, strict=True):
            assert mine.dtype == dtype
            assert relative(mine, true) < (3e-6 if dtype == torch.float32 else 8e-3)


def test_a_known_upstream_gradient_changes_neither_logprobs_nor_entropies() -> None:
    states, head, targets, upstream = case()
    got = token_logprobs(states, head, targets, upstream=Known(upstream, SOME))
    for mine, true in zip(got, token_logprobs(states, head, targets), strict=True):
        assert relative(mine, true) < 1e-6


def test_a_second_backward_finds_the_same_gradient() -> None:
    states, head, targets, upstream = case(bias=True)
    logprobs, _ = token_logprobs(states, head, targets, upstream=Known(upstream))
    first = torch.autograd.grad(logprobs, [states, *head.parameters()], upstream, retain_graph=True)
    for mine, true in zip(torch.autograd.grad(logprobs, [states, *head.parameters()], upstream), first, strict=True):
        assert relative(mine, true) < 3e-6


def test_scoring_without_a_gradient_multiplies_once_and_gives_the_same_result() -> None:
    states, head, targets, _ = case()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        logprobs, entropy = token_logprobs(states, head, targets)
    assert counter.get_total_flops() == 2 * N * V * H
    assert not logprobs.requires_grad
    with_gradient = token_logprobs(states, head, targets)
    assert torch.equal(logprobs, with_gradient[0])
    assert torch.equal(entropy, with_gradient[1])


def test_the_entropy_is_omitted_unless_requested_and_never_has_a_gradient() -> None:
    states, head, targets, _ = case()
    logprobs, entropy = token_logprobs(states, head, targets)
    bare, none = token_logprobs(states, head, targets, entropy=False)
    assert none is None
    assert torch.equal(bare, logprobs)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("head", [nn.Linear(H, V), nn.Sequential(nn.Linear(H, V))])
def test_no_tokens_give_no_logprobs_and_a_gradient_of_zero(head: nn.Module) -> None:
    hidden = torch.randn(2, H, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden[:0], head, torch.zeros(0, dtype=torch.long))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert all(weight.grad is not None and not weight.grad.any() for weight in head.parameters())


def test_an_output_layer_that_does_more_than_multiply_is_called() -> None:
    states, head, targets, upstream = case(bias=True)
    head.register_forward_hook(lambda _layer, _args, logits: 3 * logits)
    got = gradients(tiled, states, head, targets, upstream, 0.7)
    for mine, true in zip(got, gradients(dense, states, head, targets, upstream, 0.7), strict=True):
        assert relative(mine, true) < 1e-5
    for mine, true in zip(tiled(states, head, targets, 0.7), dense(states, head, targets, 0.7), strict=True):
        assert relative(mine, true) < 1e-5


def test_the_temperature_divides_the_logits_and_defaults_to_1() -> None:
    states, head, targets, _ = case()
    for got, temperature in ((token_logprobs(states, head, targets), 1.0), (tiled(states, head, targets, 2.0), 2.0)):
        for mine, true in zip(got, dense(states, head, targets, temperature), strict=True):
            assert relative(mine, true) < 1e-5


def test_a_called_output_layer_computes_one_chunk_of_logits_at_a_time() -> None:
    states, head, targets, upstream = case()
    with Largest() as largest:
        gradients(called, states, head, targets, upstream, 1.0)
    assert largest.elements == module.CHUNK * V


@pytest.mark.parametrize("way", [tiled, called])
def test_gradients_are_the_same_under_checkpointing(way: Callable[..., Any]) -> None:
    states, head, targets, upstream = case(bias=True)

    def again(*inputs: Any) -> Any:
        return checkpoint(way, *inputs, use_reentrant=False)

    got = gradients(again, states, head, targets, upstream, 0.7)
    for mine, true in zip(got, gradients(tiled, states, head, targets, upstream, 0.7), strict=True):
        assert relative(mine, true) < 1e-5


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def trained_head(path: Path) -> PolicyModel:
    """Return a policy with a trained output layer, which is the embedding too, so that it gets two gradients."""
    policy = load_policy(path, dtype=torch.float32, rank=4, alpha=8, seed=1)
    policy.causal.get_output_embeddings().weight.requires_grad_(True)
    return policy


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_output_layer_has_the_gradient_of_a_whole_one(
    tiny_model: Path, groups_of: Callable[..., list[Group]]
) -> None:
    batch = collate(list(build_samples(groups_of(1))), pad_id=0)
    whole, sharded = trained_head(tiny_model), trained_head(tiny_model)
    shard(sharded, torch.device("cpu"))
    for policy in (whole, sharded):
        for _ in range(2):  # gradients add up
            policy(batch.inputs, batch.loss_mask_BR, 0.7)[0].sum().backward()
    expected = whole.causal.get_output_embeddings().weight.grad
    got = sharded.causal.get_output_embeddings().weight.grad
    assert relative(got.full_tensor(), expected) < 1e-6
