"""Peak memory and CPU seconds of log-probabilities and their gradient, beside all logits at once and trl's tiles.

`python -m benchmarks.logprobs [--json] [--hidden 256 2560] [--seed N]`: 2,048 tokens, a vocabulary of 151,936,
float32, entropies included. Each row is a process of its own; memory is what it took above weights and states, the
gradients it left included. trl is measured where it is installed (`pip install agentgym[bench]`), else quoted.
"""

import argparse
import importlib.util
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from agentgym.train.objective.logprobs import token_logprobs
from benchmarks.harness import Cost, Goal, at_most, cost, fresh, report

TOKENS, VOCAB = 2048, 151_936
LOGITS_MIB = TOKENS * VOCAB * 4 / 2**20
CHECKED = 128
"""Tokens whose figures are computed once more in float64."""

REFERENCE: dict[str, float | str] = {
    "logits_mib": LOGITS_MIB,
    "h256_trained_trl_cpu_s": 14.0,
    "h256_trained_trl_peak_mib": 764.0,
    "h256_frozen_trl_peak_mib": 616.0,
    "h256_trained_full_cpu_s": 6.1,
    "h256_trained_full_peak_mib": 3571.0,
    "h256_trained_verl_fused_cpu_s": 16.0,
    "h256_trained_verl_fused_peak_mib": 1782.0,
    "h256_frozen_trl_over_full_cpu": 1.46,
    "h256_trained_trl_over_full_cpu": 1.84,
    "h2560_frozen_trl_over_full_cpu": 1.57,
    "h2560_trained_trl_over_full_cpu": 1.32,
    "where": "one thread, other machines; trl over full in a run of this benchmark",
}

Scores: TypeAlias = tuple[Tensor, Tensor]


def full(states: Tensor, head: nn.Linear, targets: Tensor) -> Scores:
    """All logits at once."""
    log_p = torch.log_softmax(head(states).float(), -1)
    with torch.no_grad():
        entropy = torch.cat([-(part.exp() * part).sum(-1) for part in torch.split(log_p, 256)])
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def ours(states: Tensor, head: nn.Linear, targets: Tensor) -> Scores:
    return token_logprobs(states, head, targets)


def trl(states: Tensor, head: nn.Linear, targets: Tensor) -> Scores:
    """trl's function with the tile width that trl gives it."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as WIDTH

    logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
        states, head.weight, head.bias, targets, 1.0, WIDTH, None, 1.0, ("entropy",)
    )
    return logprobs, entropy


WAYS: dict[str, Callable[..., Scores]] = {"ours": ours, "full": full, "trl": trl}


def problem(hidden: int, trained: bool, seed: int, tokens: int) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """States, output layer, targets and the gradient of each log-probability."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    head = nn.Linear(hidden, VOCAB, bias=False)
    nn.init.normal_(head.weight, std=0.02)
    head.requires_grad_(trained)
    states = torch.randn(tokens, hidden, requires_grad=True)
    return states, head, torch.randint(0, VOCAB, (tokens,)), torch.randn(tokens)


def spent(way: str, hidden: int, trained: bool, seed: int, runs: int) -> Cost:
    """Cost of forward and backward."""
    WAYS[way](torch.randn(1, 4), nn.Linear(4, 8), torch.tensor([1]))  # what it imports is no cost of its
    states, head, targets, upstream = problem(hidden, trained, seed, TOKENS)

    def both() -> Tensor:
        states.grad = head.weight.grad = None
        logprobs, entropy = WAYS[way](states, head, targets)
        logprobs.backward(upstream)  # type: ignore[no-untyped-call]
        return entropy

    return cost(both, runs=runs)


def errors(way: str, hidden: int, seed: int) -> dict[str, float]:
    """Largest distances from float64: nats, and gradients relative to the largest of theirs."""
    states, head, targets, upstream = problem(hidden, True, seed, CHECKED)
    logprobs, entropy = WAYS[way](states, head, targets)
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


def measure(hidden: int, seed: int, ways: list[str]) -> dict[str, float]:
    """The figures of one width."""
    figures: dict[str, float] = {}
    for kind in ("frozen", "trained"):
        for way in ways:
            row = fresh(spent, way, hidden, kind == "trained", seed, 2 if hidden <= 512 else 1)
            figures |= {f"h{hidden}_{kind}_{way}_cpu_s": row.cpu_s, f"h{hidden}_{kind}_{way}_peak_mib": row.peak_mib}
    # What a trained weight's gradient takes, every way has to return.
    gradient_mib = VOCAB * hidden * 4 / 2**20
    for way in ways:
        peak = figures[f"h{hidden}_trained_{way}_peak_mib"]
        figures[f"h{hidden}_trained_{way}_above_gradient_mib"] = peak - gradient_mib
    for way in ways:
        for name, value in fresh(errors, way, hidden, seed).items():
            figures[f"h{hidden}_{way}_{name}_error"] = value
    return figures


def goals(hidden: int, figures: dict[str, float]) -> dict[str, Goal]:
    """Against trl in the same run; where it is not installed, against what it took over all logits in another."""
    met: dict[str, Goal] = {}
    for kind, share in (("frozen", 0.13), ("trained", 0.25)):
        name = f"h{hidden}_{kind}"
        met[f"H {hidden}, {kind}: peak / logits"] = at_most(figures[f"{name}_ours_peak_mib"] / LOGITS_MIB, share)
        spent_s = figures[f"{name}_ours_cpu_s"]
        quoted = REFERENCE.get(f"{name}_trl_over_full_cpu")
        if f"{name}_trl_cpu_s" in figures:
            met[f"H {hidden}, {kind}: CPU s / trl's"] = at_most(spent_s / figures[f"{name}_trl_cpu_s"], 0.65)
        elif isinstance(quoted, float):
            peer = quoted * figures[f"{name}_full_cpu_s"]
            met[f"H {hidden}, {kind}: CPU s / trl's as quoted"] = at_most(spent_s / peer, 0.65)
    worst = max(value for name, value in figures.items() if name.startswith(f"h{hidden}_ours_"))
    met[f"H {hidden}: largest error"] = at_most(worst, 2e-6)
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the last line on stdout is the report as JSON")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 2560], help="widths; 2,560 takes minutes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with_trl = importlib.util.find_spec("trl") is not None
    figures: dict[str, float] = {}
    reached: dict[str, Goal] = {}
    for hidden in args.hidden:
        row = measure(hidden, args.seed, ["full", "ours", *(["trl"] if with_trl else [])])
        figures |= row
        reached |= goals(hidden, row)
    reference = REFERENCE | {
        "trl": "measured" if with_trl else "not installed: its quoted share of all logits' time stands in"
    }
    report("logprobs", figures=figures, reference=reference, goals=reached, as_json=args.json)


if __name__ == "__main__":
    main()
