"""A judge that a rollout may ask once, in a reward; the check computes the reward twice."""

from pydantic import BaseModel

import agentgym as ag
from agentgym.engines.scripted import Scripted, say

TASK = ag.Task(id="t", prompt=({"role": "user", "content": "Write a poem."},))
ORACLE = [say("Roses are red.")]
OPTIONS = {"threshold": 0.5, "models": {"judge": Scripted(lambda text: say(f'{{"score": {int("Roses" in text)}}}'))}}


class Verdict(BaseModel):
    score: int


class Sound(ag.ToolEnv[ag.Task]):
    judge = ag.Judge(rubric="Score the poem.", response=Verdict, calls=1)

    @ag.reward
    async def liked(self) -> float:
        return float((await self.judge.ask(self.model("judge"), self.answer or "")).score)

    @ag.reward
    async def failed(self) -> float:
        return 0.0
