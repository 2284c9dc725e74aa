"""PettingZoo in both directions: `PettingZooGame` is an AEC env as an `ag.Game`, `ExportedGame` the reverse."""

from agentgym.errors.extras import needs_extra

with needs_extra():
    import pettingzoo  # noqa: F401

    from agentgym.bridges.pettingzoo.exported import ExportedGame
    from agentgym.bridges.pettingzoo.game import PettingZooGame

__all__ = ["ExportedGame", "PettingZooGame"]
