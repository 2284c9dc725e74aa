"""A tool without a docstring."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"(tool: )?tool 'smell' of Planted needs a docstring, which the model reads"


def planted() -> type[Looking]:
    class Planted(Looking):
        @ag.tool
        async def smell(self) -> str:
            return "nothing"

    return Planted
