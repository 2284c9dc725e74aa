"""How to train, in one frozen object that a command line can fill."""

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Positive = Annotated[int, Field(ge=1)]
"""A whole number of at least 1."""
NotNegative = Annotated[float, Field(ge=0)]
"""A finite number of at least 0."""
Above0 = Annotated[float, Field(gt=0)]
"""A finite number above 0."""
Decay = Annotated[float, Field(ge=0, lt=1)]
"""What is kept of a mean at each step."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False, strict=True))
class TrainConfig:
    """Everything that changes what a step does to the weights; the defaults train the bundled tiny model.

    Raises pydantic's ValidationError, a ValueError, that names the field: for a value out of its bounds, and for a
    setting that means nothing beside another.
    """

    lr: NotNegative = 2e-3
    """Learning rate after warm-up."""
    lora_rank: Positive = 16
    """Rank of the adapter."""
    lora_alpha: Positive = 32
    """The adapter's product is scaled by alpha / rank."""
    lora_targets: Annotated[tuple[str, ...], Field(strict=False)] = ("all-linear",)
    """Names of the linear layers that have an adapter, q_proj for instance; all-linear is all but the output layer."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly."""
    dora: bool = False
    """Train the length of each row of a weight apart from its direction; for the embedded engine, servers refuse it."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay of the gradient's mean and of its square. A resumed run takes these, the weight decay and the
    learning rate from here, not from its checkpoint."""
    weight_decay: NotNegative = 0.0
    """AdamW's weight decay, on the adapter."""
    warmup_steps: Annotated[int, Field(ge=0)] = 3
    """Optimizer steps over which the learning rate rises from lr / warmup_steps to lr."""
    decay_steps: Positive | None = None
    """Optimizer steps over which it then falls to a tenth of lr, and stays there; None: constant."""
    decay: Literal["linear", "cosine"] = "linear"
    """How it falls."""
    loss: Literal["ppo", "cispo", "gspo", "gspo_rollout", "sft"] = "ppo"
    """Clipped ratio of each token; the ratio as a clipped weight; the clipped ratio of each token's segment, or of its
    rollout, which costs a forward more; or the cross-entropy of demonstrations."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """A probability ratio under 1 - clip_low is not pushed further down."""
    clip_high: NotNegative = 0.2
    """A probability ratio over 1 + clip_high is not pushed further up."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that a token with a negative advantage weighs with, above 1; None: no bound."""
    kl_coef: NotNegative = 0.0
    """Weight of the divergence from the model without its adapter; above 0 it costs a forward more."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of that divergence: k1 and k2 have its gradient, k3 is GRPO's."""
    correction: Literal["none", "token", "sequence", "token_mask", "sequence_mask", "geometric_mask"] = "none"
    """Importance weights for tokens that an older policy sampled, in the place of the clipped ratio: truncated at
    correction_cap, or masked outside of 1/correction_cap..correction_cap; of each token, or of its segment;
    geometric_mask weighs each token by itself where the geometric mean over its segment is inside."""
    correction_cap: Annotated[float, Field(ge=1)] = 2.0
    """Largest importance weight."""
    grad_clip: Above0 = 1.0
    """Largest gradient norm that a step is taken with; a longer gradient is scaled down to it."""
    normalise: Literal["token", "sample", "rollout"] | Above0 = "token"
    """Mean over trained tokens, over samples, over rollouts (each weighs the same, however many segments it has),
    or the sum divided by this constant."""
    rollouts_per_step: Positive | None = None
    """Rollouts in one optimizer step, with all their samples; None: the whole batch is one."""
    layout: Literal["padded", "packed", "tree"] = "padded"
    """How a micro-batch's tokens stand in the forward: rows padded to the longest, one row without padding, or one row
    in which a prefix that samples share stands once. Changes memory and speed, never the gradient."""
    micro_tokens: Positive | None = 16_384
    """Tokens in one forward, as the layout counts them: rows x longest if padded, the sum if packed, each shared
    prefix once under tree. Changes memory and speed, never the gradient. None: no limit."""
    balance: Literal["length", "square", "flops"] = "flops"
    """What is made even between ranks, of a row of L tokens: L, L^2, or L + L^2 / (6 hidden)."""
    temperature: NotNegative = 1.0
    """Of the training log-probabilities; must be the one sampled at. 0 is treated as 1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the base weights and, where the model is sharded, of its computation; adapter and optimizer are float32."""
    checkpointing: bool = False
    """Compute each layer again in the backward instead of keeping its activations: less memory, a forward more."""
    threads: Positive = 1
    """CPU threads; more than one is slower on a machine that other work shares."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu or cuda."""
    shard: bool = False
    """Shard with FSDP2 on a single process too; with more processes it always does."""
    offload: bool = False
    """Keep the shards and the optimizer of a GPU on the CPU; refused where there is no GPU or nothing is sharded."""

    def __post_init__(self) -> None:
        for field, others, meant, what_to_do in self._beside():
            if getattr(self, field) != _DEFAULTS[field] and not meant:
                raise ValueError(f"{field}, {others}: {what_to_do}, or leave {field} at {_DEFAULTS[field]!r}")

    def _beside(self) -> list[tuple[str, str, bool, str]]:
        """Fields that mean something only beside others: the others, whether it does here, and what to do."""
        clips = self.correction == "none" and self.loss != "sft"
        clip_users = "a clip is of a ratio without a correction; set correction='none' and a loss that is not sft"
        return [
            (
                "decay",
                "decay_steps",
                self.decay_steps is not None,
                "a rate that falls needs the number of steps it falls over; set decay_steps",
            ),
            (
                "correction",
                "loss",
                self.loss == "ppo",
                f"{self.loss} takes no correction, it weighs off-policy tokens itself or has none; set loss='ppo'",
            ),
            ("correction_cap", "correction", self.correction != "none", "it bounds a correction; set correction"),
            (
                "dual_clip",
                "loss, correction",
                self.loss == "ppo" and self.correction == "none",
                "it bounds the clipped ratio of loss='ppo' with correction='none'; set these",
            ),
            ("clip_low", "loss, correction", clips, clip_users),
            ("clip_high", "loss, correction", clips, clip_users),
            ("kl_estimator", "kl_coef", self.kl_coef > 0, "it estimates a divergence that weighs 0; set kl_coef"),
        ]


_DEFAULTS = {field.name: field.default for field in fields(TrainConfig)}
