"""Settings of the trainer, as one frozen object that can be filled from the command line."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from agentgym.causal_lm import model_defaults
from agentgym.config_fields import Above0, Count, Name, NotNegative, Positive, config
from agentgym.hub import is_tiny

Loss: TypeAlias = Literal["ppo", "cispo", "gspo", "gspo_rollout", "sft"]
Divergence: TypeAlias = Literal["k1", "k2", "k3"]
ImportanceSampling: TypeAlias = Literal["none", "token", "sequence", "token_mask", "sequence_mask", "geometric_mask"]
LossAgg: TypeAlias = Literal["token", "sample", "rollout"] | Above0
Decay = Annotated[float, Field(ge=0, lt=1)]
"""Decay rate of a running mean: the fraction of the old mean that each step keeps, from 0 to below 1."""


@config(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of the trainer.

    Raises:
        ValueError: If a value has the wrong type or is out of bounds, or if a setting has no effect in combination with
            the others. The message names the field.
    """

    method: Literal["lora", "full"] = "lora"
    """Weights to train: lora trains an adapter on top of the frozen model, full trains every weight of the language
    model.
    """
    lr: NotNegative | None = None
    """Peak learning rate of AdamW, reached after the warm-up. If None, it depends on the model: 2e-3 for the tiny
    models that come with the library, otherwise 1e-4 with method lora and 1e-6 with method full.
    """
    lora_rank: Positive = 16
    """Rank of the LoRA adapter."""
    lora_alpha: Positive = 32
    """Scale of the LoRA adapter: its output is multiplied by lora_alpha / lora_rank, or with rslora by lora_alpha /
    sqrt(lora_rank).
    """
    lora_targets: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)] = ("all-linear",)
    """Names of the linear layers that get an adapter, such as q_proj. all-linear means every linear layer of the
    decoder except expert routers, projections whose weight a state-space kernel reads directly, and layers that PEFT
    mistakes for expert weights. The output layer never gets an adapter. experts means expert weights that are stored
    as one stacked tensor."""
    rslora: bool = False
    """Whether to scale the adapter by lora_alpha / sqrt(lora_rank) instead of lora_alpha / lora_rank, so that a higher
    rank doesn't learn more slowly.
    """
    dora: bool = False
    """Whether to train a DoRA adapter, which learns the length of each weight row separately. Only the embedded engine
    can sample from it.
    """
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of AdamW's running means of the gradient and of the squared gradient."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay of the trained weights. 0 turns it off."""
    warmup_steps: Count = 3
    """Number of optimizer steps over which the learning rate rises linearly from lr / warmup_steps to lr. 0 starts at
    lr."""
    decay_steps: Positive | None = None
    """Number of optimizer steps after the warm-up over which the learning rate falls to lr / 10 and stays there. None
    keeps it at lr."""
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of the learning rate's decay; applies only if decay_steps is set."""
    loss: Loss = "ppo"
    """Loss function. ppo clips each token's probability ratio. cispo weights each token's gradient by its clipped
    ratio. gspo clips the mean ratio of each segment. gspo_rollout clips the mean ratio of each rollout, at the cost of
    one extra forward pass. sft is the cross-entropy of demonstrations."""
    clip_eps_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower clip range: a token's probability ratio is clipped at 1 - clip_eps_low, below which the loss doesn't push
    it further down.
    """
    clip_eps_high: NotNegative = 0.2
    """Upper clip range: a token's probability ratio is clipped at 1 + clip_eps_high, above which the loss doesn't push
    it further up.
    """
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound on the probability ratio of tokens with a negative advantage (dual-clip PPO), above 1. None sets no
    bound."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence from the model as it was before training. 0 turns it off. A value above 0 costs one
    extra forward pass and, with method full, the memory of a second, frozen copy of the model.
    """
    kl_estimator: Divergence = "k3"
    """Estimator of the KL divergence; applies only if kl_coef is above 0. On policy, the gradients of k1 and k2 are
    unbiased estimates of the divergence's gradient. k3 is the estimator of GRPO, whose gradient is biased.
    """
    importance_sampling: ImportanceSampling = "none"
    """Importance weights of tokens that another policy sampled. They replace the clipped ratio or, if old_logprobs is
    trainer, multiply each token's clipped loss. none applies no correction. token and sequence truncate the ratio of
    the token or of its segment at is_cap. token_mask and sequence_mask set the weight to 0 if that ratio is outside
    1/is_cap..is_cap. geometric_mask does so if the segment's mean ratio is outside that range.
    """
    is_cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight of a token or a sequence, at least 1. The mask settings of importance_sampling accept
    ratios in 1/is_cap..is_cap."""
    old_logprobs: Literal["engine", "trainer"] = "engine"
    """Log-probabilities in the denominator of the clipped ratio. engine uses the engine's log-probabilities from when
    the token was sampled. trainer uses the trainer's log-probabilities from before the batch's first optimizer step.
    With trainer, importance_sampling corrects for the difference between the two, at the cost of one extra forward
    pass for every mini-batch except the first.
    """
    value_lr: NotNegative = 1e-3
    """Learning rate of AdamW for the value head, which is trained only if the run's credit is value. It stays
    constant.
    """
    value_epochs: Positive = 8
    """Number of optimizer steps of the value head in each training step, all on the hidden states from before that
    step."""
    value_clip: Above0 | None = None
    """Clip range of the value loss, in units of reward, as in PPO's reference implementation: in one training step, the
    loss pushes the value of a state at most this far from its old value. None sets no bound.
    """
    grad_clip: Above0 = 1.0
    """Maximum gradient norm; a larger gradient is scaled down to it."""
    loss_agg: LossAgg = "token"
    """Divisor of the loss. token takes the mean over trained tokens, sample the mean over samples, and rollout the mean
    over rollouts, in which each rollout has the same weight no matter how many segments it has. With a number, the
    sum over trained tokens is divided by that number.
    """
    rollouts_per_minibatch: Positive | None = None
    """Maximum number of rollouts per optimizer step; a rollout's samples stay together. None takes one step for the
    whole batch."""
    layout: Literal["padded", "packed", "tree"] = "padded"
    """Arrangement of the tokens in a forward pass. padded pads every sample to the length of the longest one; packed
    puts all samples in one row; tree also uses one row, but computes each shared prefix only once. The layout
    changes memory and speed, never the gradient.
    """
    max_tokens_per_microbatch: Positive | None = None
    """Maximum number of tokens per forward pass, as the layout counts them: samples x longest for padded, the sum for
    packed, each shared prefix once for tree. A longer sample gets a separate forward pass. The limit changes memory
    and speed, never the gradient. If None, it depends on the memory that the model's activations take, and on the
    memory of the machine or the GPU: from 256 to 16,384 tokens.
    """
    balance: Literal["length", "square", "flops"] = "flops"
    """Cost that is balanced between processes, for a sample of L tokens: length is L, square is L^2, and flops is L +
    L^2 / (6 hidden_size)."""
    temperature: NotNegative = 1.0
    """Temperature of sampling and of the log-probabilities in training, where 0 counts as 1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the base model's weights and, if the model is sharded, of its computation. Trained weights and the
    optimizer are always float32. auto means bfloat16 on a GPU that supports it natively, and float32 elsewhere."""
    gradient_checkpointing: bool = False
    """Whether to recompute each layer in the backward pass instead of storing its activations. This saves memory, at
    the cost of one extra forward pass.
    """
    threads: Positive | None = None
    """Number of CPU threads. If None, a model of more than 50 million weights that is trained on a CPU uses all
    processors that the process may use (OMP_NUM_THREADS, if that is set), and any other model uses one. More than one
    is slower on a machine that also runs other work.
    """
    device: Name = "auto"
    """Device of the trainer: cpu, cuda, cuda:N for one specific GPU, or auto, which picks a GPU if there is one."""
    shard: bool = False
    """Whether to shard the model with FSDP2 even on a single process. Several processes always shard it. A single
    process also shards it with method full in bfloat16: the weights are then stored in float32, and FSDP2 rounds them
    to bfloat16 for each forward pass.
    """
    replicas: Positive = 1
    """Number of copies of the sharded model (HSDP); must divide the number of processes. Each copy is sharded over
    neighboring processes, such as those of one node, and only gradients pass between copies. 1 shards over all
    processes. The number changes memory and network traffic, never the gradient.
    """
    offload: bool = False
    """Whether to keep shards, gradients and optimizer state in CPU memory. This is an error if there is no GPU or the
    model isn't sharded.
    """

    def __post_init__(self) -> None:
        for field, others, meant, what_to_do in self._beside():
            if getattr(self, field) != _DEFAULTS[field] and not meant:
                raise ValueError(f"{field}, {others}: {what_to_do}, or leave {field} at {_DEFAULTS[field]!r}")

    def _beside(self) -> list[tuple[str, str, bool, str]]:
        """Return the fields that have an effect only in combination with other fields.

        Returns:
            For each such field: its name, the names of the other fields, whether it has an effect in this config, and
            what to do if it has none.
        """
        apart = self.old_logprobs == "trainer"
        ratio = apart or self.importance_sampling == "none"  # no correction replaces the ratio
        clips = ratio and self.loss != "sft"
        clip_users = (
            "only a ratio without an importance weight is clipped; set importance_sampling='none' and a loss other "
            "than sft"
        )
        return [
            (
                "old_logprobs",
                "loss",
                self.loss != "sft",
                "demonstrations were not sampled, so they have no probability ratio; set another loss",
            ),
            (
                "old_logprobs",
                "importance_sampling",
                self.importance_sampling != "none",
                "without an importance weight nothing corrects for the gap between trainer and engine; set "
                "importance_sampling='token'",
            ),
            (
                "old_logprobs",
                "rollouts_per_minibatch",
                self.rollouts_per_minibatch is not None,
                "with one optimizer step per batch, the old policy is the same as the current one; set "
                "rollouts_per_minibatch",
            ),
            (
                "decay",
                "decay_steps",
                self.decay_steps is not None,
                "the decay needs a number of steps; set decay_steps",
            ),
            (
                "importance_sampling",
                "loss",
                self.loss == "ppo" or (apart and self.loss != "sft"),
                f"{self.loss} accepts no importance weight, because it corrects off-policy tokens itself or has none; "
                "set loss='ppo'",
            ),
            (
                "is_cap",
                "importance_sampling",
                self.importance_sampling != "none",
                "it caps importance weights; set importance_sampling",
            ),
            (
                "dual_clip",
                "loss, importance_sampling",
                self.loss == "ppo" and ratio,
                "it bounds the clipped ratio of loss='ppo' with importance_sampling='none'; set both",
            ),
            ("clip_eps_low", "loss, importance_sampling", clips, clip_users),
            ("clip_eps_high", "loss, importance_sampling", clips, clip_users),
            ("kl_estimator", "kl_coef", self.kl_coef > 0, "it estimates a divergence whose weight is 0; set kl_coef"),
            *((field, "method", self.method == "lora", _NO_ADAPTER) for field in _LORA),
        ]


def with_rate(config: TrainConfig, model: Path | str) -> TrainConfig:
    """Return the config with the model's default learning rate if its lr is None."""
    if config.lr is not None:
        return config
    return replace(config, lr=model_defaults.learning_rate(config.method, tiny=is_tiny(model)))


