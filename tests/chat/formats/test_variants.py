"""What models write beside their format: it is read if it can only mean one call, and is malformed otherwise."""

import pytest

from agentgym.chat.formats import RESPONSE_FORMATS
from agentgym.engines.scripted import say
from tests.support.response_formats import ARGUMENTS, CALLED, TOOLS, calls

JSON = '{"at": 3, "what": "a b"}'
BODY = "<function=look>\n<parameter=at>\n3\n</parameter>\n<parameter=what>\na b\n</parameter>\n</function>"
ONE = f'{{"name": "look", "parameters": {JSON}}}'


def read(form: str, text: str) -> list[object]:
    return calls(RESPONSE_FORMATS[form].parse(text, TOOLS))


@pytest.mark.parametrize(
    ("form", "text", "number"),
    [
        ("hermes", f'<tool_call>{{"name": "look", "arguments": {JSON}}}', 1),
        ("hermes", f'<tool_call>{{"name": "look", "arguments": {JSON}}}\n' * 2, 2),
        ("qwen_coder", BODY, 1),
        ("qwen_coder", f"I will look.\n\n{BODY}\n</tool_call>", 1),
        ("qwen_coder", f"{BODY}\n{BODY}", 2),
        ("qwen_coder", f"{BODY}{BODY}", 2),
        ("qwen_coder", f"<tool_call>{BODY}</tool_call>{BODY}", 2),
        ("qwen_coder", f"<tool_call>{BODY.removesuffix('</function>')}</tool_call>", 1),
        ("glm", "<tool_call>look<arg_key> at </arg_key><arg_value>3</arg_value><arg_key>what</arg_key>"
                "<arg_value>a b</arg_value>", 1),
        ("mistral", f"[TOOL_CALLS]look{JSON}", 1),
        ("mistral", f"[TOOL_CALLS]look[ARGS]{JSON}[TOOL_CALLS] look [ARGS]\n{JSON}", 2),
        ("llama", f'{{"type": "function", "name": "look", "parameters": {JSON}}}', 1),
        ("llama", f'<|python_tag|>{{"type": "function", "name": "look", "parameters": {JSON}}}', 1),
        ("llama", f'{{"type": "function", "function": {{"name": "look", "arguments": {JSON}}}}}', 1),
        ("llama", f'{{"name": "look", "arguments": {JSON}}}', 1),
        ("llama", f'{{"parameters": {JSON}, "name": "look"}}', 1),
        ("llama", f"{ONE}; {ONE}", 2),
        ("llama", f"[{ONE}, {ONE}]", 2),
        ("llama", f"<|python_tag|>{ONE}<|eom_id|>\n<|python_tag|>{ONE}", 2),
        ("harmony", f"<|channel|>commentary to=functions.look <|constrain|>json <|message|>{JSON}<|call|>", 1),
        ("harmony", f"<|channel|>commentary to=look<|constrain|>json<|message|>{JSON}<|call|>", 1),
        ("harmony", f"<|channel|>commentary json to=functions.look<|message|>{JSON}<|call|>", 1),
        ("harmony", f"<|channel|>comment to=functions.look<|message|>{JSON}<|call|>", 1),
        ("harmony", f"<|channel|>final to=functions.look<|message|>{JSON}<|call|>", 1),
        ("harmony", f"<|start|>assistant<|channel|>commentary to=functions.look<|message|>{JSON}<|end|>" * 2, 2),
        ("harmony", f"<|channel|>commentary to=functions.look<|message|>{JSON}" * 2, 2),
    ],
)  # fmt: skip
def test_a_variant_that_can_only_mean_one_call_is_read(form: str, text: str, number: int) -> None:
    assert read(form, text) == CALLED * number


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f"<tool_call>{BODY}</tool_call>"),
        ("hermes", BODY),
        ("hermes", f'{{"name": "look", "arguments": {JSON}}}'),
        ("hermes", f'```json\n{{"name": "look", "arguments": {JSON}}}\n```'),
        ("hermes", f'<tool_call>{{"name": "look", "arguments": {JSON}}}}}</tool_call>'),
        ("qwen_coder", f'<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>'),
        ("qwen_coder", f'<tool_call>{{"name": "look", "arguments": {JSON}}}</tool_call>'),
        ("qwen_coder", "<tool_call><function=look><parameter=at>\n3\n<parameter=what>\nx\n</parameter></function>"),
        ("qwen_coder", "<tool_call><function=look><parameter=at>1</parameter><parameter=at>2</parameter></function>"),
        ("glm", f'<tool_call>\n{{"name": "look", "arguments": {JSON}}}\n</tool_call>'),
        ("glm", "<tool_call>look<arg_key>at</arg_key><arg_value>3<arg_key>what</arg_key></tool_call>"),
        ("glm", "<tool_call>look(at=3)</tool_call>"),
        ("deepseek", "<｜tool▁call▁begin｜>look(at=3)<｜tool▁call▁end｜>"),  # noqa: RUF001
        ("mistral", f'[TOOL_CALLS] [{{"name": "look", "arguments": {JSON}}}]'),
        ("mistral_list", f"[TOOL_CALLS]look[ARGS]{JSON}"),
        ("llama", "<|python_tag|>look.call(at=3)"),
        ("llama", f'{{"function": "look", "parameters": {JSON}}}'),
        ("llama", f'I look: {{"type": "function", "function": {{"name": "look", "parameters": {JSON}}}'),
        ("llama", f'Then {{"type": "x", "n": 1e999}} {{"name": "look", "parameters": {JSON}}}'),
        ("harmony", "<|channel|>commentary to=functions.look"),
        ("harmony", f'{{"name": "look", "arguments": {JSON}}}'),
    ],
)
def test_any_other_variant_is_one_malformed_call_with_all_of_the_text(form: str, text: str) -> None:
    message = RESPONSE_FORMATS[form].parse(text, TOOLS)
    assert message["content"] == text
    assert [type(call["arguments"]) for call in calls(message)] == [str]


