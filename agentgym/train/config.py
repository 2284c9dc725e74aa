"""How to train, in one frozen object that a command line can fill."""

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

LEAST = {
    "lora_rank": 1,
    "warmup_steps": 0,
    "decay_steps": 1,
    "clip_high": 0,
    "kl_coef": 0,
    "correction_cap": 1,
    "rollouts_per_step": 1,
    "micro_tokens": 1,
    "temperature": 0,
}
"""Lowest value of each field that has one."""
MEANS = ("token", "sample", "rollout")
"""What a sum can be divided by, beside a number."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that changes what a step does to the weights; the defaults train the bundled tiny model."""

    lr: float = 2e-3
    """Learning rate after warm-up."""
    lora_rank: int = 16
    """Rank of the adapter."""
    lora_alpha: int = 32
    """The adapter's product is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers that have an adapter, q_proj for instance; all-linear is all but the output layer."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly."""
    dora: bool = False
    """Train the length of each row of a weight apart from its direction; for the embedded engine, servers refuse it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the gradient's mean and of its square."""
    weight_decay: float = 0.0
    """AdamW's weight decay, on the adapter."""
    warmup_steps: int = 3
    """Optimizer steps over which the learning rate rises from lr / warmup_steps to lr."""
    decay_steps: int | None = None
    """Optimizer steps over which it then falls to a tenth of lr, and stays there; None: constant."""
    decay: Literal["linear", "cosine"] = "linear"
    """How it falls."""
    loss: Literal["ppo", "cispo", "gspo", "gspo_rollout", "sft"] = "ppo"
    """Clipped ratio of each token; the ratio as a clipped weight; the clipped ratio of each token's segment, or of its
    rollout, which costs a forward more; or the cross-entropy of demonstrations."""
    clip_low: float = 0.2
    """A probability ratio under 1 - clip_low is not pushed further down."""
    clip_high: float = 0.2
    """A probability ratio over 1 + clip_high is not pushed further up."""
    dual_clip: float | None = None
    """Largest ratio that a token with a negative advantage weighs with, above 1; None: no bound."""
    kl_coef: float = 0.0
    """Weight of the divergence from the model without its adapter; above 0 it costs a forward more."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of that divergence: k1 and k2 have its gradient, k3 is GRPO's."""
    correction: Literal["none", "token", "sequence", "token_mask", "sequence_mask"] = "none"
    """Importance weights for tokens that an older policy sampled, in the place of the clipped ratio: truncated at
    correction_cap, or masked outside of 1/correction_cap..correction_cap; of each token, or of its segment."""
    correction_cap: float = 2.0
    """Largest importance weight."""
    grad_clip: float = 1.0
    """Largest gradient norm that a step is taken with; a longer gradient is scaled down to it."""
    normalise: Literal["token", "sample", "rollout"] | float = "token"
    """Mean over trained tokens, over samples, over rollouts (each weighs the same, however many segments it has),
    or the sum divided by this constant."""
    rollouts_per_step: int | None = None
    """Rollouts in one optimizer step, with all their samples; None: the whole batch is one."""
    layout: Literal["padded", "packed", "tree"] = "padded"
    """How a micro-batch's tokens stand in the forward: rows padded to the longest, one row without padding, or one row
    in which a prefix that samples share stands once. Changes memory and speed, never the gradient."""
    micro_tokens: int | None = 16_384
    """Tokens in one forward, as the layout counts them: rows x longest if padded, the sum if packed, each shared
    prefix once under tree. Changes memory and speed, never the gradient. None: no limit."""
    balance: Literal["length", "square", "flops"] = "flops"
    """What is made even between ranks, of a row of L tokens: L, L^2, or L + L^2 / (6 hidden)."""
    temperature: float = 1.0
    """Of the training log-probabilities; must be the one sampled at. 0 is treated as 1."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the base weights and, where the model is sharded, of its computation; adapter and optimizer are float32."""
    checkpointing: bool = False
    """Compute each layer again in the backward instead of keeping its activations: less memory, a forward more."""
    threads: int = 1
    """CPU threads; more than one is slower on a machine that other work shares."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu or cuda."""
    shard: bool = False
    """Shard with FSDP2 on a single process too; with more processes it always does."""
    offload: bool = False
    """Keep the shards and the optimizer of a GPU on the CPU; refused where there is no GPU or nothing is sharded."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(TrainConfig).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise ValueError(f"{name}: {getattr(self, name)!r} is none of {', '.join(get_args(hint))}")
        self._refuse_bounds()
        self._refuse_combinations()

    def _refuse_bounds(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            _require(value is None or value >= least, f"{name}: must be at least {least}, got {value}")
        _require(0 <= self.clip_low <= 1, f"clip_low: must be in 0..1, got {self.clip_low}")
        _require(
            self.dual_clip is None or self.dual_clip > 1,
            f"dual_clip: must be above 1, where a ratio has changed nothing yet, got {self.dual_clip}",
        )
        _require(
            self.normalise in MEANS if isinstance(self.normalise, str) else self.normalise > 0,
            f"normalise: {self.normalise!r} is none of {', '.join(MEANS)} or a number above 0",
        )

    def _refuse_combinations(self) -> None:
        _require(
            self.decay == "linear" or self.decay_steps is not None,
            "decay, decay_steps: a rate that falls needs the number of steps it falls over; set decay_steps",
        )
        _require(
            self.loss == "ppo" or self.correction == "none",
            f"loss, correction: {self.loss} takes no correction, it weighs off-policy tokens itself or has none; use "
            "correction='none', or loss='ppo'",
        )
        _require(
            self.dual_clip is None or (self.loss == "ppo" and self.correction == "none"),
            "dual_clip: bounds the clipped ratio of loss='ppo' with correction='none'; leave it out",
        )


def _require(law: bool, message: str) -> None:
    if not law:
        raise ValueError(message)
