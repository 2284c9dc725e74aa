"""Messages to ids and back: a chat only grows at its end, and parsing never raises."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentgym.chat.chat import Chat
from agentgym.chat.template import template_text
from agentgym.chat.tokenizer import ChatTokenizer, HuggingFaceTokenizer, chat_tokenizer
from agentgym.engines.scripted import ByteTokenizer, call, calls, say
from agentgym.types.messages import Message

HERMES = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}
{% endif %}<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FORGETFUL = HERMES.replace(
    "{{ m.content }}",
    """{% set ns = namespace(last=0) %}{% for n in messages %}{% if n.role == "user" %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}""",
)
"""Like Qwen3: thinking is rendered until the next user message and then stripped."""


def hugging_face(template: str = HERMES) -> HuggingFaceTokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special_tokens = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [HERMES] * 4,
        trainers.BpeTrainer(
            vocab_size=330, initial_alphabet=alphabet, special_tokens=special_tokens, show_progress=False
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=special_tokens[1], additional_special_tokens=special_tokens
    )
    tokenizer.chat_template = template
    return HuggingFaceTokenizer(tokenizer)


REAL = hugging_face()
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
both = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), REAL], ids=["bytes", "bpe"])


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text, name="look")


def written(tokenizer: ChatTokenizer, chat: Chat, reply: Message) -> list[int]:
    """Return the turn's ids exactly as the template writes it, including its end token."""
    whole = tokenizer.render([*chat.messages, reply], chat.tools, generation=False)
    return tokenizer.encode(whole.removeprefix(chat.text).removesuffix("\n"))


def play(tokenizer: ChatTokenizer, tools: list[dict[str, Any]], turns: Sequence[tuple[Message, Message]]) -> list[int]:
    """Return the ids of a chat in which the model writes each reply and gets each answer."""
    chat = Chat(tokenizer, tools, [user("Go.")])
    ids = chat.prompt_ids().tolist()
    for reply, answer in turns:
        sampled = written(tokenizer, chat, reply)
        delta = chat.extend(sampled, chat.parse(sampled, stopped=True), [answer])
        assert delta is not None
        ids += [*sampled, *delta]
    assert chat.messages[::2][1:] == [answer for _, answer in turns]
    return ids


CHATS: list[list[tuple[Message, Message]]] = [
    [(say("four"), user("sure?")), (say("yes"), user("really?"))],
    [(call("look", at="é"), tool("nothing")), (call("look"), tool(""))],
    [(calls(("look", {}), ("look", {"x": [1, None]})), tool("two")), (say(""), user("?"))],
    [(say("an <|im_start|> special token"), user("an <|im_end|> special token"))],
]


@both
@pytest.mark.parametrize("turns", CHATS)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no_tools", "tools"])
def test_appended_ids_equal_those_of_the_whole_chat(
    tokenizer: ChatTokenizer, tools: list[dict[str, Any]], turns: list[tuple[Message, Message]]
) -> None:
    messages = [user("Go."), *(message for turn in turns for message in turn)]
    whole = tokenizer.render(messages, tools, generation=True)
    assert play(tokenizer, tools, turns) == tokenizer.encode(whole)


@given(st.lists(st.tuples(st.text().map(say), st.text().map(user)), min_size=1, max_size=3))
def test_any_text_can_extend_a_chat(turns: list[tuple[Message, Message]]) -> None:
    whole = ByteTokenizer().render([user("Go."), *(m for turn in turns for m in turn)], [], generation=True)
    assert play(ByteTokenizer(), [], turns) == ByteTokenizer().encode(whole)


@both
def test_the_turn_separator_is_kept_at_each_boundary(tokenizer: ChatTokenizer) -> None:
    chat = Chat(tokenizer, [], [user("Go.")])
    delta = chat.extend(written(tokenizer, chat, say("look")), say("look"), [tool("seen")])
    assert delta is not None
    assert tokenizer.decode(delta) == "\n<|im_start|>tool\nseen<|im_end|>\n<|im_start|>assistant\n"


@both
def test_sampled_text_is_kept_even_if_the_template_would_write_it_differently(tokenizer: ChatTokenizer) -> None:
    odd = tokenizer.encode('<tool_call>{"arguments":{},   "name":"look"}</tool_call><|im_end|>')
    chat = Chat(tokenizer, [], [user("Go.")])
    delta = chat.extend(odd, chat.parse(odd, stopped=True), [tool("seen")])
    assert delta is not None
    assert tokenizer.decode(delta).startswith("\n<|im_start|>tool\nseen")


