"""Adapters that a run has saved, read back."""

import json
from pathlib import Path

from agentgym.types import Adapter


def read_adapter(path: Path | str) -> Adapter:
    """The adapter in a folder in PEFT's format, as `engine.load_adapter` takes it.

    Raises ValueError, naming the folder, where it holds none.
    """
    from safetensors.torch import load_file

    folder = Path(path)
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        return Adapter(config=config, tensors=load_file(folder / "adapter_model.safetensors"))
    except FileNotFoundError as missing:
        raise ValueError(
            f"adapter: {folder} holds no adapter, {Path(missing.filename or folder).name} is missing"
        ) from None
