"""The command `agentgym merge`: makes a plain model of a run's trained weights."""

import os
from pathlib import Path

import tyro

from agentgym.cli.output import say
from agentgym.errors import EngineError, boundary
from agentgym.files.foreign.adapter import TEMPLATE, adapter_config, adapter_template, check_ranks
from agentgym.hub import find_model, refuse_unreachable


def merge(trained: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path], base: str | None = None) -> int:
    """Merge a base model and the weights trained on it into one plain model, with its tokenizer.

    For example:
    $ agentgym merge runs/chase_grpo/20260801-101500/adapter merged
    $ agentgym merge adapter merged --base Qwen/Qwen3-0.6B
    $ agentgym merge runs/full/checkpoints/step-000020 model

    Args:
        trained: The folder of an adapter in PEFT's format, such as a run's adapter/, or of a checkpoint of a run that
            trained the full model (train.method full).
        out: The folder to write, which must be empty or not exist.
        base: The base model's folder or hub name, or "tiny"; by default the one named by the adapter or checkpoint.
    """
    if (trained / "config.json").is_file():
        raise EngineError(f"{str(trained)!r} is a full model with nothing to merge; use it as `model`")
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise EngineError(f"out: {str(out)!r} already exists; choose a new folder, or remove that one first")
    if base is not None:
        base = _found(base)
    if (trained / "state.pt").is_file():
        from agentgym.train.snapshot import checkpoint_base, write_checkpoint_model

        with boundary(EngineError, f"checkpoint {str(trained)!r}"):
            begun = checkpoint_base(trained)
        base = base or _found(begun, trained)
        with boundary(EngineError, f"checkpoint {str(trained)!r}"):
            out.parent.mkdir(parents=True, exist_ok=True)
            write_checkpoint_model(trained, out, base=base)
    else:
        _write_adapter(trained, out, base)
    _name_stop_tokens(out)
    say(str(out))
    return 0


def _found(base: str, named_by: Path | None = None) -> str:
    """Return the folder or the hub name of a base model.

    Args:
        base: The model as named by --base or, without it, by the adapter or checkpoint.
        named_by: The adapter or checkpoint that names it; None if --base does.

    Raises:
        EngineError: If it isn't there or can't be fetched; the message says what to do.
    """
    try:
        found = str(find_model(base))
        refuse_unreachable(found, "base")
        return found
    except ValueError as error:
        then = f" (named by {named_by}; give its new place with --base)" if named_by is not None else ""
        raise EngineError(f"{error}{then}") from error


def _name_stop_tokens(model: Path) -> None:
    """Add the tokens with which the chat template ends a turn to the stop tokens that the model's files name."""
    from agentgym.chat.end_marks import name_stop_ids
    from agentgym.chat.tokenizer import chat_tokenizer

    try:
        stop_ids = chat_tokenizer(model).stop_ids
    except ValueError:
        return  # a model without a tokenizer or a chat template
    name_stop_ids(model, stop_ids)


def _write_adapter(adapter: Path, out: Path, base: str | None) -> None:
    if not os.path.lexists(adapter / "adapter_config.json"):
        inner = adapter / "adapter"
        meant = f"; the adapter of that run is {inner}" if (inner / "adapter_config.json").is_file() else ""
        raise EngineError(
            f"adapter {str(adapter)!r} contains no adapter_config.json; give the folder of an adapter{meant}"
        )
    with boundary(EngineError, f"adapter {str(adapter)!r}"):
        config = adapter_config(adapter)
    named = config.get("base_model_name_or_path")
    if base is None and not named:
        raise EngineError(f"adapter {str(adapter)!r} names no base model; give one with --base")
    base = base or _found(str(named), adapter)
    with boundary(EngineError, f"adapter {str(adapter)!r}"):
        check_ranks(adapter)
        template = adapter_template(adapter)
    from agentgym.train.policy.adapter_io import write_merged

    with boundary(EngineError, f"merge into {base!r}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_merged(base, adapter, out, {} if template is None else {TEMPLATE: template})