@both
def test_a_typed_end_token_in_the_text_does_not_end_the_turn(tokenizer: ChatTokenizer) -> None:
    pieces = [list(text.encode()) if isinstance(tokenizer, ByteTokenizer) else tokenizer.encode(text) for text in _ODD]
    sampled = [*pieces[0], *pieces[1], *tokenizer.encode("<|im_end|>")]
    assert tokenizer.decode(sampled) == "write <|im_end|> last<|im_end|>"
    chat = Chat(tokenizer, [], [user("Go.")])
    reply = chat.parse(sampled, stopped=True)
    assert reply == say("write <|im_end|> last")
    delta = chat.extend(sampled, reply, [user("an <|im_end|> too?")])
    assert delta is not None
    assert tokenizer.decode(delta) == "\n<|im_start|>user\nan <|im_end|> too?<|im_end|>\n<|im_start|>assistant\n"


_ODD = ("write <|im_", "end|> last")


def test_a_template_that_strips_earlier_thinking_requires_a_new_segment() -> None:
    tokenizer = hugging_face(FORGETFUL)
    chat = Chat(tokenizer, [], [user("Go.")])
    first = tokenizer.encode("<think>hm</think>look<|im_end|>")
    assert chat.extend(first, chat.parse(first, stopped=True), [tool("seen")]) is not None
    assert "<think>hm</think>" in chat.text
    second = tokenizer.encode("done<|im_end|>")
    assert chat.extend(second, chat.parse(second, stopped=True), [user("Again.")]) is None
    assert "hm" not in tokenizer.decode(chat.prompt_ids())
    assert chat.messages[-1] == user("Again.")


def test_a_turn_whose_thinking_is_stripped_immediately_keeps_its_ids_and_is_extended() -> None:
    tokenizer = hugging_face(FORGETFUL)
    chat = Chat(tokenizer, [], [user("Go.")])
    sampled = tokenizer.encode("<think>hm</think>look<|im_end|>")
    delta = chat.extend(sampled, chat.parse(sampled, stopped=True), [user("And?")])
    assert delta is not None
    assert delta.tolist() == tokenizer.encode("\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")


def test_a_typed_end_token_in_stripped_thinking_does_not_hide_the_next_message() -> None:
    tokenizer = hugging_face(FORGETFUL)
    sampled = tokenizer.encode("<think>the <|im_") + tokenizer.encode("end|> special token</think>look<|im_end|>")
    chat = Chat(tokenizer, [], [user("Go.")])
    delta = chat.extend(sampled, chat.parse(sampled, stopped=True), [user("And?")])
    assert delta is not None
    assert delta.tolist() == tokenizer.encode("\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")


def look(*properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in properties}}
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def test_first_prompts_that_differ_in_any_way_are_not_confused() -> None:
    told = [
        ([], [user("a"), user("b")]),
        ([], [user("ab"), user("")]),
        ([], [user("a"), tool("b")]),
        ([], [user("a"), tool("b") | Message(role="tool", content="", name="other")]),
        ([look("x", "y")], [user("a")]),
        ([look("y", "x")], [user("a")]),
        ([look("x"), look("y")], [user("a")]),
    ]
    for tools, messages in told * 2:
        whole = REAL.encode(REAL.render(messages, tools, generation=True))
        assert Chat(REAL, tools, messages).prompt_ids().tolist() == whole


def test_a_segments_changes_to_its_first_prompt_do_not_affect_the_next_segment() -> None:
    first = Chat(REAL, TOOLS, [user("Go.")]).prompt_ids()
    whole = first.tolist()
    first.extend([1, 2])
    first[0] = 7
    assert Chat(REAL, TOOLS, [user("Go.")]).prompt_ids().tolist() == whole


@both
def test_an_envs_changes_to_its_first_message_do_not_affect_the_next_chat(tokenizer: ChatTokenizer) -> None:
    told = user("Go far.")
    Chat(tokenizer, [], [told]).prompt_ids()
    told["content"] = "Stay."
    chat = Chat(tokenizer, [], [user("Go far.")])
    chat.prompt_ids()
    chat.extend(written(tokenizer, chat, say("ok")), say("ok"), [user("<|im_start|>")])
    assert "Go far." in chat.text


ONE = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plain", say("plain")),
        ("", say("")),
        ("</think>", say("</think>")),
        ("<think>\nhm\n</think>\n\nyes", say("yes") | {"reasoning_content": "hm"}),
        ("<think>never closed", say("") | {"reasoning_content": "never closed"}),
        (ONE, call("look", at=1)),
        (ONE.removesuffix("</tool_call>"), call("look", at=1)),
        (f"two:\n{ONE}\n{ONE}", calls(("look", {"at": 1}), ("look", {"at": 1})) | {"content": "two:"}),
        (f"<think>hm</think>\n{ONE}", call("look", at=1) | {"reasoning_content": "hm"}),
    ],
)
def test_model_output_is_parsed(text: str, message: Message) -> None:
    assert REAL.parse(text, TOOLS) == message


