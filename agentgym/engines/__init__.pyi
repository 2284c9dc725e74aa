"""The public names of agentgym.engines, each with the module that defines it."""

from .adapter_files import read_adapter as read_adapter
from .base import Engine as Engine
from .sglang.engine import SGLangEngine as SGLangEngine

__all__: list[str]
