"""Memory and CPU time of log-probabilities and their gradient, compared with all logits at once and with trl.

`python -m benchmarks.logprobs [--json] [--hidden 256 2560] [--seed N]`: 2,048 tokens, a vocabulary of 151,936, float32,
entropies included. Each row is a separate process, ours and trl's in turns, and the least of the rounds counts. Memory
is the peak of a row in addition to weights and states, including the gradients at the end. `known` is our function with
the gradient of each log-probability known in the forward pass, as in training. trl's tiles are measured if trl is
installed (`make setup`); without it, its goals are not measured.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from agentgym.train.loss.logprobs import token_logprobs
from benchmarks.harness import Cost, Goal, at_least, at_most, cost, fresh, report, report_parser

TOKENS, VOCAB = 2048, 151_936
LOGITS_MIB = TOKENS * VOCAB * 4 / 2**20
CHECKED = 128
"""Tokens whose results are also computed in float64."""

REFERENCE: dict[str, float | str] = {"logits_mib": LOGITS_MIB, "where": "one thread"}

Scores: TypeAlias = tuple[Tensor, Tensor]


def full(states: Tensor, head: nn.Linear, targets: Tensor, _: Tensor) -> Scores:
    """Compute all logits at once."""
    log_p = torch.log_softmax(head(states).float(), -1)
    with torch.no_grad():
        entropy = torch.cat([-(part.exp() * part).sum(-1) for part in torch.split(log_p, 256)])
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def ours(states: Tensor, head: nn.Linear, targets: Tensor, _: Tensor) -> Scores:
    return token_logprobs(states, head, targets)


@dataclass(frozen=True, slots=True)
class Known:
    """The gradient of each log-probability, known in the forward pass; every token has one."""

    upstream: Tensor

    @property
    def possible_N(self) -> Tensor:
        return torch.ones_like(self.upstream, dtype=torch.bool)

    def __call__(self, rows: Tensor, logprobs: Tensor) -> Tensor:
        return self.upstream[rows]


def known(states: Tensor, head: nn.Linear, targets: Tensor, upstream: Tensor) -> Scores:
    return token_logprobs(states, head, targets, upstream=Known(upstream))


def trl(states: Tensor, head: nn.Linear, targets: Tensor, _: Tensor) -> Scores:
    """Call trl's function with the tile width that trl uses."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as WIDTH

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        states, head.weight, head.bias, targets, 1.0, WIDTH, None, 1.0, ("entropy",)
    )
    return logprobs, entropy


WAYS: dict[str, Callable[..., Scores]] = {"ours": ours, "known": known, "full": full, "trl": trl}


def problem(hidden: int, trained: bool, seed: int, tokens: int) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Return hidden states, output layer, targets and the gradient of each log-probability."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    head = nn.Linear(hidden, VOCAB, bias=False)
    nn.init.normal_(head.weight, std=0.02)
    head.requires_grad_(trained)
    states = torch.randn(tokens, hidden, requires_grad=True)
    return states, head, torch.randint(0, VOCAB, (tokens,)), torch.randn(tokens)


def spent(way: str, hidden: int, trained: bool, seed: int, runs: int) -> Cost:
    """Return the cost of a forward and backward pass."""
    WAYS[way](torch.randn(1, 4), nn.Linear(4, 8), torch.tensor([1]), torch.ones(1))  # imports are not part of the cost
    states, head, targets, upstream = problem(hidden, trained, seed, TOKENS)

    def both() -> Tensor:
        states.grad = head.weight.grad = None
        logprobs, entropy = WAYS[way](states, head, targets, upstream)
        logprobs.backward(upstream)  # type: ignore[no-untyped-call]
        return entropy

    return cost(both, runs=runs)


def errors(way: str, hidden: int, seed: int) -> dict[str, float]:
    """Return the largest distances from float64, in nats, and for gradients relative to their largest entry."""
    states, head, targets, upstream = problem(hidden, True, seed, CHECKED)
    logprobs, entropy = WAYS[way](states, head, targets, upstream)
    got = torch.autograd.grad(logprobs, [states, head.weight], upstream)
    double = nn.Linear(hidden, VOCAB, bias=False, dtype=torch.float64)
    double.load_state_dict(head.state_dict())
    wide = states.detach().double().requires_grad_()
    log_p = torch.log_softmax(double(wide), -1)
    picked = log_p.gather(-1, targets[:, None])[:, 0]
    expected = torch.autograd.grad(picked, [wide, double.weight], upstream.double())
    names = ("states_gradient", "weight_gradient")
    return {
        "logprob": float((logprobs - picked).detach().abs().max()),
        "entropy": float((entropy + (log_p.exp() * log_p).sum(-1)).detach().abs().max()),
        **{n: float((a - b).abs().max() / b.abs().max()) for n, a, b in zip(names, got, expected, strict=True)},
    }


