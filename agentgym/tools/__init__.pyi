"""The public names of agentgym.tools, each with the module that defines it."""

from .dynamic import DynamicTool as DynamicTool, tools_of as tools_of

__all__: list[str]