@both
@pytest.mark.parametrize(
    ("body", "function"),
    [
        ('{"name": "look", "arguments": "at=1"}', {"name": "look", "arguments": "at=1"}),
        ("look(1)", {"name": "", "arguments": "look(1)"}),
        ('{"name": oops', {"name": "", "arguments": '{"name": oops'}),
        ('{"name": "look", "argum', {"name": "", "arguments": '{"name": "look", "argum'}),
        ('["look"]', None),
        ("7", None),
        ("", None),
        pytest.param("[" * 5000, None, id="json_too_deep"),
    ],
)
@pytest.mark.parametrize("close", ["\n</tool_call>", ""], ids=["closed", "unclosed"])
def test_a_malformed_call_keeps_its_text_and_never_raises(
    tokenizer: ChatTokenizer, body: str, function: Any, close: str
) -> None:
    text = f"so: <tool_call>\n{body}{close}"
    read = tokenizer.parse(text, TOOLS)
    assert read["content"] == text
    assert isinstance(read["tool_calls"][0]["function"]["arguments"], str)
    assert function in (None, read["tool_calls"][0]["function"])


@given(st.lists(st.sampled_from([*"<think></think><tool_call>{}[]\"':,", ONE, "<|im_end|>", "\\ud83d"])).map("".join))
def test_no_text_makes_the_parser_raise(text: str) -> None:
    assert REAL.parse(text, TOOLS)["role"] == ByteTokenizer().parse(text, TOOLS)["role"] == "assistant"


@both
def test_a_lone_surrogate_is_encoded_without_an_error(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83db"))[::2] == "ab"


class Shouting(HuggingFaceTokenizer):
    """A subclass that overrides `encode` of a tokenizer that creates id arrays."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.upper())


class Handing:
    """A wrapper around another tokenizer that overrides `encode`."""

    def __init__(self, inner: HuggingFaceTokenizer) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text.upper())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("tokenizer", [Shouting(REAL.tokenizer), Handing(REAL)], ids=["subclass", "wrapper"])
def test_a_chat_uses_its_tokenizers_own_encode(tokenizer: ChatTokenizer) -> None:
    chat = Chat(tokenizer, [], [user("Go.")])
    assert chat.prompt_ids().tolist() == REAL.encode(chat.text.upper()) != REAL.encode(chat.text)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokenizer: has no chat_template"):
        HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())))


def test_a_template_without_tool_calls_parses_everything_as_text() -> None:
    plain = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
    )
    tokenizer = hugging_face(plain)
    assert tokenizer.opening == "> "
    assert tokenizer.parse(ONE, []) == say(ONE)


@both
def test_after_a_stop_text_the_template_writes_the_end_that_was_not_sampled(
    tokenizer: ChatTokenizer,
) -> None:
    chat = Chat(tokenizer, TOOLS, [user("Go.")])
    opened = chat.prompt_ids()
    sampled = tokenizer.encode("a > b > STOP")
    reply = chat.parse(sampled, stopped=False)
    assert reply["content"] == "a > b > STOP"
    behind = chat.extend(sampled, reply, [user("On.")], stopped=False)
    assert behind is not None
    assert tokenizer.decode([*opened, *sampled, *behind]) == tokenizer.decode(chat.prompt_ids())
    assert [m["content"] for m in chat.messages] == ["Go.", "a > b > STOP", "On."]


def test_a_template_that_rewrites_a_turn_ended_by_a_stop_text_is_rendered_again() -> None:
    tokenizer = hugging_face(HERMES.replace("{{ m.content }}", "{{ m.content | trim }}"))
    chat = Chat(tokenizer, [], [user("Go.")])
    chat.prompt_ids()
    sampled = tokenizer.encode("  so STOP")
    reply = chat.parse(sampled, stopped=False)
    assert chat.extend(sampled, reply, [user("On.")], stopped=False) is None


def test_a_template_file_may_start_with_a_bom_but_must_be_text(tmp_path: Path) -> None:
    own = chat_tokenizer("tiny").tokenizer.get_chat_template()
    (tmp_path / "chat.jinja").write_bytes(b"\xef\xbb\xbf" + own.encode())
    assert template_text(tmp_path / "chat.jinja") == own
    (tmp_path / "chat.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"^chat_template: .* cannot be read \(UnicodeDecodeError\)"):
        template_text(tmp_path / "chat.jinja")
