# ruff: noqa: RUF001  DeepSeek's special tokens are written with a fullwidth bar
"""Each response format: calls, reasoning and text are read back, and malformed calls keep their text."""

import re
from typing import Any

import pytest

from agentgym.chat.formats import RESPONSE_FORMATS, response_format_of
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.engines.scripted import ByteTokenizer, say
from tests.support.response_formats import ARGUMENTS, CALLED, TOOLS, calls, tokenizer_of as tokenizer

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
AN_ARGUMENT = re.compile(
    r"""(?x) "what":\ "a\ b" | what='a\ b' | what:<\|"\|>a\ b<\|"\|> | ]<]minimax\[>\[<what>a\ b]<]minimax\[>\[</what>
    | <(?:｜DSML｜)?parameter\ name="what"[^>]*>a\ b</(?:｜DSML｜)?parameter>\n
    | <parameter=what>\na\ b\n</parameter>\n | <arg_key>what</arg_key>\n<arg_value>a\ b</arg_value>\n"""
)
"""The argument `what` in the calls of all formats."""
DSML = """<｜DSML｜BLOCK>
<｜DSML｜invoke name="look">
<｜DSML｜parameter name="at" string="false">3</｜DSML｜parameter>
<｜DSML｜parameter name="what" string="true">a b</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜BLOCK>"""
FENCED = f"\n```json\n{JSON}\n```"
WRITTEN = {
    "hermes": f'so\n<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>',
    "qwen_coder": f"so\n{CODER}",
    "llama": f'<|python_tag|>{{"name": "look", "parameters": {JSON}}}',
    "mistral": f"so[TOOL_CALLS]look[ARGS]{JSON}",
    "mistral_list": f'so[TOOL_CALLS] [{{"name": "look", "arguments": {JSON}, "id": "call00100"}}]',
    "deepseek_v3": f"so{DSEEK.format(f'function<｜tool▁sep｜>look{FENCED}')}",
    "deepseek": f"so{DSEEK.format(f'look<｜tool▁sep｜>{JSON}')}",
    "glm": f"so\n{GLM}",
    "minimax": 'so\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">3</parameter>\n'
    '<parameter name="what">a b</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": 'so\n[<tool_call>[<invoke name="look">[<at>3[</at>[<what>a b[</what>[</invoke>[</tool_call>'.replace(
        "[<", "]<]minimax[>[<"
    ),
    "dsml": f"so\n\n{DSML.replace('BLOCK', 'function_calls')}",
    "dsml_v4": f"so\n\n{DSML.replace('BLOCK', 'tool_calls')}",
    "kimi": "so<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "gemma": 'so<|tool_call>call:look{at:3,what:<|"|>a b<|"|>}<tool_call|>',
    "lfm2": "so<|tool_call_start|>[look(at=3, what='a b')]<|tool_call_end|>",
    "llama4": "so<|python_start|>[look(at=3, what='a b')]<|python_end|>",
    "functools": f'so functools[{{"name": "look", "arguments": {JSON}}}]',
    "harmony": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{JSON}<|call|>",
}
MALFORMED = {
    "hermes": '<tool_call>\n{"name": look}\n</tool_call>',
    "llama": '<|python_tag|>{"name": "look", "parameters": {',
    "mistral": "[TOOL_CALLS]look[ARGS]{at: 3",
    "mistral_list": '[TOOL_CALLS] [{"name": "look"',
    "deepseek_v3": DSEEK.format("function<｜tool▁sep｜>look\n```json\nat=3\n```"),
    "deepseek": DSEEK.format("look<｜tool▁sep｜>at=3"),
    "harmony": "<|channel|>commentary to=functions.look <|constrain|>json<|message|>at=3<|call|>",
}


@pytest.mark.parametrize("form", RESPONSE_FORMATS)
def test_a_calls_arguments_are_converted_by_the_schema(form: str) -> None:
    read = tokenizer(form).parse(WRITTEN[form], TOOLS)
    assert calls(read) == [{"name": "look", "arguments": ARGUMENTS}]
    assert read["content"] == ("" if form in ("llama", "harmony") else "so")


@pytest.mark.parametrize("form", ["hermes", "qwen_coder", "mistral", "deepseek_v3", "deepseek", "glm"])
def test_several_calls_are_parsed_in_order(form: str) -> None:
    one = WRITTEN[form].removeprefix("so").strip()
    read = tokenizer(form).parse(one + one.replace("look", "find"), TOOLS)
    assert [call["name"] for call in calls(read)] == ["look", "find"]


@pytest.mark.parametrize("form", RESPONSE_FORMATS)
def test_plain_text_is_the_content(form: str) -> None:
    text = "<|channel|>final<|message|>an answer<|return|>" if form == "harmony" else "an answer"
    assert tokenizer(form).parse(text, TOOLS) == say("an answer")


@pytest.mark.parametrize("form", [form for form in RESPONSE_FORMATS if form not in ("harmony", "gemma")])
def test_thinking_is_parsed_as_reasoning(form: str) -> None:
    read = tokenizer(form).parse("<think>\nhm\n</think>\n\nyes", TOOLS)
    assert read == say("yes") | {"reasoning_content": "hm"}


def test_harmonys_channels_are_distinguished() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    assert tokenizer("harmony").parse(text, TOOLS) == say("yes") | {"reasoning_content": "hm"}


@pytest.mark.parametrize("form", ["deepseek_v3", "deepseek"])
@pytest.mark.parametrize("written", ["deepseek_v3", "deepseek"])
def test_deepseek_models_may_write_the_form_of_the_others(form: str, written: str) -> None:
    assert calls(tokenizer(form).parse(WRITTEN[written], TOOLS)) == CALLED


def test_a_llama_call_needs_no_tag() -> None:
    text = f'{{"name": "look", "parameters": {JSON}}}'
    assert calls(tokenizer("llama").parse(text, TOOLS)) == [{"name": "look", "arguments": ARGUMENTS}]


@pytest.mark.parametrize("form", MALFORMED)
def test_a_malformed_call_keeps_its_text(form: str) -> None:
    read = tokenizer(form).parse(MALFORMED[form], TOOLS)
    assert read["content"] == MALFORMED[form]
    assert isinstance(calls(read)[0]["arguments"], str)


@pytest.mark.parametrize("form", ["qwen_coder", "glm"])
def test_a_call_with_many_arguments_is_parsed(form: str) -> None:
    one = {"qwen_coder": "<parameter=n{}>1</parameter>", "glm": "<arg_key>\nn{}\n</arg_key>\n<arg_value>1</arg_value>"}
    head, end = ("<tool_call>look", "") if form == "glm" else ("<tool_call><function=look>", "</function>")
    written = "".join(one[form].format(n) for n in range(200))
    read = tokenizer(form).parse(f"{head}{written}{end}</tool_call>", TOOLS)
    assert calls(read) == [{"name": "look", "arguments": {f"n{n}": "1" for n in range(200)}}]


@pytest.mark.parametrize("form", WRITTEN)
def test_a_call_with_an_argument_twice_is_malformed_and_neither_value_is_dropped(form: str) -> None:
    argument = AN_ARGUMENT.search(WRITTEN[form])
    assert argument is not None
    separator = ", " if argument[0][0] in '"w' else "," if form == "gemma" else ""
    text = WRITTEN[form].replace(argument[0], separator.join([argument[0], argument[0].replace("a b", "c d")]))
    read = tokenizer(form).parse(text, TOOLS)
    (call,) = calls(read)
    assert isinstance(call["arguments"], str)
    assert [value in call["arguments"] for value in ("a b", "c d")] == [True, True]
    assert read["content"] == text


def test_a_glm_key_may_contain_spaces() -> None:
    text = "<tool_call>look<arg_key> first name </arg_key><arg_value>x</arg_value></tool_call>"
    assert calls(tokenizer("glm").parse(text, TOOLS)) == [{"name": "look", "arguments": {"first name": "x"}}]


ODD: list[Any] = [None, 5, "x", [], [1], {}, {"at": 5}, {"at": {"type": ["integer", 5]}}, {"at": {"anyOf": 5}}]
"""Values that an agent may write where a schema has its properties."""


@pytest.mark.parametrize("form", RESPONSE_FORMATS)
def test_no_tool_schema_makes_the_parser_raise(form: str) -> None:
    reads, text = tokenizer(form), WRITTEN[form].replace('"at": 3', '"at": "3"')
    schemas: list[Any] = [
        *ODD,
        *({"properties": odd} for odd in ODD),
        {"type": "object", "properties": {"at": "string"}},
    ]
    for schema in schemas:
        read = reads.parse(text, [{"type": "function", "function": {"name": "look", "parameters": schema}}])
        assert (read["role"], len(calls(read))) == ("assistant", 1), schema


@pytest.mark.parametrize("form", RESPONSE_FORMATS)
def test_a_template_is_recognized_by_its_special_tokens(form: str) -> None:
    assert tokenizer(form).response_format is RESPONSE_FORMATS[form]


def test_a_template_with_other_special_tokens_belongs_to_no_family() -> None:
    assert response_format_of("{{ messages }}") is None


OWN = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "tool_calls": {
            "open_pattern": r"CALL (?P<name>\w+)",
            "close": "END",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def test_the_tokenizers_own_response_template_takes_precedence() -> None:
    made = tokenizer("hermes").tokenizer
    made.response_template = OWN
    reads = HuggingFaceTokenizer(made, tools="template")
    assert reads.response_format is None
    assert calls(reads.parse(f"CALL look {JSON} END", TOOLS)) == CALLED
    assert reads.parse(WRITTEN["hermes"], TOOLS) == say(WRITTEN["hermes"])


def test_a_response_template_that_cannot_read_a_text_makes_it_a_malformed_call() -> None:
    reads = HuggingFaceTokenizer(tokenizer("hermes").tokenizer, response_template=OWN)
    assert calls(reads.parse("CALL look {at", TOOLS)) == [{"name": "", "arguments": "CALL look {at"}]


@pytest.mark.parametrize(
    "written",
    [
        f" to=functions.look<|channel|>commentary json<|message|>{JSON}",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.look"
        f"<|channel|>commentary json<|message|>{JSON}",
        f"<|channel|>commentary to=functions.look code<|message|>{JSON}",
        f"<|channel|>analysis to=functions.look <|constrain|>json<|message|>{JSON}",
        f" to=functions.look<|channel|>commentary <|constrain|>json<|message|>{JSON}<|call|>",
    ],
)
def test_a_harmony_call_is_parsed_wherever_its_recipient_is_written(written: str) -> None:
    assert calls(tokenizer("harmony").parse(written, TOOLS)) == CALLED


def test_gpt_oss_text_before_a_call_and_all_its_reasoning_are_kept() -> None:
    thought = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    said = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
    read = tokenizer("harmony").parse(f"{thought.format('a')}{thought.format('b')}{said}{WRITTEN['harmony']}", TOOLS)
    assert read["content"] == "I will look."
    assert read["reasoning_content"] == "a\nb\nhm"
    assert calls(read) == CALLED


def test_text_outside_every_channel_is_not_lost() -> None:
    assert tokenizer("harmony").parse("just text", TOOLS) == say("just text")


def test_a_call_to_an_unknown_function_is_still_a_call() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=browser.search<|channel|>commentary<|message|>{}"
    )
    assert calls(tokenizer("harmony").parse(text, TOOLS)) == [{"name": "browser.search", "arguments": {}}]


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "no_tools"])
def test_a_json_answer_is_not_a_llama_call(tools: list[dict[str, Any]]) -> None:
    for text in ('{"name": "Bob", "age": 3}', 'A person is {"name": "Bob"}, ok'):
        assert tokenizer("llama").parse(text, tools) == say(text)


def test_bare_json_is_a_llama_call_only_if_tools_are_offered() -> None:
    text = '{"name": "Bob", "parameters": {}}'
    assert tokenizer("llama").parse(text, []) == say(text)
    assert calls(tokenizer("llama").parse(text, TOOLS)) == [{"name": "Bob", "arguments": {}}]


def test_a_mistral_call_keeps_its_id() -> None:
    read = tokenizer("mistral").parse(f"[TOOL_CALLS]look[CALL_ID]aB3dE6gH9[ARGS]{JSON}", TOOLS)
    assert calls(read) == CALLED
    assert read["tool_calls"][0]["id"] == "aB3dE6gH9"
    assert "id" not in tokenizer("mistral").parse(WRITTEN["mistral"], TOOLS)["tool_calls"][0]


def test_mistral_calls_in_a_list_keep_the_ids_that_the_model_wrote() -> None:
    one = '{{"name": "look", "arguments": {{}}, "id": "{}"}}'
    made = f"[TOOL_CALLS] [{one.format('aB3dE6gH9')}, {one.format('short')}, " + '{"name": "look", "arguments": {}}]'
    read = tokenizer("mistral_list").parse(made, TOOLS)
    assert [call.get("id") for call in read["tool_calls"]] == ["aB3dE6gH9", None, None]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("glm", "<tool_call>look\n<arg_key>what</arg_key>\n<arg_value>a long"),
        ("glm", "<tool_call>look\n<arg_key>what</arg_key>\n</tool_call>"),
        ("qwen_coder", "<tool_call>\n<function=look>\n<parameter=what>\nlong value cut"),
        ("qwen_coder", "<tool_call>\n<function=look>\n<parameter=what>\nx\n</function>\n</tool_call>"),
    ],
)
def test_a_call_cut_off_inside_an_argument_is_malformed(form: str, text: str) -> None:
    read = tokenizer(form).parse(text, TOOLS)
    assert read["content"] == text
    assert calls(read) == [{"name": "", "arguments": text}]


def test_a_call_cut_off_after_its_arguments_is_parsed() -> None:
    assert calls(tokenizer("qwen_coder").parse(CODER.removesuffix("\n</tool_call>"), TOOLS)) == CALLED


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud83d"', '{"\\ud83d": 1}', "9" * 400 + ".0"])
def test_arguments_that_no_tool_can_take_make_a_call_malformed(value: str) -> None:
    body = f'{{"name": "look", "arguments": {{"at": {value}}}}}'
    for made in (tokenizer("hermes"), ByteTokenizer()):
        read = made.parse(f"<tool_call>\n{body}\n</tool_call>", TOOLS)
        assert isinstance(calls(read)[0]["arguments"], str)
        assert read["content"] == f"<tool_call>\n{body}\n</tool_call>"


def test_text_with_which_the_template_opens_the_turn_is_not_part_of_the_answer() -> None:
    closed = tokenizer("deepseek", "</think>")
    assert closed.parse("4", []) == say("4")
    assert calls(closed.parse(WRITTEN["deepseek"], TOOLS)) == CALLED


def test_an_unclosed_thought_is_not_an_answer_and_a_call_in_it_is_not_made() -> None:
    thinking = tokenizer("hermes", "<think>\n")
    for text in ("never closed", WRITTEN["hermes"]):
        assert thinking.parse(text, TOOLS) == say("") | {"reasoning_content": text.strip()}
    assert thinking.parse("hm\n</think>\n\n4", TOOLS) == say("4") | {"reasoning_content": "hm"}
    assert tokenizer("hermes", "<think>\n\n</think>\n\n").parse("4", TOOLS) == say("4")
