"""A reward that takes the bytes of a file for a number."""

import agentgym as ag
from agentgym.engines.scripted import Reply, call, say
from agentgym.testing import FakeSandbox, FakeSandboxPool
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"hostile: for a sandbox that holds nothing \(and for \d+ more\) the rollout has no reward: "
    r"EnvError: Planted: reward 'right' raised ValueError: .*, at text_of_a_file.py:22 in right: score "
)
ORACLE: list[Reply] = [call("look"), say("done")]
OPTIONS = {"sandboxes": FakeSandboxPool(lambda: FakeSandbox(files={"result": "42"})), "idle_is_right": True}


class Planted(Looking):
    sandbox_spec = ag.AnySandbox()

    @ag.reward
    async def right(self) -> float:
        text = (await self.sandbox.read("result")).decode("utf-8", "replace")
        return float(int(text) == 42)
