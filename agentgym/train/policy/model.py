"""The policy as one module: a causal language model that is trained whole or with a LoRA adapter."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from agentgym.causal_lm.decoder import decoder_of
from agentgym.causal_lm.logit_map import PLAIN, LogitMap
from agentgym.hub import loading, refuse_missing
from agentgym.seeds import seed_for
from agentgym.train.batching.layouts import Inputs, Layout
from agentgym.train.fingerprint import base_fingerprint
from agentgym.train.loss.logprobs import token_logprobs
from agentgym.train.loss.token_loss import SampleUpstream, TokenLoss
from agentgym.train.policy.decoder import compute_by_sequence, rope_kinds, wrap_decoder
from agentgym.train.policy.opening import attend_in_rows, check_padded, logit_map_of
from agentgym.train.policy.targets import ALL_LINEAR, Coverage, coverage, find_targets


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a model's forward pass needs in order to be correct in a layout.

    Only a rank that has the model's weights can determine it. Ranks without weights receive it from rank 0.
    """

    layout: Layout = "padded"
    logits: LogitMap = PLAIN
    """How the model changes its output layer's logits, such as by a factor or a soft cap."""
    parts: tuple[str, ...] = ()
    """Names of the decoder parts that must be computed sequence by sequence."""


class PolicyModel(nn.Module):
    """The policy as a module, which computes the log-probabilities of trained tokens from the tensors of a batch.

    It is the root module that FSDP shards. Some parameters belong to no decoder layer: the embedding, the last norm
    and the output layer. FSDP gathers them in hooks around this module's forward pass, so all computation must happen
    inside that pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.base_fingerprint = ""
        """Hash of the base model (see `base_fingerprint`); empty until the weights are loaded."""
        self.way = Way()
        """What the model's forward pass needs, as found when the model was opened."""

    @property
    def causal(self) -> Any:
        """The Hugging Face model, without the adapter's wrapper."""
        model = cast("Any", self.model)
        return model.get_base_model() if self.adapted else model

    @property
    def coverage(self) -> Coverage:
        """How much of the decoder is trained, either through an adapter or directly."""
        return coverage(self.causal)

    @property
    def adapted(self) -> bool:
        """Whether an adapter is trained. If not, the model's own weights are trained, or no weights at all."""
        return hasattr(self.model, "peft_config")

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Disable the adapter inside the block, so that the forward pass is that of the base model."""
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        with cast("Any", self.model).disable_adapter():
            # PEFT freezes a disabled adapter. But FSDP2 determines the gradients' data type from the weights that are
            # trained in the very first forward pass.
            for weight in trained:
                weight.requires_grad_(True)
            yield

    def forward(
        self,
        inputs: Inputs,
        loss_mask_BR: Tensor,
        temperature: float = 1.0,
        *,
        entropy: bool = True,
        loss: TokenLoss | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probability and the entropy (nats, float32, [B, R]) of each trained token, 0 elsewhere.

        B is the number of samples, and R the length of the longest response. With `entropy=False` the entropy is 0
        everywhere, which saves a pass over the vocabulary. `loss` is the loss on which `backward` will be called. If
        the output layer is trained, passing the loss here saves one of the four multiplications by that layer.
        """
        states_NH, targets_N = self._states(inputs), inputs.target_N
        head, logits = self.causal.get_output_embeddings(), self.way.logits
        if not entropy:
            logprobs_N, _ = token_logprobs(
                states_NH, head, targets_N, temperature=temperature, entropy=False, logits=logits
            )
            logprobs_BR = inputs.scatter_to_samples(logprobs_N, loss_mask_BR)
            return logprobs_BR, torch.zeros_like(logprobs_BR)
        upstream = None if loss is None else SampleUpstream.of(loss, inputs, loss_mask_BR)
        logprobs_N, entropy_N = token_logprobs(
            states_NH, head, targets_N, temperature=temperature, logits=logits, upstream=upstream
        )
        return inputs.scatter_to_samples(logprobs_N, loss_mask_BR), inputs.scatter_to_samples(entropy_N, loss_mask_BR)

    def states(self, inputs: Inputs) -> Tensor:
        """Return, for each of the M trained tokens, the last layer's hidden state that predicts it.

        The result is float32, [M, hidden size]. The tokens are in the order of `Inputs.index_M`: by sample, and from
        left to right.
        """
        return self._states(inputs).index_select(0, inputs.index_M).float()

    def _states(self, inputs: Inputs) -> Tensor:
        """Return the last layer's hidden states that the N log-probabilities are computed from ([N, hidden size]).

        `Inputs.source_N` says which ones these are.
        """
        hidden_BTH: Tensor = decoder_of(self.causal)(**inputs.arguments(), use_cache=False).last_hidden_state
        return hidden_BTH.flatten(0, 1).index_select(0, inputs.source_N)