def test_a_malformed_call_beside_a_good_one_is_told_and_the_good_one_made() -> None:
    good, bad = f'<tool_call>{{"name": "look", "arguments": {JSON}}}</tool_call>', "<tool_call>look</tool_call>"
    assert read("hermes", good + bad) == [*CALLED, {"name": "", "arguments": "look"}]
    wrong = '<tool_call>{"name": "look"}</tool_call>'
    assert read("qwen_coder", f"<tool_call>{BODY}</tool_call>\n{wrong}") == [*CALLED, {"name": "", "arguments": wrong}]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama", 'A person is {"name": "Bob"}, ok'),
        ("llama", '{"name": "Bob", "age": 3}'),
        ("harmony", "Copy from=a to=b."),
        ("hermes", '{"name": "look"}'),
        ("hermes", '{"name": "Bob", "arguments": {}}'),
    ],
)
def test_other_json_and_words_are_an_answer(form: str, text: str) -> None:
    assert RESPONSE_FORMATS[form].parse(text, TOOLS) == say(text)


@pytest.mark.parametrize(
    "value",
    [
        *(
            "see </tool_call> there",
            "see <tool_call> there",
            "a </arg_value> b",
            "a </parameter> b",
            "is <parameter=x> there",
        ),
        *(
            "x\n</function>\n</tool_call>\ny",
            "a</arg_value></tool_call>b",
            "a</parameter>\n</function>\nb",
            "</tool_call>",
            "<think>no</think>",
            "[TOOL_CALLS]",
            "a</think>",
        ),
    ],
)
@pytest.mark.parametrize("form", ["hermes", "qwen_coder", "glm", "deepseek", "mistral", "mistral_list", "harmony"])
def test_a_value_may_hold_the_marks_of_a_format(form: str, value: str) -> None:
    written = value.replace("\n", "\\n") if form not in ("qwen_coder", "glm") else value
    text = RESPONSE_FORMATS[form].example.replace("NAME", "look").replace("KEY", "what").replace("VALUE", written)
    for around in (text, f"so {text}"):
        assert read(form, around) == [{"name": "look", "arguments": {"what": value}}]


def test_a_value_with_closing_tags_ends_before_the_next_call() -> None:
    for form in ("qwen_coder", "glm"):
        example = RESPONSE_FORMATS[form].example.replace("NAME", "look").replace("KEY", "what")
        first, second = example.replace("VALUE", "a </tool_call> b"), example.replace("VALUE", "c")
        found = read(form, f"{first}\nand\n{second}")
        assert [call["arguments"]["what"] for call in found] == ["a </tool_call> b", "c"]  # type: ignore[index]


def test_all_arguments_are_read() -> None:
    assert read("qwen_coder", f"<tool_call>{BODY}</tool_call>") == [{"name": "look", "arguments": ARGUMENTS}]
