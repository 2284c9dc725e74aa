"""A tool's parameter without a type."""

import agentgym as ag
from tests.testing.env_checks.looking import Looking

FOUND = r"(tool: )?tool 'look' of Planted: parameter 'where' needs a type annotation"


def planted() -> type[Looking]:
    class Planted(Looking):
        @ag.tool
        async def look(self, where) -> str:  # type: ignore[no-untyped-def, override]
            """Look."""
            return "nothing"

    return Planted