class AdapterShape(TypedDict):
    """Settings of a model's adapter."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    rslora: bool
    dora: bool


def load_policy(
    path: Path | str,
    *,
    dtype: torch.dtype,
    rank: int,
    alpha: int,
    seed: int,
    targets: tuple[str, ...] = (ALL_LINEAR,),
    rslora: bool = False,
    dora: bool = False,
    layout: Layout = "padded",
    device: torch.device | None = None,
) -> PolicyModel:
    """Load the base weights from `path`, freeze them, and add a LoRA adapter to the linear layers named by `targets`.

    The adapter's initial weights depend only on `seed`, and with them the policy equals the base (arXiv 2106.09685).
    The adapter is scaled by alpha / rank, or by alpha / sqrt(rank) with `rslora` (arXiv 2312.03732). `dora` trains
    the length of each weight row separately from its direction (arXiv 2402.09353).

    Raises:
        ValueError: If the model doesn't have a target, or the folder doesn't contain a complete model. Also if the
            log-probabilities in this `layout` differ from those of the model's own forward pass of each sequence
            alone.
    """
    base = _base(path, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for("adapter", seed))
        shape = AdapterShape(rank=rank, alpha=alpha, targets=targets, rslora=rslora, dora=dora)
        fingerprint = base_fingerprint(base)
        policy = _adapted(base, shape)
    return _ready(policy, fingerprint, layout, device)


def load_whole_policy(
    path: Path | str,
    *,
    dtype: torch.dtype,
    trained: bool = True,
    layout: Layout = "padded",
    device: torch.device | None = None,
) -> PolicyModel:
    """Load a model from `path` without an adapter.

    If `trained`, all of the language model's weights are trained, otherwise none.

    Raises:
        ValueError: As in `load_policy`.
    """
    base = _base(path, dtype)
    fingerprint = base_fingerprint(base)
    return _ready(_whole(base, trained=trained), fingerprint, layout, device)


def _ready(policy: PolicyModel, fingerprint: str, layout: Layout, device: torch.device | None) -> PolicyModel:
    """Move a loaded policy to its device, and find what its forward pass needs in this layout.

    Raises:
        ValueError: If this kind of model isn't supported, or if its results would be wrong in this layout.
    """
    policy.base_fingerprint = fingerprint
    if device is not None:
        policy.to(device)
    _refuse_kind(policy.causal)
    logits = logit_map_of(policy.causal)
    parts = check_padded(policy.causal) if layout == "padded" else attend_in_rows(policy.causal, (layout,))
    policy.way = Way(layout=layout, logits=logits, parts=parts)
    return policy


def _whole(base: Any, *, trained: bool) -> PolicyModel:
    """Return a policy without an adapter. If `trained`, its decoder and output layer are trained.

    Other parts, such as those for images, stay frozen.
    """
    base.requires_grad_(False)
    for part in (decoder_of(base), base.get_output_embeddings()) if trained else ():
        part.requires_grad_(True)
    return PolicyModel(base.eval())  # without dropout, as for adapters


def _refuse_kind(causal: Any) -> None:
    """Raise ValueError if the model isn't a decoder with an output layer, or if it has dynamic rotary positions."""
    name = causal.config.model_type
    if causal.get_output_embeddings() is None:
        raise ValueError(f"model: {name} has no output layer for logits; train a causal language model")
    if any("dynamic" in rope_kinds(part) for part in causal.modules()):
        raise ValueError(
            f"model: {name} has dynamic rotary positions, which depend on previously computed sequences; set "
            "rope_type to yarn in the model's config.json, or train another model"
        )
    if causal.config.is_encoder_decoder:
        raise ValueError(f"model: {name} has an encoder, which is not supported; train a causal language model")


