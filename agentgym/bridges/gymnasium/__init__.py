r"""Gymnasium in both directions: an agentgym env as a `gymnasium.Env`, and a Gymnasium env as a tool.

Export: `register_gymnasium(Chase)`, then `gymnasium.make("agentgym/Chase-v0")`. An action is the assistant's text,
and an observation is the messages that answer it::

    reset  ->  "user: Start at key 31. What is the value?"
    step('<tool_call>\n{"name": "python", "arguments": {"code": "get(31)"}}\n</tool_call>')  ->  "tool: 'see 52'"
    step("Answer: 17")  ->  "", 1.0, terminated

Import: `GymnasiumToolEnv`, an ordinary env whose single tool `act` takes a step of a Gymnasium env.
"""

from agentgym.errors.extras import needs_extra

with needs_extra():
    import gymnasium  # noqa: F401

    from agentgym.bridges.gymnasium.exported import ExportedEnv, register_gymnasium
    from agentgym.bridges.gymnasium.texts import CHARSET
    from agentgym.bridges.gymnasium.tool_env import GymnasiumTask, GymnasiumToolEnv

__all__ = ["CHARSET", "ExportedEnv", "GymnasiumTask", "GymnasiumToolEnv", "register_gymnasium"]
