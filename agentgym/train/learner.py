"""One process's part of the training: the policy, its optimizer, and what a step does to them."""

import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agentgym.train.attention import attend_in_rows
from agentgym.train.batch import Batch, collate
from agentgym.train.config import TrainConfig
from agentgym.train.loss import LossSums, Ratio, denominator, loss_sums, policy_loss
from agentgym.train.model import load_policy, shard
from agentgym.train.plan import Micro, cost_of, mini_batches, over_budget, plan_step
from agentgym.train.ranks import Ranks
from agentgym.types import Floats, Sample, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """What one rank's micro-batch reports: its sums, and how many of its tokens were not padding."""

    step: int
    sums: LossSums
    real_tokens: int
    computed_tokens: int


class Learner:
    """The policy and its optimizer; every rank holds one, and makes the same calls with the same samples."""

    def __init__(self, model: Path | str, config: TrainConfig, ranks: Ranks, *, seed: int) -> None:
        self.config = config
        self.ranks = ranks
        self.policy = load_policy(
            model,
            dtype=getattr(torch, config.dtype),
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            seed=seed,
        )
        if config.layout != "padded":
            attend_in_rows(self.policy.causal)
        if ranks.world > 1 or config.shard:
            shard(self.policy, ranks.device)
        self.policy.to(ranks.device)
        self.optimizer_steps = 0
        """Taken so far; skipped ones do not count."""
        self._weights = [weight for weight in self.policy.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._weights, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self._pad_id = int(self.policy.causal.config.pad_token_id or 0)
        self._cost = cost_of(config.balance, self.policy.causal.config.get_text_config().hidden_size)

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step per mini-batch; the figures of all ranks, on every rank."""
        began = time.perf_counter()
        self._agree(samples)
        if self.config.correction.startswith("sequence"):
            _refuse_parts(samples)
        forwards: list[_Forward] = []
        norms: list[float] = []
        for rows in mini_batches(samples, rollouts=self.config.rollouts_per_step):
            norms.append(self._mini_batch(len(norms), [samples[i] for i in rows], forwards))
        skipped = sum(not math.isfinite(norm) for norm in norms)
        stats = {
            "train/optimizer_steps": float(len(norms) - skipped),
            "train/skipped_steps": float(skipped),
            "train/samples": float(len(samples)),
            "train/over_budget": float(over_budget([len(row) for row in samples], self.config.micro_tokens)),
        }
        if norms:
            everywhere = self.ranks.gather(forwards)
            stats |= _figures(everywhere, len(norms))
            if self.config.layout == "tree":
                stats["train/unique_tokens"] = float(sum(f.real_tokens for f in everywhere))
            stats |= {"train/grad_norm": sum(norms) / len(norms), "train/lr": self._optimizer.param_groups[0]["lr"]}
        return stats | {"train/seconds": time.perf_counter() - began}

    def _agree(self, samples: Sequence[Sample]) -> None:
        """Refuse on every rank, rather than hang on some, when they do not hold the same samples."""
        if self.ranks.world == 1:
            return
        digest = 0
        for row in samples:
            name = f"{row.rollout_id} {row.segment} {row.step} {len(row.prompt_ids)} {len(row.response_ids)};"
            digest = zlib.crc32(name.encode(), digest)
        digests = self.ranks.gather([(len(samples), digest)])
        if len(set(digests)) > 1:
            raise ValueError(f"samples: every rank must pass the same ones, got (count, digest) {digests}")

    def _mini_batch(self, step: int, samples: list[Sample], forwards: list[_Forward]) -> float:
        """One optimizer step; its gradient norm before clipping."""
        ranks, config = self.ranks, self.config
        total = denominator(samples, config.normalise)
        plans = plan_step(
            samples, ranks=ranks.world, layout=config.layout, micro_tokens=config.micro_tokens, cost=self._cost
        )
        self._optimizer.zero_grad(set_to_none=True)
        forwards += [self._micro_batch(step, samples, micro, total) for micro in plans[ranks.rank]]
        norm = _number(torch.nn.utils.clip_grad_norm_(self._weights, config.grad_clip))
        if math.isfinite(norm):
            rate = learning_rate(config, self.optimizer_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self.optimizer_steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _micro_batch(self, step: int, samples: list[Sample], micro: Micro, total: float) -> _Forward:
        """One forward and backward."""
        config, rows = self.config, [samples[i] for i in micro.rows]
        batch = self._collate(rows, masked=micro.masked)
        logprobs_BR, entropy_BR = self._forward(batch, config.temperature)
        ratio = Ratio(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            correction=config.correction,
            cap=config.correction_cap,
        )
        loss = policy_loss(logprobs_BR, batch, normalise=config.normalise, denominator=total, **ratio)
        # FSDP averages gradients over ranks; this loss is a sum over them.
        (loss * self.ranks.world).backward()  # type: ignore[no-untyped-call]
        return _Forward(
            step=step,
            sums=loss_sums(loss, logprobs_BR, entropy_BR, batch, **ratio),
            real_tokens=0 if micro.masked else batch.inputs.tokens,
            computed_tokens=batch.inputs.input_ids_BT.numel(),
        )

    def _collate(self, samples: Sequence[Sample], *, masked: bool = False) -> Batch:
        """The samples in the run's layout, on this rank's device."""
        batch = collate(samples, pad_id=self._pad_id, layout=self.config.layout, masked=masked)
        return batch.to(self.ranks.device)

    def _forward(self, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = self.policy(batch.inputs, batch.loss_mask_BR, temperature)
        return out

    def score(self, token_ids: Sequence[int], sampling: Sampling) -> Floats:
        """Log-probability (nats) of each id but the first, given those before it."""
        ids = np.asarray(token_ids, np.int64)
        if len(ids) < 2:
            raise ValueError(f"token_ids: {len(ids)} ids have no log-probability; give at least 2")
        n = len(ids) - 1
        row = Sample(
            group_id="score",
            rollout_id="score",
            segment=0,
            step=0,
            prompt_ids=ids[:1],
            response_ids=ids[1:],
            loss_mask=np.ones(n, np.bool_),
            logprobs=np.zeros(n, np.float32),
            advantages=np.zeros(n, np.float32),
            weight=1.0,
            policy_version=0,
            is_last=True,
        )
        with torch.no_grad():
            logprobs_BR, _ = self._forward(self._collate([row]), sampling.temperature)
        scores: Floats = logprobs_BR[0].cpu().numpy()
        return scores


def _refuse_parts(samples: Sequence[Sample]) -> None:
    """Raise ValueError where a segment is in several samples: the ratio of a part is not the sequence's."""
    segments = {(row.rollout_id, row.segment) for row in samples}
    if len(segments) < len(samples):
        raise ValueError(
            f"correction: a sequence's weight needs its whole segment in one sample, and {len(samples)} samples are of "
            f"{len(segments)} segments; use samples(merge=True), or a token's weight"
        )


def learning_rate(config: TrainConfig, taken: int) -> float:
    """The rate of the next optimizer step after `taken` of them: warm-up, then linear decay to a tenth."""
    warm = min(1.0, (taken + 1) / max(config.warmup_steps, 1))
    if config.decay_steps is None:
        return config.lr * warm
    done = min(1.0, max(0, taken - config.warmup_steps) / config.decay_steps)
    return config.lr * warm * (1 - 0.9 * done)


def _figures(forwards: list[_Forward], steps: int) -> dict[str, float]:
    """The figures of a step over all ranks' micro-batches; means are over trained tokens."""
    tokens = sum(f.sums.tokens for f in forwards)
    real, computed = sum(f.real_tokens for f in forwards), sum(f.computed_tokens for f in forwards)
    per_token = 1 / max(tokens, 1)
    return {
        "train/loss": sum(f.sums.loss for f in forwards) / steps,
        "train/clip_fraction": sum(f.sums.clipped for f in forwards) * per_token,
        "train/kl": sum(f.sums.kl for f in forwards) * per_token,
        "train/entropy": sum(f.sums.entropy for f in forwards) * per_token,
        # Of the first mini-batch: from the second on, the policy has moved away from the engine's.
        "train/logprob_gap": max(f.sums.gap for f in forwards if f.step == 0),
        "train/trained_tokens": float(tokens),
        "train/padding": 1 - real / computed,
        "train/micro_batches": float(len(forwards)),
    }


def _number(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