def go_way(policy: PolicyModel, way: Way) -> None:
    """Prepare a policy for its layout as `way` says, without a check, so the policy needs no weights yet.

    `way` was found on a rank that has the weights.
    """
    policy.way, decoder = way, decoder_of(policy.causal)
    wrap_decoder(decoder)
    if way.layout == "padded":
        compute_by_sequence(decoder, way.parts)
    else:
        attend_in_rows(policy.causal, parts=way.parts)


def _base(path: Path | str, dtype: torch.dtype) -> Any:
    """Return the base model with all of its weights.

    Raises:
        ValueError: If weights are missing, or the folder contains an adapter. The message says what to do.
    """
    from transformers import AutoModelForCausalLM

    if (Path(path) / "adapter_config.json").exists():
        raise ValueError(f"model: {path} contains an adapter, which would be ignored; {MERGE_FIRST}")
    refuse_missing(path)
    with loading(path):
        _refuse_padding_id(path)
        base, found = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    if getattr(base, "_hf_peft_config_loaded", False):
        raise ValueError(f"model: {path} is an adapter; {MERGE_FIRST}")
    missing = sorted({*found["missing_keys"], *(str(key) for key in found["mismatched_keys"])})
    if missing:
        raise ValueError(
            f"model: the checkpoint in {path} lacks {len(missing)} of the model's weights, such as {missing[0]}, which "
            "would be random; use a checkpoint with all weights"
        )
    return base


def _refuse_padding_id(path: Path | str) -> None:
    """Raise ValueError if the config's padding id is above the vocabulary.

    With such an id, torch can't create the embedding.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    padding, vocabulary = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(padding, int) and isinstance(vocabulary, int) and padding >= vocabulary:
        raise ValueError(
            f"pad_token_id is {padding}, but the vocabulary's ids are 0 to {vocabulary - 1}; set it to null in the "
            "model's config.json"
        )


MERGE_FIRST = "set `model` to its base model, or merge the two into one folder with `agentgym merge` and use that"


def empty_policy(
    path: Path | str, *, dtype: torch.dtype, shape: AdapterShape | None, trained: bool = True
) -> PolicyModel:
    """Return the policy without its weights, on the meta device. Only the model's config is read.

    With a `shape`, the policy has an adapter, which is trained. Without a `shape`, it has none: all of the language
    model's weights are trained if `trained` is true, otherwise none.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with loading(path):
        config = AutoConfig.from_pretrained(path)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return _whole(base, trained=trained) if shape is None else _adapted(base, shape)


def _adapted(base: Any, shape: AdapterShape) -> PolicyModel:
    from peft import LoraConfig, get_peft_model

    targets = find_targets(base, shape["targets"])
    lora = LoraConfig(
        r=shape["rank"],
        lora_alpha=shape["alpha"],
        target_modules=list(targets.modules),
        target_parameters=list(targets.parameters) or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        use_rslora=shape["rslora"],
        use_dora=shape["dora"],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # PEFT uses the old name
        model = get_peft_model(base, lora)
    # Dropout must be off: on policy, the ratio to the engine's probabilities must be 1. Gradients don't need train
    # mode.
    return PolicyModel(model.eval())
