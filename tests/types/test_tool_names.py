"""Names of tools: each one that a chat API does not take gets one that it takes, and no two tools get the same."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

import agentgym as ag
from agentgym.tools import DynamicTool, tools_of
from agentgym.types.tool_names import API, TOOL, SentNames


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {}}}


@given(st.lists(st.text("aB_-./ ä", max_size=70) | st.just("x" * 64), unique=True))
def test_the_names_that_are_sent_are_allowed_and_different_and_lead_back(names: list[str]) -> None:
    tools = [tool(name) for name in names]
    sent = [made["function"]["name"] for made in SentNames(tools).tools(tools)]
    assert all(map(API.allows, sent))
    assert len({*sent}) == len(names)
    assert [SentNames(tools).own(name) for name in sent] == names
    assert all(ours == theirs for ours, theirs in zip(names, sent, strict=True) if API.allows(ours))


def test_names_that_would_be_sent_as_one_are_told_apart() -> None:
    names = SentNames(map(tool, ["fs.read", "fs/read", "fs_read", "f" * 63 + ".a", "f" * 63 + ".b", "f" * 63 + "_"]))
    assert [names.sent(name) for name in ("fs.read", "fs/read", "fs_read")] == ["fs_read_2", "fs_read_3", "fs_read"]
    assert names.sent("f" * 63 + ".b") == "f" * 62 + "_3"


def test_a_name_that_the_model_invented_is_sent_in_an_allowed_form() -> None:
    assert SentNames([tool("look")]).sent("look up!") == "look_up_"
    assert SentNames([]).sent("") == "tool"
    assert SentNames([tool("a.b")]).own("unknown") == "unknown"


WRONG = {"look up": "look_up", "größe": "gr__e", "a" * 129: "a" * 128, "ask:now": "ask_now", "x\n": "x_"}


@pytest.mark.parametrize("name", WRONG)
def test_a_name_that_no_tool_may_have_is_refused_with_one_that_it_may_have(name: str) -> None:
    async def read() -> str:
        """Read."""
        return "text"

    named = type("Named", (), {"__module__": __name__, "read": ag.tool(name=name)(read)})
    said = "its name must have 1 to 128 characters, which may be a to z, digits, _, -, . and /; .*" + WRONG[name]
    with pytest.raises(ValueError, match=said):
        DynamicTool(name, "Read.", {"type": "object", "properties": {}}, read)
    with pytest.raises(ValueError, match=r"@ag\.tool\(name='" + WRONG[name]):
        type("Reads", (ag.ToolEnv,), dict(vars(named)))
    with pytest.raises(ValueError, match=said):
        tools_of(ag.tool(name=name)(read))


@pytest.mark.parametrize("name", ["fs.read/file-2", "A_b", "7", "a" * 128])
def test_every_name_that_mcp_allows_is_allowed(name: str) -> None:
    assert TOOL.allows(name)
    assert DynamicTool(name, "Read.", {"type": "object", "properties": {}}, print).name == name
