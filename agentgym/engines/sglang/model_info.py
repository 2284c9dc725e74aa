"""Facts about a served model that the engine needs, read from the model's files."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.chat.tokenizer import ChatTokenizer, chat_tokenizer
from agentgym.errors.extras import needs_extra
from agentgym.hub import loading
from agentgym.types.weights import Adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's tokenizer, vocabulary and stop ids. They are read once, when an engine opens."""

    tokenizer: ChatTokenizer
    vocabulary: int
    """Number of ids. An id outside 0 .. vocabulary - 1 would crash the server."""
    stop_ids: tuple[int, ...]
    """The ids that end a turn: those of the tokenizer, and those of the model's generation config. If the generation
    config has none, those of the model's config.
    """


def model_facts(model: str | Path, tokenizer: ChatTokenizer | None) -> ModelFacts:
    """Return the facts about a model, which is given as a folder or hub name.

    If `tokenizer` is given, the model's own tokenizer isn't loaded.
    """
    with needs_extra():
        from transformers import AutoConfig, GenerationConfig

    with loading(model):
        config = AutoConfig.from_pretrained(model).get_text_config()
    try:
        stops = _as_set(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:  # the model has no such file
        stops = set()
    stops = stops or _as_set(getattr(config, "eos_token_id", None))
    tokenizer = tokenizer or chat_tokenizer(model)
    stops |= getattr(tokenizer, "stop_ids", frozenset())
    return ModelFacts(
        tokenizer=tokenizer,
        vocabulary=int(config.vocab_size),
        stop_ids=tuple(sorted(stops)),
    )


def require_vocabulary(model: str | Path, vocabulary: int, served_model: str) -> None:
    """Raise ValueError if the model that a server serves doesn't have `vocabulary` ids, as `model` does.

    This is only checked if the names of the models differ and the served model is in a local folder.
    """
    if str(model) == served_model or not (Path(served_model) / "config.json").is_file():
        return
    with needs_extra():
        from transformers import AutoConfig
    other = int(AutoConfig.from_pretrained(served_model).get_text_config().vocab_size)
    if other != vocabulary:
        raise ValueError(
            f"model: {str(model)!r} has a vocabulary of {vocabulary} ids, but the server serves {served_model!r} with "
            f"a vocabulary of {other} ids; serve the same model"
        )


def context_limit(model: str | Path) -> int:
    """Return the model's number of positions."""
    with needs_extra():
        from transformers import AutoConfig

    return int(getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", 1 << 30))


def _as_set(ids: Any) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def served(adapter: Adapter) -> Adapter:
    """Return the adapter with a config that a server can use. Servers always scale adapters by alpha / r.

    Raises:
        ValueError: If SGLang can't serve the adapter.
    """
    config = dict(adapter.config)
    if config.get("use_dora"):
        raise ValueError(
            "adapter: use_dora is not supported by SGLang; train with dora=False, or use the embedded engine"
        )
    if config.get("target_parameters"):
        raise ValueError(
            f"adapter: SGLang would skip the tensors of {', '.join(sorted(config['target_parameters']))}, which "
            "contain all experts at once; train without `experts` in lora_targets"
        )
    if config.get("use_rslora"):
        config |= {"use_rslora": False, "lora_alpha": config["lora_alpha"] * float(config["r"]) ** 0.5}
    return replace(adapter, config=config)


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write an adapter as PEFT's two files into a new folder, for a server on the same file system."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    tensors = {name: np.ascontiguousarray(np.asarray(tensor)) for name, tensor in adapter.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(dict(adapter.config)))
