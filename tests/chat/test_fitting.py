"""Messages that a template refuses, or renders differently from other turns, lose no rollout and no message."""

import asyncio
from array import array
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import agentgym as ag
from agentgym.chat.chat import Chat
from agentgym.chat.fitting import from_user, history_forms, joined
from agentgym.chat.template import sought_words
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, calls, raw, say
from agentgym.types.messages import Message
from agentgym.types.task import StepResult
from tests.chat.test_template_deltas import CORE, END, PLAIN

ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' or m.tool_calls %}{% else %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}" + PLAIN.replace("SHOWN", "{{ m.content }}")
)
"""Like Mistral: tool messages and calls don't count in the alternation of roles."""
TOOL_NEEDS_CALL = (
    "{% for m in messages %}{% if m.role == 'tool' and not (messages[loop.index0 - 1].tool_calls"
    " or messages[loop.index0 - 1].role == 'tool') %}{{ raise_exception('no previous call') }}{% endif %}{% endfor %}"
    + PLAIN.replace("SHOWN", "{{ m.content }}")
)
"""Like gpt-oss."""
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('single') }}"
    "{% endif %}{% endfor %}" + PLAIN.replace("SHOWN", "{{ m.content }}")
)
"""Like Llama 3.1."""
NEXT_ENDS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>{{ m.content }}"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}{% else %}<|im_end|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""Like GLM: a turn is ended by the token of the next speaker."""
SWITCH = (
    "{% set ns = namespace(off=false) %}{% for m in messages %}{% if m.role != 'assistant' %}"
    "{% if '/no_think' in m.content %}{% set ns.off = true %}{% endif %}{% endif %}{% endfor %}"
    + PLAIN.replace("SHOWN", "{{ m.content }}")[: -len("{% endif %}")]
    + "{% if ns.off %}!{% endif %}{% endif %}"
)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def tokenizer(template: str, **variables: Any) -> HuggingFaceTokenizer:
    made = PreTrainedTokenizerFast(tokenizer_object=CORE, eos_token=END)
    made.chat_template = template
    return HuggingFaceTokenizer(made, chat_template_kwargs=variables)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool(text: str) -> Message:
    return Message(role="tool", content=text, name="look", tool_call_id="call00100")


def shown(chat: Chat, text: str, *new: Message) -> str | None:
    """Return the text appended after the model's text and these messages, or the whole chat if a new segment opens."""
    ids = chat.tokenizer.encode(f"{text}{END}")
    delta = chat.extend(ids, chat.parse(ids, stopped=True), new)
    return chat.tokenizer.decode(chat.prompt_ids() if delta is None else delta)


BAD = '<tool_call>\n{"name": "look", oops}\n</tool_call>'


@pytest.mark.parametrize("template", [ALTERNATING, TOOL_NEEDS_CALL, ONE_CALL], ids=["alternating", "needs", "one"])
def test_a_malformed_call_loses_no_rollout_under_any_template(template: str) -> None:
    chat = Chat(tokenizer(template), TOOLS, [user("Go.")])
    assert "bad JSON" in str(shown(chat, BAD, tool("bad JSON")))
    assert "More?" in str(shown(chat, "Sorry.", user("More?")))


def test_a_malformed_call_is_shown_as_written_if_the_template_accepts_it() -> None:
    chat = Chat(tokenizer(PLAIN.replace("SHOWN", "{{ m.content }}")), TOOLS, [user("Go.")])
    shown(chat, BAD, tool("bad JSON"))
    assert chat.messages[1] == say(BAD)


def test_two_calls_in_one_turn_are_passed_as_text_to_a_template_that_accepts_one() -> None:
    chat = Chat(tokenizer(ONE_CALL), TOOLS, [user("Go.")])
    one = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    assert str(shown(chat, one + one, tool("first"), tool("second"))).count("<|im_start|>tool") == 2
    assert "<|im_start|>user\nAnd?" in str(shown(chat, "so", user("And?")))


class Talk(ag.Env[ag.Task]):
    """An env that sends a message twice."""

    limits = ag.Limits(turns=3)
    context = ag.Compact(at=None, turns=1)

    async def step(self, action: Message) -> StepResult:
        return StepResult([user("and?")], 0.0, False, False, {})


