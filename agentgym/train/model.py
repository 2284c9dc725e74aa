"""The policy as one module: a causal language model with a LoRA adapter, sharded where there are ranks."""

import warnings
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from agentgym.train.layout import Inputs
from agentgym.train.logprobs import token_logprobs

SCALED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class PolicyModel(nn.Module):
    """Batch tensors in, log-probabilities out.

    It is the root that FSDP shards: its hooks gather the parameters that no layer owns (embedding, norm,
    output layer), so all of the computation has to happen inside this forward.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def causal(self) -> Any:
        """The Hugging Face model inside the adapter's wrapper."""
        return cast("Any", self.model).get_base_model()

    def forward(self, inputs: Inputs, loss_mask_BR: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy (nats, float32, BR) of the trained tokens, 0 elsewhere; see `token_logprobs`."""
        hidden_BTH = self.causal.get_decoder()(**inputs.arguments(), use_cache=False).last_hidden_state
        trained = inputs.trained
        states_NH = hidden_BTH.flatten(0, 1).index_select(0, trained.source_N)
        head = self.causal.get_output_embeddings()
        logprobs_N, entropy_N = token_logprobs(states_NH, head, trained.target_N, temperature=temperature)
        return trained.spread(logprobs_N, loss_mask_BR), trained.spread(entropy_N, loss_mask_BR)


def load_policy(path: Path | str, *, dtype: torch.dtype, rank: int, alpha: int, seed: int) -> PolicyModel:
    """Base weights from `path`, frozen, and a LoRA adapter on every linear layer but the output layer.

    The adapter's start depends on `seed` alone, and is a policy equal to the base (arXiv 2106.09685).
    Raises ValueError for a model whose logits are more than its output layer, which this kit would get wrong.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    scaled = [name for name in SCALED_LOGITS if getattr(base.config, name, None) not in (None, 1, 1.0)]
    if scaled:
        raise ValueError(f"model: {path} changes its logits by {scaled[0]}, which is not supported")
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear",
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT asks by the old name
        torch.manual_seed(seed)
        model = get_peft_model(base, lora)
    # Dropout off: the ratio to the engine must be 1 on policy. Gradients do not need train mode.
    return PolicyModel(model.eval())


def shard(policy: PolicyModel, device: torch.device) -> None:
    """Shard every decoder layer and the root over all ranks, in place (FSDP2).

    It replaces the parameter objects: make the optimizer afterwards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in policy.causal.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
