"""The command `agentgym merge`: one plain model from a base and an adapter."""

import json
from pathlib import Path

import tyro

from agentgym.cli.output import say
from agentgym.errors import EngineError, boundary


def merge(adapter: tyro.conf.Positional[Path], out: tyro.conf.Positional[Path], base: str | None = None) -> int:
    """Write a base model and an adapter that was trained on it as one plain model, with its tokenizer.

    For example:
    $ agentgym merge runs/chase_grpo/20260801-101500/adapter merged
    $ agentgym merge adapter merged --base Qwen/Qwen3-0.6B

    Args:
        adapter: The folder of an adapter in PEFT's format, such as a run's adapter/.
        out: The folder to write.
        base: The base's folder or hub name; by default the one that the adapter names.
    """
    with boundary(EngineError, f"adapter {str(adapter)!r}"):
        config = json.loads((adapter / "adapter_config.json").read_text())
    base = base or config.get("base_model_name_or_path")
    if base is None:
        raise EngineError(f"adapter {str(adapter)!r} names no base model; give one with --base")
    from agentgym.train.policy.adapter_io import write_merged

    with boundary(EngineError, f"merge into {base!r}"):
        write_merged(base, adapter, out)
    say(str(out))
    return 0
