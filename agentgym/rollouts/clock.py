"""Time limits of rollouts; they live below the tools, which have limits of their own."""

from agentgym.time_limits import off_the_clock, time_limit

__all__ = ["off_the_clock", "time_limit"]
