"""Images of boxes: what is put into them, what never reaches them, and what is left of a build."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agentgym.sandboxes.docker import Docker, why_no_docker
from agentgym.sandboxes.docker_client import connect

pytestmark = pytest.mark.docker
SECRET = "http://someone:hush@proxy.invalid:3128"


@pytest.fixture
def engine() -> Iterator[Any]:
    """A client of the engine that runs here."""
    if (why_not := why_no_docker()) is not None:
        pytest.skip(f"docker: {why_not}")
    with ExitStack() as stack:
        client = connect()
        stack.callback(client.close)
        yield client


@pytest.fixture
def proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's settings of the docker command, with proxies and their password."""
    settings = {"proxies": {"default": {"httpProxy": SECRET, "httpsProxy": SECRET, "noProxy": "hush"}}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


async def test_the_users_proxies_do_not_reach_a_box(engine: Any, proxies: None) -> None:
    async with Docker().open(1) as boxes, boxes.lease() as box:
        assert (await box.python("import os\n[n for n in os.environ if 'proxy' in n.lower()]")).stdout == "[]\n"
        assert "hush" not in (await box.exec("cat /proc/*/environ; env")).stdout
