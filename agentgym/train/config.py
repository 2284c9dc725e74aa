"""How to train, in one frozen object that a command line can fill."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that changes what a step does to the weights; the defaults train the bundled tiny model."""

    lr: float = 2e-3
    """Learning rate after warm-up."""
    lora_rank: int = 16
    """Rank of the adapter, on every linear layer but the output layer."""
    lora_alpha: int = 32
    """The adapter's product is scaled by alpha / rank."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the gradient's mean and of its square."""
    weight_decay: float = 0.0
    """AdamW's weight decay, on the adapter."""
    warmup_steps: int = 3
    """Optimizer steps over which the learning rate rises from lr / warmup_steps to lr."""
    decay_steps: int | None = None
    """Optimizer steps over which it then falls linearly to a tenth of lr, and stays there; None: constant."""
    clip_low: float = 0.2
    """A probability ratio under 1 - clip_low is not pushed further down."""
    clip_high: float = 0.2
    """A probability ratio over 1 + clip_high is not pushed further up."""
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
    """Of the base weights; the adapter is always float32."""
    threads: int = 1
    """CPU threads; more than one is slower on a machine that other work shares."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu or cuda."""
    shard: bool = False
    """Shard with FSDP2 on a single process too; with more processes it always does."""

    def __post_init__(self) -> None:
        if not self.correction_cap >= 1:
            raise ValueError(f"correction_cap: must be at least 1, got {self.correction_cap}")