def measure(hidden: int, seed: int, with_trl: bool) -> dict[str, float]:
    """Return the results for one hidden size: each row's least values over rounds in which all rows take turns."""
    figures: dict[str, float] = {}
    rows = {"frozen": ["full", "ours"], "trained": ["full", "ours", "known"]}
    peers = ["trl"] if with_trl else []
    for kind, own in rows.items():
        order = [*own, *peers]
        for ways in (order, order[::-1]):  # forwards and backwards, so that a changing load favors nobody
            for way in ways:
                row = fresh(spent, way, hidden, kind == "trained", seed, 1)
                for name, value in (("cpu_s", row.cpu_s), ("peak_mib", row.peak_mib)):
                    least = figures.get(f"h{hidden}_{kind}_{way}_{name}", value)
                    figures[f"h{hidden}_{kind}_{way}_{name}"] = min(value, least)
    figures[f"h{hidden}_gradient_mib"] = VOCAB * hidden * 4 / 2**20
    for way in [*rows["trained"], *peers]:
        for name, value in fresh(errors, way, hidden, seed).items():
            figures[f"h{hidden}_{way}_{name}_error"] = value
    for kind, way in OURS.items() if with_trl else ():
        name = f"h{hidden}_{kind}"
        figures[f"{name}_trl_over_{way}_cpu"] = figures[f"{name}_trl_cpu_s"] / figures[f"{name}_{way}_cpu_s"]
    return figures


OURS = {"frozen": "ours", "trained": "known"}
"""The way that training uses, by whether the output layer is trained."""
FASTER = {(256, "frozen"): 4.0, (256, "trained"): 2.5, (2560, "frozen"): 2.0, (2560, "trained"): 1.45}
"""Goals for our speed as a multiple of trl's, by hidden size."""


def goals(hidden: int, figures: dict[str, float]) -> dict[str, Goal]:
    """Return the goals.

    They compare with trl in the same run, with the gradient that every way returns, and with float64.
    """
    met: dict[str, Goal] = {}
    for kind, way in OURS.items():
        if (hidden, kind) in FASTER:
            ratio = figures.get(f"h{hidden}_{kind}_trl_over_{way}_cpu")
            met[f"H {hidden}, {kind}: trl's CPU s / ours"] = at_least(ratio, FASTER[hidden, kind])
    peak = figures[f"h{hidden}_frozen_ours_peak_mib"] / LOGITS_MIB
    met[f"H {hidden}, frozen: peak / logits"] = at_most(peak, 0.13)
    if hidden >= 2560:  # at a smaller size, a chunk's logits are larger than the gradient
        peak = figures[f"h{hidden}_trained_known_peak_mib"] / figures[f"h{hidden}_gradient_mib"]
        met[f"H {hidden}, trained: peak / the weight's gradient"] = at_most(peak, 1.1)
    own = tuple(f"h{hidden}_{way}_" for way in ("ours", "known"))
    worst = max(value for name, value in figures.items() if name.startswith(own) and name.endswith("_error"))
    met[f"H {hidden}: largest error"] = at_most(worst, 2e-6)
    return met


def main() -> None:
    parser = report_parser(__doc__ or "")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 2560], help="hidden sizes; 2,560 takes minutes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with_trl = importlib.util.find_spec("trl") is not None
    figures: dict[str, float] = {}
    reached: dict[str, Goal] = {}
    for hidden in args.hidden:
        row = measure(hidden, args.seed, with_trl)
        figures |= row
        reached |= goals(hidden, row)
    reference = REFERENCE | {"trl": "measured" if with_trl else "not installed, so not compared"}
    report("logprobs", figures=figures, reference=reference, goals=reached, as_json=args.json)


if __name__ == "__main__":
    main()
