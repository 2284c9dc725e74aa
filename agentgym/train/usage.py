"""GPU usage of a training step: peak memory, and the fraction of the GPUs' peak FLOPs that is used (MFU)."""

from collections.abc import Sequence

import torch
from torch import nn

TERA = 1e12
PEAK_TFLOPS = {
    "B200": 2250,
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "GH200": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10": 125,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""Nominal peak of dense bfloat16 arithmetic with float32 accumulation, in TFLOP/s. The keys are parts of GPU names.

The first entry whose key is in the GPU's name is used. The peaks are specifications, not measurements.
"""


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the peak memory of this process's GPU since the last call, in GiB, or {} on a CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"train/gpu_memory_gib": peak / 2**30}


def mfu_metrics(
    model: nn.Module, lengths: Sequence[int], *, dtype: torch.dtype, seconds: float, gpus: int, device: torch.device
) -> dict[str, float]:
    """Return `train/mfu`: the FLOPs that the samples need, divided by the peak FLOPs of `gpus` GPUs in `seconds`.

    `lengths` are the samples' numbers of tokens, and `dtype` is the type that the model computes in. The result is {}
    if the GPU's peak or the model's FLOPs are unknown: on a CPU, for computation in another type than bfloat16, and
    for mixtures of experts.
    """
    peak = peak_flops(device)
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    if peak is None or dtype is not torch.bfloat16 or not seconds or _has_experts(config):
        return {}
    return {"train/mfu": needed_flops(model, lengths) / (seconds * gpus * peak)}


def needed_flops(model: nn.Module, lengths: Sequence[int]) -> float:
    """Count the FLOPs of one forward and backward pass over samples of these lengths in tokens, in any layout.

    For each token, a weight takes 2 FLOPs in the forward pass, 2 for the gradient of its input and, if it is trained,
    2 for its own gradient. Recomputation to save memory doesn't count. In each decoder layer, causal attention over L
    tokens takes 2 L^2 x heads x head size FLOPs in the forward pass, and twice that in the backward pass.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    used = [weight for weight in model.parameters() if weight is not embedding or weight is head]
    weights = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in used)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * head_dim
    return float(weights * sum(lengths) + attention * sum(length**2 for length in lengths))


def peak_flops(device: torch.device) -> float | None:
    """Return the peak bfloat16 FLOP/s of this GPU, or None on a CPU and for a GPU that isn't in PEAK_TFLOPS."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak * TERA for part, peak in PEAK_TFLOPS.items() if part in name), None)


def _has_experts(config: object) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(config, name, None) for name in names)
