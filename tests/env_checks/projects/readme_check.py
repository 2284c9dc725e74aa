"""The check of the README's env."""

from my_env import Bugfix  # type: ignore[import-not-found]
from test_my_env import TASK  # type: ignore[import-not-found]

from agentgym.engines.scripted import call
from agentgym.testing import check_env


async def test_it_keeps_its_contract(no_leaks: None) -> None:
    await check_env(Bugfix, TASK, oracle=[call("bash", cmd="sed -i s/-/+/ add.py"), call("submit")])
