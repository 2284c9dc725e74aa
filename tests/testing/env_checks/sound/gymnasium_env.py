"""A Gymnasium env through the bridge."""

import agentgym as ag
from agentgym.bridges.gymnasium import GymnasiumTask, GymnasiumToolEnv
from agentgym.engines.scripted import call

TASK = GymnasiumTask(
    id="lake",
    prompt=(ag.Message(role="user", content="Walk from S to G; H is a hole."),),
    env_id="FrozenLake-v1",
    kwargs={"map_name": "4x4", "is_slippery": False},
)
ORACLE = [call("act", action=name) for name in ("down", "down", "right", "down", "right", "right")]


class Sound(GymnasiumToolEnv):
    action_names = ("left", "down", "right", "up")
