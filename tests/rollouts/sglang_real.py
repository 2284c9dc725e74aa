"""The real SGLang server on a CPU: where it is, and how to launch it."""

import os
import shlex
from pathlib import Path

import pytest

from agentgym.rollouts.sglang import SGLangConfig

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "recipes" / "checkpoints" / "chase_compaction"
VENV = Path(os.environ.get("AGENTGYM_SGLANG_VENV", ROOT / ".venv-sglang"))
"""The server's own virtual environment."""
PYTHON = VENV / "bin" / "python"
LAUNCH = ROOT / "tests" / "sglang_cpu" / "launch.py"


def real_config() -> SGLangConfig:
    """How to launch a real server; skips the test where there is none."""
    if not PYTHON.exists():
        pytest.skip(f"SGLang: no {PYTHON}; `make sglang` installs it, AGENTGYM_SGLANG_VENV names another one")
    os.environ["HF_HUB_OFFLINE"] = "1"
    return SGLangConfig(command=shlex.join([str(PYTHON), str(LAUNCH)]), slots=16)
