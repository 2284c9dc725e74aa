"""The command line of a recipe is `ag.main`; these names are for recipes that import them from here."""

from agentgym.run.command import main, settings

__all__ = ["main", "settings"]
