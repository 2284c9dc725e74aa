"""The settings of the trainer, in one frozen object that a command line can fill."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from agentgym.config_fields import Above0, Count, Name, NotNegative, Positive, config
from agentgym.hub import is_tiny

Loss: TypeAlias = Literal["ppo", "cispo", "gspo", "gspo_rollout", "sft"]
Divergence: TypeAlias = Literal["k1", "k2", "k3"]
ImportanceSampling: TypeAlias = Literal["none", "token", "sequence", "token_mask", "sequence_mask", "geometric_mask"]
LossAgg: TypeAlias = Literal["token", "sample", "rollout"] | Above0
Decay = Annotated[float, Field(ge=0, lt=1)]
"""The part of a running mean that is kept at each step."""


@config(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of the trainer.

    Raises ValueError, which names the field, for a value of another type or out of its bounds, and for a setting that
    has no effect beside another one.
    """

    method: Literal["lora", "full"] = "lora"
    """What is trained: an adapter beside the frozen model (lora), or every weight of the language model (full)."""
    lr: NotNegative | None = None
    """Learning rate of AdamW after the warm-up. None takes 2e-3 for the tiny models that come with the library, 1e-4
    for an adapter beside any other model, and 1e-6 for its whole weights."""
    lora_rank: Positive = 16
    """Rank of the LoRA adapter."""
    lora_alpha: Positive = 32
    """Scale of the LoRA adapter: its product is multiplied by lora_alpha / lora_rank."""
    lora_targets: Annotated[tuple[Name, ...], Field(strict=False, min_length=1)] = ("all-linear",)
    """Names of the linear layers that get an adapter, such as q_proj. all-linear names all but the output layer and
    the routers of experts; experts names the weights of experts that are kept as one tensor."""
    rslora: bool = False
    """Scale the adapter by lora_alpha / sqrt(lora_rank), so that a higher rank does not learn more slowly."""
    dora: bool = False
    """Train a DoRA adapter, which has a length for each row of a weight; only the embedded engine can sample from
    it."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay of the mean gradient and of the mean squared gradient."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay of the weights that are trained."""
    warmup_steps: Count = 3
    """Number of optimizer steps in which the learning rate rises from lr / warmup_steps to lr."""
    decay_steps: Positive | None = None
    """Number of optimizer steps after the warm-up in which the learning rate falls to lr / 10, where it stays; None
    keeps it at lr."""
    decay: Literal["linear", "cosine"] = "linear"
    """Shape of the fall of the learning rate, if decay_steps is set."""
    loss: Loss = "ppo"
    """Loss. ppo clips the probability ratio of each token; cispo weighs each token's gradient by its clipped ratio;
    gspo clips the mean ratio of each segment; gspo_rollout clips the mean ratio of each rollout, at the cost of one
    more forward; sft is the cross-entropy of demonstrations."""
    clip_eps_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Lower clip: the loss does not push a token's probability ratio further below 1 - clip_eps_low."""
    clip_eps_high: NotNegative = 0.2
    """Upper clip: the loss does not push a token's probability ratio further above 1 + clip_eps_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound on the probability ratio of tokens with a negative advantage (dual-clip PPO); must be above 1, and
    None sets no bound."""
    kl_coef: NotNegative = 0.0
    """Weight of the KL divergence from the model as it was before training; above 0 it costs one more forward, and with
    method full a second, frozen copy of the model."""
    kl_estimator: Divergence = "k3"
    """Estimator of the KL divergence if kl_coef is above 0: k1 and k2 have its gradient, k3 is the one in GRPO."""
    importance_sampling: ImportanceSampling = "none"
    """Importance weight of tokens that another policy sampled: instead of the clipped ratio, or beside it where
    old_logprobs is trainer. token and sequence truncate the ratio of the token or of its segment at is_cap;
    token_mask and sequence_mask set the weight to 0 outside of 1/is_cap..is_cap; geometric_mask does so
    where the mean ratio of the segment is outside."""
    is_cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight of a token or a sequence."""
    old_logprobs: Literal["engine", "trainer"] = "engine"
    """Log-probabilities that the clipped ratio is to: the engine's, as the token was sampled, or the trainer's before
    the first optimizer step of the batch. With trainer, importance sampling weighs how far these are from the engine's,
    at the cost of one more forward for all mini-batches but the first."""
    value_lr: NotNegative = 1e-3
    """Learning rate of AdamW of the value head, which credit value trains; it is constant."""
    value_epochs: Positive = 8
    """Optimizer steps of the value head in each step, all on the states of the batch as they were before it."""
    value_clip: Above0 | None = None
    """Most that a step's loss lets the value of a state move, as in PPO's first code; None sets no bound."""
    grad_clip: Above0 = 1.0
    """Largest gradient norm; a larger gradient is scaled down to it."""
    loss_agg: LossAgg = "token"
    """Divisor of the loss: the mean over trained tokens, over samples, or over rollouts (each weighs the same, however
    many segments it has); a number divides the sum over trained tokens."""
    rollouts_per_minibatch: Positive | None = None
    """Number of rollouts in one optimizer step, with all their samples; None takes one step for the whole batch."""
    layout: Literal["padded", "packed", "tree"] = "padded"
    """Layout of the tokens in a forward. padded makes every sample as wide as the longest; packed lays all samples in
    one row; tree does so with each shared prefix once. The layout changes memory and speed, never the gradient."""
    max_tokens_per_microbatch: Positive | None = 16_384
    """Most tokens in one forward, as the layout counts them: samples x longest if padded, their sum if packed, each
    shared prefix once if tree. It changes memory and speed, never the gradient. None sets no limit."""
    balance: Literal["length", "square", "flops"] = "flops"
    """Cost that is made even between processes, for a sample of L tokens: length is L, square is L^2, and flops is
    L + L^2 / (6 hidden)."""
    temperature: NotNegative = 1.0
    """Temperature of sampling and of the log-probabilities in training; in training 0 counts as 1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the base model's weights and, if the model is sharded, of its computation; what is trained and the
    optimizer are float32. auto is bfloat16 on a GPU that computes in it, and float32 elsewhere."""
    gradient_checkpointing: bool = False
    """Compute each layer again in the backward instead of keeping its activations: less memory, one more forward."""
    threads: Positive = 1
    """Number of CPU threads; more than one is slower on a machine that other work shares."""
    device: Name = "auto"
    """Device of the trainer: cpu, cuda, or auto, which is a GPU if there is one."""
    shard: bool = False
    """Shard the model with FSDP2 on a single process too; several processes always shard it, and so does method full
    in bfloat16, whose float32 weights FSDP2 rounds for each forward."""
    replicas: Positive = 1
    """Copies of the sharded model among the processes (HSDP): each is sharded over as many neighboring processes as
    remain for it, such as those of one node, and only gradients pass between copies. It must divide the number of
    processes; it changes memory and traffic, never the gradient."""
    offload: bool = False
    """Keep shards, gradients and optimizer in CPU memory; refused without a GPU, and if the model is not sharded."""

    def __post_init__(self) -> None:
        for field, others, meant, what_to_do in self._beside():
            if getattr(self, field) != _DEFAULTS[field] and not meant:
                raise ValueError(f"{field}, {others}: {what_to_do}, or leave {field} at {_DEFAULTS[field]!r}")

    def _beside(self) -> list[tuple[str, str, bool, str]]:
        """Return fields that have an effect only beside others: the others, whether it has one here, and what to do."""
        apart = self.old_logprobs == "trainer"
        ratio = apart or self.importance_sampling == "none"  # a ratio that a correction does not take the place of
        clips = ratio and self.loss != "sft"
        clip_users = (
            "only a ratio without a correction is clipped; set importance_sampling='none' and a loss that is not sft"
        )
        return [
            (
                "old_logprobs",
                "loss",
                self.loss != "sft",
                "nobody sampled a demonstration, so it has no ratio; set another loss",
            ),
            (
                "old_logprobs",
                "importance_sampling",
                self.importance_sampling != "none",
                "without a correction nothing weighs how far trainer and engine are apart; set "
                "importance_sampling='token'",
            ),
            (
                "old_logprobs",
                "rollouts_per_minibatch",
                self.rollouts_per_minibatch is not None,
                "in a batch of one optimizer step the policy before it is the policy itself; set "
                "rollouts_per_minibatch",
            ),
            (
                "decay",
                "decay_steps",
                self.decay_steps is not None,
                "a falling rate needs a number of steps; set decay_steps",
            ),
            (
                "importance_sampling",
                "loss",
                self.loss == "ppo" or (apart and self.loss != "sft"),
                f"{self.loss} takes no correction, it weighs off-policy tokens itself or has none; set loss='ppo'",
            ),
            (
                "is_cap",
                "importance_sampling",
                self.importance_sampling != "none",
                "it bounds a correction; set importance_sampling",
            ),
            (
                "dual_clip",
                "loss, importance_sampling",
                self.loss == "ppo" and ratio,
                "it bounds the clipped ratio of loss='ppo' with importance_sampling='none'; set these",
            ),
            ("clip_eps_low", "loss, importance_sampling", clips, clip_users),
            ("clip_eps_high", "loss, importance_sampling", clips, clip_users),
            ("kl_estimator", "kl_coef", self.kl_coef > 0, "it estimates a divergence that weighs 0; set kl_coef"),
            *((field, "method", self.method == "lora", _NO_ADAPTER) for field in _LORA),
        ]


def with_rate(config: TrainConfig, model: Path | str) -> TrainConfig:
    """Return the config with the learning rate that the model starts at if the config names none."""
    if config.lr is not None:
        return config
    return replace(config, lr=2e-3 if is_tiny(model) else 1e-4 if config.method == "lora" else 1e-6)


def peak_rate(config: TrainConfig) -> float:
    """Return the learning rate after the warm-up; ValueError if the config names none (`with_rate` chooses one)."""
    if config.lr is None:
        raise ValueError("lr: it depends on the model; give a number, or the config of `with_rate`")
    return config.lr


def learning_rate(config: TrainConfig, taken: int) -> float:
    """Return the rate of the next optimizer step after `taken` steps: warm-up, then constant or a decay to a tenth."""
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
"""Losses and corrections that need a whole segment, each with a setting that does not."""
_LORA = ("lora_rank", "lora_alpha", "lora_targets", "rslora", "dora")
_NO_ADAPTER = "it is a setting of the adapter, and method='full' trains none; set method='lora'"
_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}
