"""One process's part of the training: the policy, its optimizer, and the training step."""

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from agentgym.train.batching.batch import Batch, collate, scored_sample
from agentgym.train.batching.bins import Indices
from agentgym.train.batching.plan import cost_of, mini_batches, over_budget, plan_step
from agentgym.train.checks import ModelLimits, TrainedOnce, digest, warn_of_settings
from agentgym.train.config import TrainConfig, learning_rate
from agentgym.train.critic import Critic, refuse_returns
from agentgym.train.distributed import Ranks
from agentgym.train.kept_logprobs import KeptLogprobs, ScoredSample
from agentgym.train.loss.losses import LossSums, denominator
from agentgym.train.loss.metrics import Forward, step_metrics
from agentgym.train.loss.nonfinite import gradient_is_finite, nonfinite_rollouts, warn_skipped
from agentgym.train.loss.objective import Objective, refuse_parts, rollout_log_ratios, sample_log_ratios
from agentgym.train.memory import TrainerFacts, describe, fitting_tokens, follow_model
from agentgym.train.policy.adapter_io import export_adapter
from agentgym.train.policy.fsdp import open_policy, open_reference, weight_type
from agentgym.train.policy.model import PolicyModel
from agentgym.train.snapshot import Snapshot, copied_part, restore_part
from agentgym.train.state import (
    new_optimizer,
    policy_settings,
    random_state,
    refuse_other_policy,
    restore_random,
    restore_training,
    training_state,
)
from agentgym.train.usage import memory_metrics, mfu_metrics
from agentgym.types.arrays import Floats
from agentgym.types.completion import Sampling
from agentgym.types.sample import Sample, SampleKey

PROBED = 16
"""Number of tokens in the first pass of a probe of the speed."""
PAD_ID = 0
"""Token id used as padding. Any id of the vocabulary works: no token attends to padding, and padding isn't trained."""


