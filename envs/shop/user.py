"""A scripted user of the shop for tests and offline runs: it states its wish, answers questions, and says goodbye."""

import re

from agentgym.judges.simulated_user import STOP
from agentgym.testing import Reply, Scripted, say

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)
PATIENCE = 6
"""Number of agent messages after which the user gives up."""


def scripted_user(text: str) -> Reply:
    """Return the user's next message in a conversation whose system message describes the user."""
    turns = TURN.findall(text)
    who, said = turns[0][1], [words for role, words in turns[1:-1] if role == "assistant"]
    heard = turns[-2][1].lower()
    if not said:
        return say(_fact("You want", who))
    if len(said) == PATIENCE:
        return say(f"I give up. {STOP}")
    if "email" in heard or "postcode" in heard:
        return say(f"My email is {_fact('Your email', who)} and my postcode is {_fact('Your postcode', who)}.")
    return say("Yes, please." if heard.rstrip().endswith("?") else f"Thank you. {STOP}")


def open_user(model: object) -> Scripted:
    """Open the scripted user as an engine of a recipe.

    Use it as `engine=ag.CustomEngineConfig(name="envs.shop.user:open_user")`.
    """
    return Scripted(scripted_user)


def _fact(name: str, who: str) -> str:
    return re.search(f"^{name}: (.*)$", who, re.MULTILINE)[1]  # type: ignore[index]
