"""An env with a sandbox, run in fake ones."""

import agentgym as ag
from agentgym.engines.scripted import call, say
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "What is in the file?"},))
ORACLE = [call("bash", cmd="cat secret"), say("swordfish")]
OPTIONS = {"sandboxes": FakeSandboxPool(lambda: FakeSandbox({"cat secret": "swordfish"}))}


class Sound(ag.ToolEnv[ag.Task]):
    sandbox_spec = ag.AnySandbox()

    async def setup(self) -> None:
        await self.sandbox.write({"secret": "swordfish"})

    @ag.tool
    async def bash(self, cmd: str) -> str:
        """Run a command."""
        return (await self.sandbox.exec(cmd)).text()

    @ag.reward
    async def right(self) -> float:
        return float(self.answer == "swordfish")