class Learner:
    """The policy and the optimizer of one rank.

    Every rank has a learner, and makes the same calls with the same samples.
    """

    def __init__(self, model: Path | str, config: TrainConfig, ranks: Ranks, *, seed: int) -> None:
        self.ranks = ranks
        self.policy = open_policy(model, config, ranks, seed=seed)
        self.config = config = follow_model(config, self.policy, ranks)
        self._model = model
        full = config.method == "full"
        self._frozen = open_reference(model, config, ranks) if full and config.kl_coef else None
        self._coverage = self.policy.coverage
        warn_of_settings(self.policy, config)
        self.optimizer_steps = 0
        """Number of optimizer steps so far; skipped steps don't count."""
        self._weights = [weight for weight in self.policy.parameters() if weight.requires_grad]
        self._optimizer = new_optimizer(self._weights, config, ranks.device)
        self._limits, self._once = ModelLimits.of(self.policy.causal), TrainedOnce()
        self._kept: KeptLogprobs | None = None
        self._cost = cost_of(config.balance, self.policy.causal.config.get_text_config().hidden_size)
        self._seed = seed
        self._critic: Critic | None = None

    def train(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Take one optimizer step per mini-batch, and return the metrics over all ranks, on every rank."""
        began = time.perf_counter()
        returns: Mapping[SampleKey, Floats] = getattr(samples, "returns", {})
        self._agree(samples, returns)
        refuse_returns({} if self._critic is None else self._critic.asked, returns)
        refuse_parts(self.config, samples)
        self._limits.refuse(samples)
        self._once.refuse(samples)
        forwards: list[Forward] = []
        cut = [
            [samples[i] for i in part] for part in mini_batches(samples, rollouts=self.config.rollouts_per_minibatch)
        ]
        trained = [part for part in cut if any(sample.loss_mask.any() for sample in part)]
        untrained = len(cut) - len(trained)
        plans = [self._plan(part) for part in trained]
        old = [self._old_logprobs(step, *one) for step, one in enumerate(zip(trained, plans, strict=True))]
        parts = enumerate(zip(trained, plans, old, strict=True))
        norms = [self._mini_batch(step, *part, forwards) for step, part in parts]
        self._once.add(samples)
        skipped = [step for step, norm in enumerate(norms) if not math.isfinite(norm)]
        stats = {
            "train/optimizer_steps": float(len(norms) - len(skipped)),
            "train/skipped_steps": float(len(skipped)),
            "train/untrained_steps": float(untrained),
            "train/samples": float(len(samples)),
            "train/adapter_coverage": self._coverage.share,
            "train/over_budget": float(
                over_budget([len(sample) for sample in samples], self.config.max_tokens_per_microbatch)
            ),
        }
        if norms:
            forwards = self.ranks.gather(forwards)
            stats |= step_metrics(forwards, norms, self.config)
            stats["train/lr"] = self._optimizer.param_groups[0]["lr"]
        if self._critic is not None:
            stats |= self._critic.learn(returns)
        # Warn last, because a filter may turn warnings into errors.
        if untrained:
            warnings.warn(
                f"{untrained} mini-batch(es) without an optimizer step: the loss masks of their samples are all 0",
                RuntimeWarning,
                stacklevel=2,
            )
        if skipped:
            blamed = sorted({name for step in skipped for name in nonfinite_rollouts(forwards, step)})
            stats["train/skipped_rollouts"] = float(len(blamed))
            warn_skipped(len(skipped), blamed)
        seconds = time.perf_counter() - began
        return stats | {"train/seconds": seconds} | self._usage(samples if norms else (), seconds)

    def describe(self) -> TrainerFacts:
        """Return what this learner trains, and with how much memory."""
        return describe(self.config, self.policy, self.ranks, self._frozen)

    def probe(self, limit_s: float) -> float | None:
        """Return the trained tokens per second of forward and backward passes. Nothing that training uses is changed.

        The number of tokens grows up to that of a micro-batch, as long as a pass ends well before the limit. It stays
        at most the default, for which there is enough memory, because the run's samples may be fewer than a micro-batch
        holds. Returns None on several ranks, which would have to agree on when to stop.

        Args:
            limit_s: About the maximum number of seconds that the passes may take.
        """
        if self.ranks.world > 1:
            return None
        began, tokens, rate = time.perf_counter(), PROBED, 0.0
        fits = fitting_tokens(self.config, self.policy, self.ranks.device)
        most = min(self.config.max_tokens_per_microbatch or PROBED, self._limits.positions or PROBED, fits)
        while True:
            now = time.perf_counter()
            self._forward_and_backward(min(tokens, most))
            took = time.perf_counter() - now
            rate = min(tokens, most) / took
            if tokens >= most or time.perf_counter() - began + 4 * took > limit_s:
                return rate
            tokens *= 4

    def _forward_and_backward(self, tokens: int) -> None:
        """Run a forward and backward pass over a sample of this many tokens, and discard the gradient."""
        batch = self._collate([scored_sample([PAD_ID] * max(tokens, 2))])
        logprobs_BR, _ = self.policy(batch.inputs, batch.loss_mask_BR, self.config.temperature)
        logprobs_BR.sum().backward()
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize(self.ranks.device)
        self._optimizer.zero_grad(set_to_none=True)

    def values(self, samples: Sequence[Sample]) -> dict[SampleKey, Floats]:
        """Return the critic's value of the state before each token that the loss masks cover.

        The first call creates the critic.
        """
        self._agree(samples)
        self._limits.refuse(samples)
        self._critic = self._critic or self._new_critic()
        return self._critic.values(samples, self._plan(samples) if samples else [], PAD_ID)

    def _new_critic(self) -> Critic:
        return Critic(self.policy, self.config, self.ranks, seed=self._seed)

    def _usage(self, samples: Sequence[Sample], seconds: float) -> dict[str, float]:
        """Return metrics of the memory of this rank's GPU and of the utilization of all ranks' GPUs.

        `samples` are the samples that all ranks together trained on in `seconds`.
        """
        lengths, device = [len(sample) for sample in samples], self.ranks.device
        return memory_metrics(device) | mfu_metrics(
            self.policy.causal,
            lengths,
            dtype=weight_type(self.config, device),
            seconds=seconds,
            gpus=self.ranks.world,
            device=device,
        )

    def train_and_keep(self, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[SampleKey, ScoredSample]]:
        """Train, and also return the log-probabilities of the forward passes by sample.

        Rank 0 gets the log-probabilities of all ranks, the others an empty dict.
        """
        self._kept = KeptLogprobs()
        try:
            return self.train(samples), self.ranks.gather_on_first(self._kept.by_sample)
        finally:
            self._kept = None

    def _agree(self, samples: Sequence[Sample], returns: Mapping[SampleKey, Floats] = MappingProxyType({})) -> None:
        """Raise ValueError on every rank if the ranks have different samples, or different returns for the critic.

        Otherwise the ranks would hang, or would average the gradients of different steps.
        """
        if self.ranks.world == 1:
            return
        digests = self.ranks.gather([(len(samples), digest(samples, returns))])
        if len(set(digests)) > 1:
            raise ValueError(f"samples: every rank must pass the same samples, got (count, digest) {digests}")

    def _plan(self, samples: Sequence[Sample]) -> list[Indices]:
        """Return this rank's micro-batches of the samples."""
        ranks, config = self.ranks, self.config
        plans = plan_step(
            samples,
            ranks=ranks.world,
            layout=config.layout,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            cost=self._cost,
        )
        return plans[ranks.rank]

    def _old_logprobs(self, step: int, samples: list[Sample], plan: list[Indices]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities ([B, R]) from before the call's first optimizer step.

        The result is empty if these aren't needed: with old_logprobs="engine", and for the first mini-batch of a
        call, whose own forward passes compute them.

        Args:
            step: Index of the mini-batch in the call.
            samples: The samples of the mini-batch.
            plan: This rank's micro-batches of these samples.
        """
        found: list[Tensor] = []
        if self.config.old_logprobs == "engine" or not step:
            return found
        for micro_batch in plan:
            chosen, batch = self._batch(samples, micro_batch)
            found.append(self._logprobs(batch, self.config.temperature))
            self._keep(chosen, micro_batch, found[-1], moved=False)
        return found

    def _keep(self, chosen: list[Sample], micro_batch: Indices, logprobs_BR: Tensor, *, moved: bool) -> None:
        """Store a micro-batch's log-probabilities if the caller wants them and the micro-batch isn't padding.

        `chosen` contains the samples of the micro-batch. `moved` is stored with each (see `ScoredSample.moved`).
        """
        if self._kept is not None and micro_batch:
            self._kept.add(chosen, logprobs_BR, moved=moved)

    def _mini_batch(
        self, step: int, samples: list[Sample], plan: list[Indices], old: list[Tensor], forwards: list[Forward]
    ) -> float:
        """Take one optimizer step on a mini-batch. Return the gradient's norm before clipping.

        `old` is the result of `_old_logprobs`. The reports of the forward passes are appended to `forwards`.
        """
        config = self.config
        objective = Objective(
            config=config,
            denominator=denominator(samples, config.loss_agg),
            sequences=self._sequences(samples, plan, old) if config.loss == "gspo_rollout" else None,
        )
        self._optimizer.zero_grad(set_to_none=True)
        for number, micro_batch in enumerate(plan):
            forwards.append(self._forward(step, number, samples, micro_batch, old, objective))
        norm = _number(torch.nn.utils.clip_grad_norm_(self._weights, config.grad_clip))
        if math.isfinite(norm):
            rate = learning_rate(config, self.optimizer_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self.optimizer_steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def _forward(
        self,
        step: int,
        number: int,
        samples: list[Sample],
        micro_batch: Indices,
        old: list[Tensor],
        objective: Objective,
    ) -> Forward:
        """Run one forward and backward pass, and return its report.

        `number` is the micro-batch's index in the optimizer step, and `step` that step's index in the call. `samples`
        are those of the mini-batch, and `old` is the result of `_old_logprobs`.
        """
        chosen, batch = self._batch(samples, micro_batch)
        reference_BR = self._reference(batch) if self.config.kl_coef else None

        def loss_of(logprobs_BR: Tensor, entropy_BR: Tensor) -> tuple[Tensor, LossSums]:
            old_BR = self._old(old, number, logprobs_BR)
            loss, sums = objective(chosen, batch, logprobs_BR, entropy_BR, reference_BR, old_BR)
            return loss * self.ranks.world, sums  # FSDP takes the mean over ranks, but the loss is a sum

        logprobs_BR, entropy_BR = self.policy(
            batch.inputs, batch.loss_mask_BR, self.config.temperature, loss=objective.by_token(batch, loss_of)
        )
        if not old:
            self._keep(chosen, micro_batch, logprobs_BR, moved=step > 0)
        loss, sums = loss_of(logprobs_BR, entropy_BR)
        loss.backward()  # type: ignore[no-untyped-call]
        return Forward(
            step=step,
            number=number,
            rollouts=tuple(dict.fromkeys(sample.rollout_id for sample in chosen)) if micro_batch else (),
            sums=sums,
            real_tokens=batch.inputs.tokens if micro_batch else 0,
            computed_tokens=batch.inputs.input_ids_BT.numel(),
            gradient_is_finite=gradient_is_finite(self._weights),
        )

    def _batch(self, samples: list[Sample], micro_batch: Indices) -> tuple[list[Sample], Batch]:
        """Return a micro-batch's samples and tensors.

        An empty micro-batch is padding. It gets the shortest sample of the mini-batch, but doesn't train on it.
        """
        chosen = [samples[i] for i in micro_batch] or [min(samples, key=len)]
        return chosen, self._collate(chosen, masked=not micro_batch)

    def _collate(self, samples: Sequence[Sample], *, masked: bool = False) -> Batch:
        """Return the samples as tensors in the config's layout, on this rank's device."""
        batch = collate(samples, pad_id=PAD_ID, layout=self.config.layout, masked=masked)
        return batch.to(self.ranks.device)

    def _reference(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of the model as it was before training."""
        with self._base() as model:
            return self._logprobs(batch, self.config.temperature, model)

    @contextmanager
    def _base(self) -> Iterator[PolicyModel]:
        """Yield the model as it was before training.

        Raises:
            ValueError: If all weights have been trained, and there is no copy of the original ones.
        """
        if self.policy.adapted:
            with self.policy.without_adapter():
                yield self.policy
        elif self._frozen is not None:
            yield self._frozen
        elif not self.optimizer_steps:
            yield self.policy
        else:
            raise ValueError(
                "base: all weights are trained (method='full'), and no copy of the original ones is kept; score before "
                "the first step, or set kl_coef above 0, which keeps a copy"
            )

    def _old(self, old: list[Tensor], number: int, logprobs_BR: Tensor) -> Tensor | None:
        """Return the log-probabilities for the denominator of a micro-batch's ratio, or None to use the engine's.

        `old` is the result of `_old_logprobs`, and `number` the micro-batch's index in it. If `old` is empty, the
        denominator is `logprobs_BR` without its gradient.
        """
        if self.config.old_logprobs == "engine":
            return None
        return old[number] if old else logprobs_BR.detach()

    def _sequences(self, samples: list[Sample], plan: list[Indices], old: list[Tensor]) -> dict[str, float]:
        """Return the log of each rollout's sequence ratio by rollout id, computed over all ranks and micro-batches.

        The sequence ratio is the geometric mean of the ratios of the rollout's trained tokens. `old` is the result of
        `_old_logprobs`.
        """
        found = []
        for number, micro_batch in enumerate(plan):
            chosen, batch = self._batch(samples, micro_batch)
            logprobs_BR = self._logprobs(batch, self.config.temperature)  # for padding too, so all ranks do it
            found += sample_log_ratios(chosen, batch, logprobs_BR, self._old(old, number, logprobs_BR))
        return rollout_log_ratios(self.ranks.gather(found))

    @torch.no_grad()
    def _logprobs(self, batch: Batch, temperature: float, model: PolicyModel | None = None) -> Tensor:
        """Return log-probabilities without gradient or entropy, of the policy or of another model."""
        model = model or self.policy
        logprobs_BR: Tensor = model(batch.inputs, batch.loss_mask_BR, temperature, entropy=False)[0]
        # FSDP shards the root's weights again only after a backward pass. Trained weights must be sharded now.
        if isinstance(model, FSDPModule) and not self.policy.adapted:
            model.reshard()
        return logprobs_BR

    def snapshot(self) -> Snapshot:
        """Return a copy of everything that the next step depends on, except the samples. Every rank must call it."""
        ranks, adapted = self.ranks, self.policy.adapted
        state = {
            "policy": policy_settings(self.policy, self.config),
            "base": str(self._model),
            "dtype": str(weight_type(self.config, ranks.device)).removeprefix("torch."),
            "optimizer_steps": self.optimizer_steps,
            "random": ranks.gather([random_state()]),
            "trained_once": self._once.state(),
            "critic": None if self._critic is None else self._critic.state(),
        }
        return Snapshot(
            rank=ranks.rank,
            world=ranks.world,
            state=state | (training_state(self.policy, self._optimizer) if adapted else {}),
            adapter=export_adapter(self.policy) if adapted else None,
            part=None if adapted else copied_part(self.policy, self._optimizer),
            name=ranks.broadcast(uuid4().hex[:8]),
        )

    def restore(self, state: Mapping[str, Any], folder: Path) -> None:
        """Resume from a checkpoint's state and folder, even on a different number of ranks.

        Raises:
            ValueError: If the state belongs to another policy, in which case nothing is changed.
        """
        refuse_other_policy(policy_settings(self.policy, self.config), state.get("policy"))
        if self.policy.adapted:
            restore_training(self.policy, self._optimizer, state)
        else:
            restore_part(self.policy, self._optimizer, folder)
        self.optimizer_steps = int(state["optimizer_steps"])
        self._once.load(state.get("trained_once", {}))
        self._critic = None
        if critic := state.get("critic"):
            self._critic = self._new_critic()
            self._critic.load(critic)
        if self.ranks.rank < len(state["random"]):
            restore_random(state["random"][self.ranks.rank])

    def score(self, token_ids: Sequence[int], sampling: Sampling, *, base: bool = False) -> Floats:
        """Return the log-probability (nats) of each id except the first, given the ids before it.

        With `base`, the log-probabilities are those of the model as it was before training.
        """
        sample = scored_sample(token_ids)
        self._limits.refuse([sample])
        with self._base() if base else nullcontext(self.policy) as model:
            logprobs: Floats = self._logprobs(self._collate([sample]), sampling.temperature, model)[0].cpu().numpy()
        return logprobs


def _number(norm: Tensor) -> float:
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
