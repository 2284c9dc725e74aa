"""The critic: a value head on the policy's last hidden states. Its loss doesn't affect the policy."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import layer_norm, silu

from agentgym.seeds import seed_for
from agentgym.train.batching.batch import collate
from agentgym.train.batching.bins import Indices
from agentgym.train.config import TrainConfig
from agentgym.train.distributed import Ranks
from agentgym.train.policy.model import PolicyModel
from agentgym.types.arrays import Floats
from agentgym.types.sample import Sample, SampleKey

WIDTH = 256
"""Number of units in the head's hidden layer."""
GRADIENT = 1.0
"""Maximum norm of the head's gradient; a larger one is scaled down to it."""


class ValueHead(nn.Module):
    """Maps each state to a value: layer norm without a scale, one hidden layer, and one output.

    An untrained head returns 0.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(hidden, WIDTH), nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, states_MH: Tensor) -> Tensor:
        """Return the values [M] of M hidden states [M, hidden size]."""
        shape_MH = layer_norm(states_MH, states_MH.shape[-1:])
        values: Tensor = self.outer(silu(self.inner(shape_MH)))[:, 0]
        return values


class Critic:
    """A value head and its optimizer, identical on every rank. Every rank makes the same calls.

    The head's inputs are the policy's hidden states at the time `values` is called. No gradient flows back to the
    policy, so the policy learns exactly as it would from the same advantages without a head. The head can take many
    steps on hidden states that were computed once.
    """

    def __init__(self, policy: PolicyModel, config: TrainConfig, ranks: Ranks, *, seed: int) -> None:
        self._policy, self._config, self._ranks = policy, config, ranks
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_for("critic", seed))
            head = ValueHead(policy.causal.config.get_text_config().hidden_size)
        self._head = head.to(ranks.device)
        self._optimizer = torch.optim.AdamW(head.parameters(), lr=config.value_lr, betas=config.betas, weight_decay=0.0)
        self._kept: dict[SampleKey, tuple[Tensor, Tensor]] = {}
        """Hidden states and values of this rank's samples, stored until `learn` uses them."""
        self.asked: dict[SampleKey, int] = {}
        """For each sample of any rank, the number of its values that `learn` hasn't used yet."""

    @torch.no_grad()
    def values(self, samples: Sequence[Sample], plan: Sequence[Indices], pad_id: int) -> dict[SampleKey, Floats]:
        """Return the value of the state before each token that a sample's loss mask covers, on every rank.

        The hidden states are stored for `learn`, which uses those of the latest call. `plan` contains this rank's
        micro-batches.
        """
        self._kept, self.asked = {}, {}
        ranks, layout = self._ranks, self._config.layout
        found: list[tuple[SampleKey, Floats]] = []
        for part in plan:
            chosen = [samples[i] for i in part] or [min(samples, key=len)]
            batch = collate(chosen, pad_id=pad_id, layout=layout, masked=not part).to(ranks.device)
            states_MH = self._policy.states(batch.inputs)
            values_M = self._head(states_MH)
            counts = [int(sample.loss_mask.sum()) if part else 0 for sample in chosen]
            pairs = zip(torch.split(states_MH, counts), torch.split(values_M, counts), strict=True)
            for sample, (states, values) in zip(chosen if part else (), pairs, strict=False):
                key = (sample.rollout_id, sample.segment, sample.step)
                self._kept[key] = (states, values)
                found.append((key, values.cpu().numpy().astype(np.float32)))
        # FSDP shards the root's weights again only after a backward pass. Trained weights must be sharded now.
        if isinstance(self._policy, FSDPModule) and not self._policy.adapted:
            self._policy.reshard()
        given = dict(ranks.gather(found))
        self.asked = {key: len(values) for key, values in given.items()}
        return given

    def learn(self, returns: Mapping[SampleKey, Floats]) -> dict[str, float]:
        """Take `value_epochs` steps of the head toward these returns. Return metrics of the values before the steps.

        `returns` contains the returns of all ranks' samples. A sample has one return for each of its values, in their
        order. The returns must have passed `refuse_returns`.
        """
        kept, self._kept, self.asked = self._kept, {}, {}
        mine = sorted(kept.keys() & returns.keys())
        hidden, device = self._head.inner.in_features, self._ranks.device
        states_MH = torch.cat([kept[key][0] for key in mine] or [torch.zeros(0, hidden, device=device)])
        old_M = torch.cat([kept[key][1] for key in mine] or [torch.zeros(0, device=device)])
        targets_M = torch.from_numpy(np.concatenate([returns[key] for key in mine] or [np.zeros(0, np.float32)]))
        targets_M = targets_M.to(device, torch.float32)
        count = sum(len(values) for values in returns.values())
        if not count:
            return {}
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.value_lr
        done = sum(self._step(states_MH, old_M, targets_M, count) for _ in range(self._config.value_epochs))
        pairs = self._ranks.gather(list(zip(old_M.tolist(), targets_M.tolist(), strict=True)))
        metrics = value_metrics(np.array(pairs))
        return metrics | {"train/value_skipped_steps": float(self._config.value_epochs - done)}

    def _step(self, states_MH: Tensor, old_M: Tensor, targets_M: Tensor, count: int) -> bool:
        """Take one step of the head on the turns of all ranks.

        Returns False, with the head unchanged, if the gradient isn't finite.

        Args:
            states_MH: Hidden states before this rank's M turns.
            old_M: Their values before the training step.
            targets_M: Their returns.
            count: Number of turns of all ranks, by which the loss is divided.
        """
        loss = value_loss(self._head(states_MH), old_M, targets_M, clip=self._config.value_clip) / count
        weights = list(self._head.parameters())
        gradients = torch.autograd.grad(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            if self._ranks.world > 1:
                dist.all_reduce(gradient)
            weight.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(weights, GRADIENT)
        finite = math.isfinite(float(norm))
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return finite

    def state(self) -> dict[str, Any]:
        """Return a CPU copy of the head's weights and the optimizer's moments, for `load`."""
        moments = {
            number: {name: value.detach().cpu().clone() for name, value in kept.items()}
            for number, kept in self._optimizer.state_dict()["state"].items()
        }
        weights = {name: weight.detach().cpu().clone() for name, weight in self._head.state_dict().items()}
        return {"weights": weights, "moments": moments}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`. Values that `learn` hasn't used yet are discarded."""
        self._head.load_state_dict(state["weights"])
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["moments"], "param_groups": groups})
        self._kept, self.asked = {}, {}


def refuse_returns(asked: Mapping[SampleKey, int], returns: Mapping[SampleKey, Floats]) -> None:
    """Raise ValueError for returns that `Critic.learn` can't use.

    Call this function before anything is trained. Its result is the same on every rank.

    Args:
        asked: Number of values that each sample got.
        returns: The returns of each sample.
    """
    if asked and not returns:
        raise ValueError(
            "samples: the critic computed values, but these samples have no returns for it to learn from; train on the "
            "SampleBatch of `value_samples` itself, because a slice or a list of it has no returns, or discard the "
            "values with `trainer.values([])`"
        )
    if missing := [key for key in returns if key not in asked]:
        raise ValueError(
            f"samples: the critic has no values for {missing[0]}: a step uses up the latest values; call "
            "`value_samples` again for each step"
        )
    for key, given in returns.items():
        if np.ndim(given) != 1:
            raise ValueError(f"returns: {key} must have one number for each value, got {given!r}")
        if len(given) != asked[key]:
            raise ValueError(f"returns: {key} must have {asked[key]} numbers, one for each value, got {len(given)}")
        if not np.isfinite(given).all():
            raise ValueError(f"returns: {key} must have finite numbers, got {given}")


def value_loss(values_M: Tensor, old_M: Tensor, targets_M: Tensor, *, clip: float | None) -> Tensor:
    """Return the sum of the values' squared errors.

    With `clip`, each value is also clipped to within `clip` of the old value, and the larger one of the two errors
    counts, as in PPO's reference implementation (arXiv 2005.12729, section 3).
    """
    errors_M = (values_M - targets_M).square()
    if clip is not None:
        near_M = old_M + (values_M - old_M).clamp(-clip, clip)
        errors_M = torch.maximum(errors_M, (near_M - targets_M).square())
    return errors_M.sum()


def value_metrics(pairs: np.ndarray) -> dict[str, float]:
    """Return metrics of predicted values (first column) against observed returns (second column).

    The explained variance is 1 - Var(return - value) / Var(return). It is 1 for perfect predictions, 0 for a
    constant, and below 0 for predictions that are worse than a constant. If all returns are equal, it is NaN.
    """
    values, returns = pairs[:, 0], pairs[:, 1]
    spread = float(returns.var())
    return {
        "train/value_loss": float(((returns - values) ** 2).mean()),
        "train/value_mean": float(values.mean()),
        "train/explained_variance": 1 - float((returns - values).var()) / spread if spread > 0 else math.nan,
    }
