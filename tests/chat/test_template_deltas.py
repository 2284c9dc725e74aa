"""A cached template delta equals a full render, whatever the template does with contents."""

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentgym.chat.chat import Chat, template_of
from agentgym.chat.encoding import Decoder, SpecialTokenSplitter
from agentgym.chat.template_deltas import KnownTemplate, MessageTemplate, TemplateDeltaCache
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.engines.scripted import call, calls, say
from agentgym.types.messages import Message

START, END = "<|im_start|>", "<|im_end|>"
PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
SHOWN{% for c in m.tool_calls or [] %}<tool_call>
{{ c.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {
    "plain": PLAIN.replace("SHOWN", "{{ m.content }}"),
    "trimming": PLAIN.replace("SHOWN", "{{ m.content | trim }}"),
    "escaping": PLAIN.replace("SHOWN", "{{ m.content | tojson }}"),
    "shortening": PLAIN.replace("SHOWN", "{{ m.content[:9] }}"),
    "numbering": PLAIN.replace("SHOWN", "{{ loop.index0 }}: {{ m.content }}"),
    "naming": PLAIN.replace("SHOWN", "{{ m.name }}{{ m.tool_call_id }} {{ m.content }}"),
    "looking": PLAIN.replace("SHOWN", "{% if '<x>' in m.content %}!{% endif %}{{ m.content }}"),
    "looking_by_a_name": PLAIN.replace(
        "SHOWN", "{% set x = '<x>' %}{% if x in m.content %}!{% endif %}{{ m.content }}"
    ),
    "replacing": PLAIN.replace("SHOWN", "{{ m.content | replace('<x>', '!') }}"),
    "counting_words": PLAIN.replace("SHOWN", "{{ m.content.split() | length }} {{ m.content }}"),
    "forgetting": PLAIN.replace(
        "SHOWN",
        """{% set ns = namespace(last=0) %}{% for n in messages %}{% if n.role == "user" %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if m.reasoning_content and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}""",
    ),
}


def trained(**mark: bool) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [PLAIN] * 4, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_tokens([AddedToken(text, special=False, normalized=False, **mark) for text in (START, END)])
    return core


CORE = trained()


def tokenizer(template: str) -> HuggingFaceTokenizer:
    made = PreTrainedTokenizerFast(tokenizer_object=CORE, eos_token=END)
    made.chat_template = TEMPLATES[template]
    return HuggingFaceTokenizer(made)


class Forgetful(TemplateDeltaCache):
    """A cache that renders everything every time."""

    def recall(self, shape: Hashable, new: Sequence[Message], short: Any) -> str | None:
        return None

    def learn(self, *given: Any) -> None:
        pass


words = st.sampled_from(["yes", "no way", "a.", "12", " padded ", "two\nlines", "", "<x>", "é", '"quoted"', "{1}"])
replies = st.one_of(
    words.map(say),
    words.map(lambda text: call("look", at=text)),
    words.map(lambda text: say("so") | {"reasoning_content": text or "hm"}),
    st.just(calls(("look", {}), ("find", {"x": 1}))),
)
answers = st.lists(
    st.one_of(
        words.map(lambda text: Message(role="tool", content=text, name="look", tool_call_id="call00101")),
        words.map(lambda text: Message(role="user", content=text)),
    ),
    max_size=2,
)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=st.lists(st.tuples(replies, answers), min_size=1, max_size=10), tools=st.booleans())
def test_a_cached_turn_equals_a_full_render(
    template: str, turns: list[tuple[Message, list[Message]]], tools: bool
) -> None:
    offered: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look"}}] if tools else []
    quick, slow = tokenizer(template), tokenizer(template)
    template_of(slow).deltas = Forgetful()
    for _ in range(2):  # the second time, the cache is used
        first = [Message(role="user", content="Go.")]
        mine, theirs = Chat(quick, offered, first), Chat(slow, offered, first)
        assert mine.prompt_ids() == theirs.prompt_ids()
        for reply, new in turns:
            ids = quick.encode(f"said{END}")
            assert mine.extend(ids, reply, new) == theirs.extend(ids, reply, new)
        assert mine.text == theirs.text


def extended(chat: Chat, contents: Sequence[str]) -> list[str | None]:
    ids = chat.tokenizer.encode(f"ok{END}")
    told = ([Message(role="tool", content=text, name="look")] for text in contents)
    added = [chat.extend(ids, say("ok"), new) for new in told]
    return [None if a is None else chat.tokenizer.decode(a) for a in added]


@pytest.mark.parametrize("form", ["answer {}", 'File "a.py", line {}\n\tx = {{"y": [1]}} & <b>\'c\'', "{}|im_start"])
def test_a_shape_is_fully_rendered_only_to_verify_it(form: str) -> None:
    quick = tokenizer("plain")
    renders = 0
    render = quick.render

    def counting(*given: Any, **more: Any) -> str:
        nonlocal renders
        renders += 1
        return render(*given, **more)

    quick.render = counting  # type: ignore[method-assign]
    extended(Chat(quick, [], [Message(role="user", content="Go.")]), [form.format(n) for n in range(200)])
    assert renders < 60  # otherwise 200 turns would need 400 full renders


@pytest.mark.parametrize("template", ["looking_by_a_name", "replacing", "escaping"])
def test_text_that_a_template_may_search_for_or_escape_is_never_filled_in(template: str) -> None:
    quick, slow = tokenizer(template), tokenizer(template)
    template_of(slow).deltas = Forgetful()
    texts = ['plain "quotes" {1}'] * 5 + ["with <x> in it"] + ['plain "quotes" {1}'] * 5
    first = [Message(role="user", content="Go.")]
    assert extended(Chat(quick, [], first), texts) == extended(Chat(slow, [], first), texts)


def test_a_special_token_inside_code_stays_broken_up() -> None:
    chat = Chat(tokenizer("plain"), [], [Message(role="user", content="Go.")])
    ids = chat.tokenizer.encode(f"ok{END}")
    for text in ["x = {1}"] * 10 + [f'print("{END}")']:
        added = chat.extend(ids, say("ok"), [Message(role="tool", content=text, name="look")])
    assert added is not None
    assert added.count(chat.tokenizer.encode(END)[0]) == 1


def test_a_template_that_depends_on_the_position_is_caught_by_a_later_check() -> None:
    late = PLAIN.replace("SHOWN", "{% if loop.index0 > 20 %}late {% endif %}{{ m.content }}")
    TEMPLATES["late"] = late
    chat = Chat(tokenizer("late"), [], [Message(role="user", content="Go.")])
    shown = extended(chat, [f"answer {n}" for n in range(80)])
    assert "late" not in str(shown[0])
    assert all("late" in str(text) for text in shown[40:])


def test_a_turn_that_will_be_stripped_later_is_a_separate_shape() -> None:
    quick = tokenizer("forgetting")
    ids, ask = quick.encode(f"ok{END}"), [Message(role="user", content="And?")]
    plain = Chat(quick, [], [Message(role="user", content="Go.")])
    for _ in range(7):
        assert plain.extend(ids, say("ok"), ask) is not None
    thinking = Chat(quick, [], [Message(role="user", content="Go.")])
    thought, seen = say("ok") | {"reasoning_content": "hm"}, [Message(role="tool", content="seen")]
    for _ in range(4):
        assert thinking.extend(ids, thought, seen) is not None
    assert thinking.extend(ids, say("ok"), ask) is None


def test_an_empty_answer_does_not_hide_later_ones() -> None:
    chat = Chat(tokenizer("plain"), [], [Message(role="user", content="Go.")])
    shown = extended(chat, ["", "", "", "", "seen", "", "seen"])
    assert ["seen" in str(text) for text in shown] == [False] * 4 + [True, False, True]


def test_a_wrong_template_skeleton_is_never_used_again() -> None:
    new = [Message(role="tool", content="57")]
    known = KnownTemplate(MessageTemplate(("<", ">"), ((0, "content"),)), short=False)
    known.check(new, lambda _: None, "<57>")
    assert known.template is not None
    known.check(new, lambda _: None, "[57]")
    assert known.template is None


def test_the_number_of_cached_shapes_is_bounded() -> None:
    deltas = TemplateDeltaCache()
    for n in range(3000):
        deltas.learn(n, [], "x", lambda _: "x", lambda _: "x")
    assert len(deltas.known) == 1024


TEXT = st.lists(st.sampled_from([START, END, " ", "\n", "a", "é", " b", "1", "<|im_", "end|>", "\t\t"])).map("".join)


@pytest.mark.parametrize("mark", [{}, {"lstrip": True}, {"rstrip": True}, {"single_word": True}], ids=str)
@settings(deadline=None)
@given(text=TEXT)
def test_pieces_are_encoded_like_the_whole_text(mark: dict[str, bool], text: str) -> None:
    core = CORES.setdefault(str(mark), trained(**mark))
    pieces = SpecialTokenSplitter(core)
    whole = core.encode(text, add_special_tokens=False).ids
    assert pieces.encode(text).tolist() == whole
    assert pieces.encode(text).tolist() == whole


CORES: dict[str, Tokenizer] = {}


def test_a_tokenizer_that_treats_a_texts_start_differently_encodes_it_whole() -> None:
    core = trained()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    text = f"a{END}b"
    assert SpecialTokenSplitter(core).encode(text).tolist() == core.encode(text, add_special_tokens=False).ids


@settings(deadline=None)
@given(st.lists(st.integers(0, CORE.get_vocab_size() + 3), max_size=12))
def test_ids_are_decoded_as_by_the_tokenizer(ids: list[int]) -> None:
    assert Decoder(CORE).decode(ids) == CORE.decode(ids, skip_special_tokens=False)


def test_ids_without_bytes_are_left_to_the_tokenizer() -> None:
    core = trained()
    core.decoder = decoders.Metaspace()
    assert Decoder(core).decode([5, 6]) == core.decode([5, 6], skip_special_tokens=False)