class Look(ag.ToolEnv[ag.Task]):
    """An env that looks twice."""

    limits = ag.Limits(turns=3)
    context = ag.Compact(at=None, turns=1)

    @ag.tool
    def look(self) -> str:
        """Look."""
        return "seen"

    @ag.reward
    def right(self) -> float:
        """Return 1."""
        return 1.0


@pytest.mark.parametrize("env", [Talk, Look])
def test_compaction_works_if_roles_must_alternate(env: type[ag.Env[Any]]) -> None:
    one = raw('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    script: list[Message | str] = (
        [one, say("summary"), one, say("summary"), one, say("summary")] if env is Look else [say("hm")] * 6
    )
    task = ag.Task(id="t", prompt=(user("go"),))
    engine = Scripted(script, tokenizer=tokenizer(ALTERNATING), end=END)
    rollout = asyncio.run(ag.rollout(env, task, engine))
    assert rollout.error is None
    assert rollout.metrics["compactions"] >= 2


def test_a_user_message_after_a_user_or_tool_message_is_joined_to_it() -> None:
    assert joined([user("a"), user("b")]) == [user("a\n\nb")]
    assert joined([tool("a"), user("b")]) == [tool("a\n\nb")]
    assert joined([say("a"), user("b"), say("c")]) == [say("a"), user("b"), say("c")]
    assert from_user([tool("a"), tool("b"), user("c")]) == [user("a\n\nb\n\nc")]


def test_every_form_of_a_history_keeps_its_content() -> None:
    bad = calls(("look", {})) | {"content": "raw"}
    bad["tool_calls"][0]["function"]["arguments"] = "raw"
    for form in history_forms([user("a"), bad, tool("b"), user("c"), call("look", at=1), tool("d")]):
        text = "".join(str(message) for message in form)
        assert all(word in text for word in ("'a", "raw", "b", "c", "look", "d"))


def test_a_call_nested_too_deeply_for_templates_is_malformed_and_loses_no_rollout() -> None:
    for depth in (90, 600, 900, 5000):
        deep = f'<tool_call>\n{{"name": "look", "arguments": {{"at": {"[" * depth}{"]" * depth}}}}}\n</tool_call>'
        for made in (tokenizer(PLAIN.replace("SHOWN", "{{ m.content }}")), ByteTokenizer()):
            chat = Chat(made, TOOLS, [user("Go.")])
            assert "answered" in str(shown(chat, deep, tool("answered")))
            malformed = isinstance(made.parse(deep, TOOLS)["tool_calls"][0]["function"]["arguments"], str)
            assert malformed == (depth > 100)


def test_an_answer_is_kept_if_the_turn_was_ended_by_the_next_speakers_token() -> None:
    chat = Chat(tokenizer(NEXT_ENDS), [], [user("Go.")])
    text = str(shown(chat, "look", tool("RESULT"), user("Next?")))
    assert "RESULT" in text
    assert "Next?" in text
    assert str(shown(Chat(tokenizer(NEXT_ENDS), [], [user("Go.")]), "so", user("Next?"))) == "Next?<|im_start|>"


def test_words_that_a_template_searches_for_are_extracted_from_it() -> None:
    assert sought_words(SWITCH) == {"/no_think"}
    source = "{% if 'content' in m and \"<x>\" not in m.content %}{{ m.content.split('</think>')[0].strip('\\n') }}"
    assert sought_words(source) == {"<x>", "</think>"}


def test_a_word_that_the_template_searches_for_changes_only_the_turns_of_that_chat() -> None:
    made = tokenizer(SWITCH)
    for system, off in (("Be kind.", False), ("Be brief. /no_think", True)) * 2:
        chat = Chat(made, [], [Message(role="system", content=system), user("Go.")])
        for n in range(6):
            assert str(shown(chat, "ok", user(f"q {n}"))).endswith("!") == off


def test_a_word_that_the_template_searches_for_is_noticed_in_a_new_message() -> None:
    made = tokenizer(SWITCH)
    chat = Chat(made, [], [user("Go.")])
    seen = [str(shown(chat, "ok", user(f"q {n} /no_think" if n >= 5 else f"q {n}"))).endswith("!") for n in range(8)]
    assert seen == [False] * 5 + [True] * 3


