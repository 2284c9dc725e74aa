# ruff: noqa: RUF001  DeepSeek's marks are written with a fullwidth bar
"""Each family's calls, reasoning and text are read back from what its models write, and malformed calls keep theirs."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentgym.rollouts.chat import HuggingFaceTokenizer
from agentgym.rollouts.families import FAMILIES, MARKS, family_of
from agentgym.testing import say
from agentgym.types import Message

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"at": {"type": "integer"}, "what": {"type": "string"}}},
        },
    }
]
ARGUMENTS = {"at": 3, "what": "a b"}
DSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CODER = """<tool_call>
<function=look>
<parameter=at>
3
</parameter>
<parameter=what>
a b
</parameter>
</function>
</tool_call>"""
GLM = """<tool_call>look
<arg_key>at</arg_key>
<arg_value>3</arg_value>
<arg_key>what</arg_key>
<arg_value>a b</arg_value>
</tool_call>"""
JSON = '{"at": 3, "what": "a b"}'
WRITTEN = {
    "hermes": f'so\n<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>',
    "qwen_coder": f"so\n{CODER}",
    "llama": f'<|python_tag|>{{"name": "look", "parameters": {JSON}}}',
    "mistral": f"so[TOOL_CALLS]look[ARGS]{JSON}",
    "mistral_list": f'so[TOOL_CALLS] [{{"name": "look", "arguments": {JSON}, "id": "call00100"}}]',
    "deepseek": f"so{DSEEK.format(f'look<｜tool▁sep｜>{JSON}')}",
    "glm": f"so\n{GLM}",
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{JSON}<|call|>",
}
MALFORMED = {
    "hermes": '<tool_call>\n{"name": look}\n</tool_call>',
    "llama": '<|python_tag|>{"name": "look", "parameters": {',
    "mistral": "[TOOL_CALLS]look[ARGS]{at: 3",
    "mistral_list": '[TOOL_CALLS] [{"name": "look"',
    "deepseek": DSEEK.format("look<｜tool▁sep｜>at=3"),
    "harmony": "<|channel|>commentary to=functions.look <|constrain|>json<|message|>at=3<|call|>",
}


def tokenizer(family: str) -> HuggingFaceTokenizer:
    """A tokenizer whose chat template writes the marks of the family."""
    core = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core)
    marks = "".join(MARKS[family])
    anchor = FAMILIES[family]["start_anchor"]
    opening = "{% if add_generation_prompt %}" + anchor + "{% endif %}"
    made.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + opening + "{# " + marks + " #}"
    )
    return HuggingFaceTokenizer(made)


def calls(message: Message) -> list[Any]:
    return [call["function"] for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_with_its_arguments_cast_by_the_schema(family: str) -> None:
    read = tokenizer(family).parse(WRITTEN[family], TOOLS)
    assert calls(read) == [{"name": "look", "arguments": ARGUMENTS}]
    assert read["content"] == ("" if family in ("llama", "harmony") else "so")


@pytest.mark.parametrize("family", ["hermes", "qwen_coder", "mistral", "deepseek", "glm"])
def test_several_calls_are_read_in_their_order(family: str) -> None:
    one = WRITTEN[family].removeprefix("so").strip()
    read = tokenizer(family).parse(one + one.replace("look", "find"), TOOLS)
    assert [call["name"] for call in calls(read)] == ["look", "find"]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_text_is_the_content(family: str) -> None:
    text = "<|channel|>final<|message|>an answer<|return|>" if family == "harmony" else "an answer"
    assert tokenizer(family).parse(text, TOOLS) == say("an answer")


@pytest.mark.parametrize("family", ["hermes", "qwen_coder", "deepseek", "glm"])
def test_thinking_is_reasoning(family: str) -> None:
    read = tokenizer(family).parse("<think>\nhm\n</think>\n\nyes", TOOLS)
    assert read == say("yes") | {"reasoning_content": "hm"}


def test_the_channels_of_harmony_are_told_apart() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    assert tokenizer("harmony").parse(text, TOOLS) == say("yes") | {"reasoning_content": "hm"}


def test_the_fenced_calls_of_earlier_deepseeks_are_read() -> None:
    text = DSEEK.format(f"function<｜tool▁sep｜>look\n```json\n{JSON}\n```")
    assert calls(tokenizer("deepseek").parse(text, TOOLS)) == [{"name": "look", "arguments": ARGUMENTS}]


def test_a_call_of_llama_needs_no_tag() -> None:
    text = f'{{"name": "look", "parameters": {JSON}}}'
    assert calls(tokenizer("llama").parse(text, TOOLS)) == [{"name": "look", "arguments": ARGUMENTS}]


@pytest.mark.parametrize("family", MALFORMED)
def test_a_malformed_call_keeps_its_text(family: str) -> None:
    read = tokenizer(family).parse(MALFORMED[family], TOOLS)
    assert read["content"] == MALFORMED[family]
    assert isinstance(calls(read)[0]["arguments"], str)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_is_known_by_its_marks(family: str) -> None:
    assert tokenizer(family).family == family


def test_a_template_with_other_marks_is_of_no_family() -> None:
    assert family_of("{{ messages }}") is None


def test_what_the_tokenizer_ships_comes_first() -> None:
    made = tokenizer("hermes").tokenizer
    made.response_template = FAMILIES["glm"]
    assert calls(HuggingFaceTokenizer(made).parse(GLM, TOOLS)) == [{"name": "look", "arguments": ARGUMENTS}]
