"""A reward that reads JSON with care, and then relies on its shape."""

import json

import agentgym as ag
from agentgym.engines.scripted import Reply, call, say
from tests.testing.env_checks.looking import Looking

FOUND = (
    r"hostile: for a model that says JSON of another type, null \(and for \d+ more\) the rollout has no "
    r"reward: EnvError: Planted: reward 'right' raised TypeError: .*, at shape_of_an_answer.py:23 in right: score "
)
ORACLE: list[Reply] = [call("look"), say('{"answer": {"value": 42}}')]


class Planted(Looking):
    @ag.reward
    async def right(self) -> float:
        try:
            given = json.loads(self.answer or "")
        except (ValueError, RecursionError):
            return 0.0
        return float(given["answer"]["value"] == 42)