def test_tracking_of_reasoning_starts_over_with_a_user_message() -> None:
    chat = Chat(ByteTokenizer(), [], [user("Go."), say("so") | {"reasoning_content": "hm"}])
    assert (chat.reasoned, chat.reasons) == (True, True)
    chat.extend([66, 257], say("B"), [user("And?")])
    assert (chat.reasoned, chat.reasons) == (True, False)


def test_a_fork_does_not_mistake_the_other_branchs_reply_for_its_own() -> None:
    made = ByteTokenizer()
    chat = Chat(made, [], [user("Go.")])
    ids = made.encode(f"typed <|im_{END}")
    chat.parse(ids, stopped=True)
    other = chat.branch()
    odd = [*b"<|im_end|> in letters", ByteTokenizer.END]
    behind = array("q", made.encode(f"\n<|im_start|>user\nx{END}\n<|im_start|>assistant\n"))
    assert other.extend(odd, say("<|im_end|> in letters"), [user("x")]) == behind


def test_a_text_of_megabytes_is_encoded_only_as_far_as_it_fits() -> None:
    made = tokenizer(PLAIN.replace("SHOWN", "{{ m.content }}"))
    long = "lorem ipsum 123\n" * (1 << 14)
    encoded = 0
    encode = made.id_array

    def counting(text: str) -> "array[int]":
        nonlocal encoded
        encoded += len(text)
        return encode(text)

    ids = made.encode(f"ok{END}")
    whole = Chat(made, [], [user("Go.")]).extend(ids, say("ok"), [tool(long)])
    made.id_array = counting  # type: ignore[method-assign]
    cut = Chat(made, [], [user("Go.")]).extend(ids, say("ok"), [tool(long)], room=1000)
    assert whole is not None
    assert cut is not None
    assert len(cut) > 1000
    assert cut[:1000] == whole[:1000]
    assert encoded < 1 << 17


def test_template_variables_are_passed_to_the_template() -> None:
    template = PLAIN.replace("SHOWN", "{{ m.content }}{% if enable_thinking is false %} /off{% endif %}")
    text = tokenizer(template, enable_thinking=False).render([user("Go.")], [], generation=True)
    assert "Go. /off" in text
    assert "/off" not in tokenizer(template).render([user("Go.")], [], generation=True)


def test_a_variable_that_the_chat_itself_sets_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^chat_template_kwargs: tools cannot be set here"):
        tokenizer(PLAIN, tools=[])


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": [{"type": "image"}]}, "content: must be text, got list"),
        ({"role": "user", "content": None}, "content: must be text, got NoneType"),
        ({"role": "developer", "content": "x"}, "role: must be one of system, user, tool"),
    ],
)
def test_a_message_that_a_template_would_drop_is_refused_by_its_field(message: Any, field: str) -> None:
    with pytest.raises(ValueError, match=rf"^messages\[0\]\.{field}"):
        Chat(ByteTokenizer(), [], [message]).prompt_ids()
    with pytest.raises(ValueError, match=rf"^messages\[0\]\.{field}"):
        Chat(ByteTokenizer(), [], [user("x")]).extend([66, 257], say("B"), [message])
    with pytest.raises(ValueError, match=r"role: must be one of system, user, tool, got 'assistant'"):
        Chat(ByteTokenizer(), [], [user("x")]).extend([66, 257], say("B"), [say("x")])


class LookOnce(Look):
    """An env with space for long calls, without compaction."""

    limits = ag.Limits(turns=3, turn_tokens=4096, context_tokens=1 << 16)
    context = ag.Compact(at=None, turns=9)


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud83d"', "[" * 600 + "]" * 600])
def test_arguments_that_no_tool_can_take_are_reported_to_the_model(value: str) -> None:
    text = f'<tool_call>\n{{"name": "look", "arguments": {{"at": {value}}}}}\n</tool_call>'
    task = ag.Task(id="t", prompt=(user("go"),))
    rollout = asyncio.run(ag.rollout(LookOnce, task, Scripted([raw(text), say("done")])))
    assert rollout.error is None
    assert rollout.metrics["malformed_calls"] == 1
