"""An env with a box, played in fake ones."""

import agentgym as ag
from agentgym.engines.scripted import call, say
from agentgym.sandboxes.fake.box import FakeBox, FakeBoxes

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "What is in the file?"},))
ORACLE = [call("bash", cmd="cat secret"), say("swordfish")]
OPTIONS = {"boxes": FakeBoxes(lambda: FakeBox({"cat secret": "swordfish"}))}


class Sound(ag.ToolEnv[ag.Task]):
    sandbox = ag.AnyBox()

    async def setup(self) -> None:
        await self.box.write({"secret": "swordfish"})

    @ag.tool
    async def bash(self, cmd: str) -> str:
        """Run a command."""
        return (await self.box.exec(cmd)).text()

    @ag.reward
    async def right(self) -> float:
        return float(self.answer == "swordfish")