def peak_rate(config: TrainConfig) -> float:
    """Return the learning rate after the warm-up.

    Raises:
        ValueError: If the config's lr is None; `with_rate` fills it in.
    """
    if config.lr is None:
        raise ValueError("lr: the default depends on the model; set a number, or use `with_rate`")
    return config.lr


def learning_rate(config: TrainConfig, taken: int) -> float:
    """Return the learning rate of the optimizer step that follows `taken` steps.

    It warms up linearly, then stays constant or decays to a tenth.
    """
    peak = peak_rate(config)
    warm = min(1.0, (taken + 1) / max(config.warmup_steps, 1))
    if config.decay_steps is None:
        return peak * warm
    done = min(1.0, max(0, taken - config.warmup_steps) / config.decay_steps)
    fallen = done if config.decay == "linear" else (1 - math.cos(math.pi * done)) / 2
    return peak * warm * (1 - 0.9 * fallen)


WHOLE_SEGMENTS = {"gspo": "loss='gspo_rollout'", "sequence": "importance_sampling='token'"} | dict.fromkeys(
    ("sequence_mask", "geometric_mask"), "importance_sampling='token_mask'"
)
"""Losses and importance weights that need each segment whole in one sample. Each is mapped to a similar setting that
works without whole segments, which the error message suggests.
"""
_LORA = ("lora_rank", "lora_alpha", "lora_targets", "rslora", "dora")
_NO_ADAPTER = "it is a setting of the adapter, but method='full' trains no adapter; set method='lora'"
_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}
