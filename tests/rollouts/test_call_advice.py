"""A model whose call is malformed reads how its own format writes a call, and can correct it."""

import pytest

import agentgym as ag
from agentgym.chat.formats import RESPONSE_FORMATS
from agentgym.testing import Scripted
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout, Turn
from tests.support.response_formats import END, calls, tokenizer_of


class Looks(ag.ToolEnv[ag.Task]):
    limits = ag.Limits(turns=6)

    @ag.tool
    async def look(self, what: str) -> str:
        """Look."""
        return f"seen {what}"

    @ag.tool
    async def ask(self) -> str:
        """Ask a sub-agent."""
        async with self.fork("subagent", [Message(role="user", content="Look.")], tools=["look"]) as agent:
            return await agent.run()

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "done")


def turns(played: Rollout) -> list[Turn]:
    return [turn for segment in played.segments for turn in segment.turns]


def as_told(advice: str) -> str:
    """Return the call that a model makes if it follows the advice."""
    return advice.replace("NAME", "look").replace("KEY", "what").replace("VALUE", "x")


@pytest.mark.parametrize("form", RESPONSE_FORMATS)
async def test_a_model_that_follows_the_advice_after_a_malformed_call_makes_its_call(form: str) -> None:
    broken, told = f"{RESPONSE_FORMATS[form].call_marks[0][0]}look at", RESPONSE_FORMATS[form].example
    engine = Scripted([broken, as_told(told), "done"], tokenizer=tokenizer_of(form), end=END)
    played = await ag.rollout(Looks, ag.Task(id="1", prompt="go"), engine)
    first, second, _ = turns(played)
    assert first.env_messages[0]["content"].endswith(f"; write each call like this:\n{told}")
    assert calls(second.message) == [{"name": "look", "arguments": {"what": "x"}}]
    assert second.env_messages[0]["content"] == "seen x"
    assert (played.metrics["malformed_calls"], played.reward) == (1.0, 1.0)


async def test_a_sub_agent_is_told_in_its_own_format() -> None:
    example = RESPONSE_FORMATS["glm"].example
    replies = ["<tool_call>ask</tool_call>", "<tool_call>look at", as_told(example), "seen", "done"]
    played = await ag.rollout(
        Looks, ag.Task(id="1", prompt="go"), Scripted(replies, tokenizer=tokenizer_of("glm"), end=END)
    )
    messages = [message["content"] for turn in turns(played) for message in turn.env_messages]
    told = f"error: the tool call cannot be read; write each call like this:\n{example}"
    assert sorted(messages) == sorted([told, "seen x", "seen"])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "look", "arguments": {"what": "x"}}',
        '<tool_call>{"what": "x"}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    ],
)
async def test_a_model_whose_call_is_json_in_another_form_is_told_the_form(text: str) -> None:
    engine = Scripted([text, "done"], tokenizer=tokenizer_of("hermes"), end=END)
    played = await ag.rollout(Looks, ag.Task(id="1", prompt="go"), engine)
    example = RESPONSE_FORMATS["hermes"].example
    assert turns(played)[0].env_messages[0]["content"] == (
        f"error: the tool call cannot be read; write each call like this:\n{example}"
    )


async def test_a_call_that_is_not_json_is_told_the_error() -> None:
    broken = '<tool_call>\n{"name": "look", "arguments": {"what": x}}\n</tool_call>'
    played = await ag.rollout(Looks, ag.Task(id="1", prompt="go"), Scripted([broken, "done"]))
    content = turns(played)[0].env_messages[0]["content"]
    assert content.startswith("error: invalid JSON in the tool call: Expecting value: line 1 column")
    assert content.endswith(f"; write each call like this:\n{RESPONSE_FORMATS['hermes'].example}")
