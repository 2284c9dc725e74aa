"""The public names of agentgym.run, each with the module that defines it."""

from .collector import Collector as Collector
from .metrics_logger import MetricsLogger as MetricsLogger

__all__: list[str]
