"""A reward that reads the answer as JSON of the shape that it hopes for."""

import json

import agentgym as ag
from agentgym.engines.scripted import Reply, call, say
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"hostile: for a model that says broken JSON \(and for \d+ more\) the rollout has no reward: "
    r"EnvError: Planted: reward 'right' raised JSONDecodeError: .*, at json_answer.py:19 in right: score "
)
ORACLE: list[Reply] = [call("look"), say('{"answer": {"value": 42}}')]


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        return float(json.loads(self.answer or "")["answer"]["value"] == 42)
