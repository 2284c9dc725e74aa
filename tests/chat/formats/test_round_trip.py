# ruff: noqa: RUF001  DeepSeek's marks are written with a fullwidth bar
"""What a family's real chat template writes for a call, its format reads back: whole, or as a malformed call."""

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st
from transformers import PreTrainedTokenizerFast

from agentgym.chat.formats import RESPONSE_FORMATS, response_format_of
from tests.support.family_tokenizers import byte_tokenizer, trl_template
from tests.support.response_formats import calls

FAMILIES = {
    "qwen2_5": ("hermes", "<|im_end|>"),
    "qwen3": ("hermes", "<|im_end|>"),
    "qwen3_instruct_2507": ("hermes", "<|im_end|>"),
    "qwen3_5_think": ("qwen_coder", "<|im_end|>"),
    "qwen3_5_nothink": ("qwen_coder", "<|im_end|>"),
    "qwen3_6": ("qwen_coder", "<|im_end|>"),
    "nemotron_3_nano": ("qwen_coder", "<|im_end|>"),
    "glm4moe": ("glm", "<|user|>"),
    "deepseekv3": ("deepseek_v3", "<｜end▁of▁sentence｜>"),
    "llama3_1": ("llama", "<|eot_id|>"),
    "gptoss": ("harmony", "<|call|>"),
}
"""The format of each of TRL's templates, and the mark that ends a turn with a call."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "description": "Write.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "at": {"$ref": "#/$defs/Place"},
                    "lines": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
                },
                "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
            },
        },
    }
]
ASK = {"role": "user", "content": "Write."}
TAGS = [
    *("<tool_call>", "</tool_call>", "<function=write>", "</function>", "<parameter=text>", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "```", "{", "}", '"', "\\"),
    *("<|channel|>", "<|message|>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "\n", " ", "x", "é"),
]
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]))
TAGGED = st.lists(st.sampled_from(TAGS), max_size=9).map("".join)
AMBIGUOUS = re.compile(
    r"</(?:parameter|arg_value)>(?:.*<(?:tool_call>|function=)|\s*<(?:parameter=|arg_key>))", re.DOTALL
)
"""A text that ends a value and begins another or a call, which no reader could tell from the template's own tags."""


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    return byte_tokenizer(trl_template(family), FAMILIES[family][1])


def written(family: str, arguments: dict[str, Any]) -> str:
    """Return the text that a model samples for a call, as the template writes it."""
    render, end = tokenizer_of(family).apply_chat_template, FAMILIES[family][1]
    given: Any = json.dumps(arguments, ensure_ascii=False) if family == "deepseekv3" else arguments
    function = {"name": "write", "arguments": given}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    asked = render([ASK], tools=TOOLS, tokenize=False)
    opening = render([ASK], tools=TOOLS, tokenize=False, add_generation_prompt=True).removeprefix(asked)
    whole = render([ASK, called], tools=TOOLS, tokenize=False).removeprefix(asked)
    body: str = whole.removeprefix(opening.partition("<think>")[0])
    return body.rpartition(end)[0] or body


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS | TAGGED, number=st.integers(-9, 9), lines=st.none() | st.lists(st.integers(0, 9), max_size=3))
def test_a_call_is_read_back_whole_or_is_malformed(
    family: str, text: str, number: int, lines: list[int] | None
) -> None:
    form, end = FAMILIES[family]
    assume(not AMBIGUOUS.search(text))
    assume(end not in text)
    arguments = {"text": text, "at": {"x": number}, "lines": lines}
    inside = None if "</think>" in trl_template(family) else False
    (read,) = calls(RESPONSE_FORMATS[form].parse(written(family, arguments), TOOLS, inside=inside))
    if isinstance(read["arguments"], str):
        assert form in ("qwen_coder", "glm")
        assert any(tag in text for tag in TAGS[:10])
    else:
        assert read == {"name": "write", "arguments": arguments}


def test_each_family_has_the_format_that_its_template_writes() -> None:
    for family, (form, _) in FAMILIES.items():
        found = response_format_of(trl_template(family))
        assert found is not None
        assert found.name == form
