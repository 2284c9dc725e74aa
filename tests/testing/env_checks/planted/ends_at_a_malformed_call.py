"""An env that ends at the first malformed call."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"malformed call: a malformed call ended the rollout: continue the rollout"


class Planted(Looking):
    async def step(self, action: ag.Message) -> ag.StepResult:
        result = await super().step(action)
        return result._replace(truncated=bool(self.metrics["malformed_calls"]))
