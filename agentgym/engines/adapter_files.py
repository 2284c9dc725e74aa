"""Reads saved adapters: folders that PEFT, a trainer or a run wrote."""

import asyncio
from pathlib import Path
from typing import Any

from agentgym.engines.base import Engine
from agentgym.errors import EngineError
from agentgym.errors.extras import needs_extra
from agentgym.files.foreign.adapter import CONFIG, TEMPLATE, TENSORS, adapter_config, adapter_tensors
from agentgym.files.foreign.opening import is_file
from agentgym.types.weights import Adapter


async def opened_adapter(adapter: Any) -> Adapter | None:
    """Return the adapter. If it is given as a folder, load it first; if it is None, return None.

    Raises:
        ValueError: If the argument is of another type, or the folder can't be read.
    """
    if adapter is None or isinstance(adapter, Adapter):
        return adapter
    if isinstance(adapter, str | Path):
        return await asyncio.to_thread(read_adapter, adapter)
    raise ValueError(f"adapter: must be an Adapter, the folder of a saved one, or None, got {type(adapter).__name__}")


def read_adapter(folder: str | Path) -> Adapter:
    """Load the adapter that PEFT, a trainer or a run saved in a folder.

    Args:
        folder: The folder with the adapter's config and tensors.

    Returns:
        The adapter, with its tensors in CPU memory.

    Raises:
        ValueError: If a file is missing or can't be read. The message names the missing file.
    """
    folder = Path(folder)
    missing = [name for name in (CONFIG, TENSORS) if not is_file(folder / name)]
    if missing:
        hint = f"; {str(folder / 'adapter')!r} has both files" if is_file(folder / "adapter" / CONFIG) else ""
        if (folder / "config.json").is_file():
            hint = "; it contains a whole model: pass it to the engine as its model"
        raise ValueError(f"adapter: {str(folder)!r} has no {' and no '.join(missing)}{hint}")
    with needs_extra():
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    try:
        return Adapter(config=adapter_config(folder), tensors=load_file(adapter_tensors(folder)))
    except (OSError, ValueError, RuntimeError, MemoryError, SafetensorError) as error:
        raise ValueError(f"adapter: {str(folder)!r} cannot be read: {type(error).__name__}: {error}") from error


def chat_files(engine: Engine) -> dict[str, str]:
    """Return the text of an engine's chat template by its file's name, to write next to a policy trained with it.

    The result is empty if the engine's tokenizer has no single template, or isn't in this process.
    """
    try:
        tokenizer = getattr(engine.tokenizer, "tokenizer", None)
    except EngineError:  # on a cluster, a tokenizer that can't be sent stays in its process
        return {}
    template = getattr(tokenizer, "chat_template", None)
    return {TEMPLATE: template} if isinstance(template, str) else {}
