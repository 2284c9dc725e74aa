# ruff: noqa: RUF001  DeepSeek's marks are written with a fullwidth bar
"""What models write in the formats of further families: values read whole, and calls that are none told as such."""

from typing import Any

import pytest

from agentgym.chat.formats import RESPONSE_FORMATS

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "at": {"type": "integer"},
                    "what": {"type": "string"},
                    "spots": {"type": "array", "items": {"$ref": "#/$defs/Spot"}},
                },
                "$defs": {"Spot": {"type": "object", "properties": {"x": {"type": "number"}, "s": {"type": "string"}}}},
            },
        },
    }
    for name in ("look", "fs.read-it")
]


def read(form: str, text: str, tools: list[dict[str, Any]] = TOOLS) -> Any:
    """Return the functions that a text calls; None if it calls none."""
    message = RESPONSE_FORMATS[form].parse(text, tools)
    return [call["function"] for call in message["tool_calls"]] if "tool_calls" in message else None


def call(**arguments: Any) -> list[Any]:
    return [{"name": "look", "arguments": arguments}]


KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
KEY = "<|tool_call_argument_begin|>"
GEMMA = "<|tool_call>call:look{{{}}}<tool_call|>"
LFM2 = "<|tool_call_start|>[look({})]<|tool_call_end|>"
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="{}" string="{}">{}'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="{}">{}</parameter>\n</invoke>\n</minimax:tool_call>'
)
SPACE = "]<]minimax[>["


def m3(body: str) -> str:
    """Return a call in MiniMax M3's format; `[` stands for what is written before each tag."""
    return f'[<tool_call>\n[<invoke name="look">{body}[</invoke>\n[</tool_call>'.replace("[<", f"{SPACE}<")


