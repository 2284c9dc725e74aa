"""The real SGLang server on a CPU: its location, and one server that all tests share."""

import os
import shlex
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from agentgym.engines.sglang.engine import SGLangConfig
from agentgym.engines.sglang.launching.opening import open_servers

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "recipes" / "checkpoints" / "chase_compaction"
VENV = Path(os.environ.get("AGENTGYM_SGLANG_VENV", ROOT / ".venv-sglang"))
"""The server's separate virtual environment."""
PYTHON = VENV / "bin" / "python"
LAUNCH = ROOT / "tests" / "engines" / "sglang" / "cpu" / "launch.py"


def real_config() -> SGLangConfig:
    """Return a config that launches a real server; skip the test if none is installed."""
    if not PYTHON.exists():
        pytest.skip(f"SGLang: no {PYTHON}; `make sglang` installs it, AGENTGYM_SGLANG_VENV names another one")
    return SGLangConfig(command=shlex.join([str(PYTHON), str(LAUNCH)]), slots=16, startup_s=1200)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Yield the URL of one server for all tests that leave it unchanged."""
    config = real_config()
    async with AsyncExitStack() as stack:
        servers = await open_servers(stack, config, MODEL, tmp_path_factory.mktemp("server"), None)
        yield servers[0].client.url