READ: list[tuple[str, str, Any]] = [
    ("kimi", KIMI.format(f'functions.look:0{KEY}{{"what": "<|tool_call_end|>"}}'), call(what="<|tool_call_end|>")),
    ("kimi", KIMI.format(f"functions.fs.read-it:3{KEY}{{}}"), [{"name": "fs.read-it", "arguments": {}}]),
    ("kimi", KIMI.format(f'look{KEY} {{"at": 3}} '), call(at=3)),
    (
        "gemma",
        GEMMA.format('spots:[{s:<|"|>a<|"|>,x:1.5},{<|"|>x y<|"|>:null}],what:<|"|><tool_call|>}<|"|>'),
        call(spots=[{"s": "a", "x": 1.5}, {"x y": None}], what="<tool_call|>}"),
    ),
    ("gemma", GEMMA.format("\n at : 3 ,\n x : true"), call(at=3, x=True)),
    ("gemma", "<|tool_call>call:fs.read-it{}<tool_call|>", [{"name": "fs.read-it", "arguments": {}}]),
    ("gemma", "<|tool_call>call:look{at:3}", call(at=3)),
    ("lfm2", LFM2.format("at=-3, what='it's \"so\"', from=None"), [*call(at=-3, what='it\'s "so"', **{"from": None})]),
    ("lfm2", LFM2.format(r"what='C:\\new\n\u00e9\q'"), call(what="C:\\new\né\\q")),
    ("lfm2", LFM2.format('spots=[{"x": 1.5, "s": "]"}, {}], at=3,'), call(spots=[{"x": 1.5, "s": "]"}, {}], at=3)),
    ("lfm2", "<|tool_call_start|>[fs.read-it()]<|tool_call_end|>", [{"name": "fs.read-it", "arguments": {}}]),
    ("dsml", DSML.format("what", "true", "a</｜DSML｜parameter> b"), call(what="a</｜DSML｜parameter> b")),
    ("dsml", DSML.format("spots", "false", '[{"x": 1}]'), call(spots=[{"x": 1}])),
    ("minimax", MINIMAX.format("what", "a</parameter> b"), call(what="a</parameter> b")),
    ("minimax", MINIMAX.format("at", "3"), call(at=3)),
    ("minimax", MINIMAX.format("spots", '[{"x": 1}]'), call(spots=[{"x": 1}])),
    ("minimax_m3", m3("[<at>3[</at>[<what> a [</what>"), call(at=3, what=" a ")),
    (
        "minimax_m3",
        m3("[<spots>\n[<item>[<x>1.5[</x>[<s>3[</s>[</item>[<item>[<s>b[</s>[</item>[</spots>"),
        call(spots=[{"x": 1.5, "s": "3"}, {"s": "b"}]),
    ),
    ("minimax_m3", m3("[<spots>[</spots>"), call(spots=[])),
    ("llama4", "[look(at=3)]", call(at=3)),
    ("llama4", "So.<|python_start|>[look(at=3)]<|python_end|>", call(at=3)),
    ("llama4", '<|python_start|>So.<|python_end|>{"name": "look", "parameters": {"at": 3}}', call(at=3)),
    ("llama4", "[other(at=3)]", [{"name": "other", "arguments": {"at": 3}}]),
    ("functools", 'functools[{"name": "look", "parameters": {"at": 3}}]', call(at=3)),
]
MALFORMED = [
    ("kimi", KIMI.format(f":0{KEY}{{}}")),
    ("kimi", KIMI.format("functions.look:0")),
    ("kimi", KIMI.format(f"functions.look:0{KEY}{{}}").replace("<|tool_call_end|>", " so")),
    ("kimi", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
    ("gemma", GEMMA.format("at:three")),
    ("gemma", GEMMA.format("at:03")),
    ("gemma", GEMMA.format("at:3 what:4")),
    ("gemma", GEMMA.format('what:<|"|>open')),
    ("gemma", GEMMA.format("at:" + "[" * 200 + "]" * 200)),
    ("gemma", '<|tool_call>{"name": "look"}<tool_call|>'),
    ("lfm2", LFM2.format("3")),
    ("lfm2", LFM2.format("at=three")),
    ("lfm2", LFM2.format("what='open")),
    ("lfm2", LFM2.format("at=" + "9" * 5000)),
    ("lfm2", '<|tool_call_start|>{"name": "look"}<|tool_call_end|>'),
    ("dsml", DSML.format("at", "false", "three")),
    ("dsml", DSML.format("at", "maybe", "3")),
    ("dsml", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    ("minimax", MINIMAX.format("at", "3").replace("</parameter>", "")),
    ("minimax", "<minimax:tool_call>\n</minimax:tool_call>"),
    ("minimax_m3", m3("[<at>3[</what>")),
    ("minimax_m3", m3("[<at>3[</at>[<at>4[</at>")),
    ("minimax_m3", m3("[<a>" * 200)),
    ("llama4", "[look(at=three)]"),
    ("llama4", "<|python_start|>[other(at=three)]<|python_end|>"),
    ("functools", "functools[]"),
]
ANSWERS = ["[other(at=three)]", "[other(at=3)] is the call", "[1, 2](x)", "functools are useful"]


@pytest.mark.parametrize(("form", "text", "made"), READ)
def test_a_call_is_read_whole(form: str, text: str, made: Any) -> None:
    assert read(form, text) == made


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_what_looks_like_a_call_and_is_none_is_malformed(form: str, text: str) -> None:
    assert read(form, text) == [{"name": "", "arguments": text}]


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [("kimi", KIMI.format(f"functions.look:0{KEY}[3]"), "[3]"), ("lfm2", LFM2.format("at=1e999"), '{"at": Infinity}')],
)
def test_arguments_that_no_tool_can_take_are_malformed(form: str, text: str, arguments: str) -> None:
    assert read(form, text) == [{"name": "look", "arguments": arguments}]


@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("form", ["llama4", "functools"])
def test_an_answer_in_brackets_is_no_call(form: str, text: str) -> None:
    assert read(form, text) is None


def test_a_list_without_marks_is_a_call_only_if_there_are_tools() -> None:
    assert read("llama4", "[look(at=3)]", []) is None


def test_kimis_calls_keep_the_ids_that_the_model_wrote() -> None:
    message = RESPONSE_FORMATS["kimi"].parse(KIMI.format(f"functions.look:7{KEY}{{}}"), TOOLS)
    assert [made["id"] for made in message["tool_calls"]] == ["functions.look:7"]


def test_the_opening_of_the_result_is_no_part_of_gemmas_answer() -> None:
    message = RESPONSE_FORMATS["gemma"].parse("So." + GEMMA.format("at:3") + "<|tool_response>", TOOLS)
    assert message["content"] == "So."
