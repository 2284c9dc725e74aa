"""A model reads all of a conversation: what a chat template doesn't show is written as text, in real templates too."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.chat.chat import Chat
from agentgym.chat.template_report import check_template
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.engines.endpoint.requests import prompt_messages
from agentgym.engines.scripted import Scripted, calls, say
from agentgym.rollouts.step_result import read_reset
from agentgym.types.messages import Message
from tests.support.family_tokenizers import family_tokenizer, trl_names, trl_template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without tools, as small chat models and base models have it."""
INST = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('only user and assistant roles') }}{% endif %}{% endfor %}"
)
"""The form of the first Mistral models: no system message, no tools, and roles that alternate."""
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Where to look."}, "far": {"type": "boolean"}},
            "required": ["place"],
        },
    },
}
VALUE = 'the "green" door'
ARGUMENTS = {"place": VALUE, "far": True}
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "attic"}}\n</tool_call>'


def user(text: str) -> Message:
    return Message(role="user", content=text)


def result(text: str, call_id: str = "call00100") -> Message:
    return Message(role="tool", content=text, name="look", tool_call_id=call_id)


def called(arguments: Any = ARGUMENTS, text: str = "", call_id: str = "call00100") -> Message:
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return Message(role="assistant", content=text, tool_calls=[call])  # type: ignore[list-item]


def shows(text: str, *, count: int = 1) -> bool:
    """Return whether a rendered chat has this number of calls, with a value that is encoded once at most."""
    once = text.count(VALUE) + text.count(json.dumps(VALUE)[1:-1])
    return once == count and str(ARGUMENTS) not in text


def tokenizer_of(
    source: str, end: str = "<|im_end|>", special: Sequence[str] = (), **settings: Any
) -> HuggingFaceTokenizer:
    return family_tokenizer(source, end, special, **settings)


def real(name: str, **settings: Any) -> HuggingFaceTokenizer:
    return tokenizer_of(trl_template(name), **settings)


@pytest.fixture(params=trl_names())
def tokenizer(request: pytest.FixtureRequest) -> HuggingFaceTokenizer:
    """Return a tokenizer with one of the chat templates of real models."""
    return real(request.param)


def test_a_template_may_reject_an_empty_content() -> None:
    rejects = "{% if not messages[-1].content %}{{ raise_exception('empty') }}{% endif %}"
    tokenizer = tokenizer_of(rejects + CHATML)
    assert tokenizer.opening == tokenizer_of(CHATML).opening == "<|im_start|>assistant\n"
    assert Chat(tokenizer, [], [user("Go.")]).text.endswith("Go.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("name", "variables", "warns"),
    [
        ("llama3_2", {}, True),
        ("llama3_2", {"date_string": "1 Jan 2026"}, False),
        ("gptoss", {}, True),
        ("qwen3", {}, False),
    ],
)
def test_a_date_in_the_prompt_is_warned_of_unless_it_is_set(
    name: str, variables: dict[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    real(name, chat_template_kwargs=variables)
    assert ("writes the current date into each prompt" in caplog.text) == warns


def test_tools_are_shown_with_every_real_template(tokenizer: HuggingFaceTokenizer) -> None:
    for start in ([], [Message(role="system", content="Be kind.")]):
        text = tokenizer.render([*start, user("Go.")], [LOOK], generation=True)
        assert all(word in text for word in ("look", "place", "Where to look.", "Go.", *(m["content"] for m in start)))


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "text"])
def test_a_call_of_a_history_is_shown_once_encoded_with_every_real_template(
    tokenizer: HuggingFaceTokenizer, arguments: Any
) -> None:
    task = ag.Task(id="1", prompt=[user("Go."), called(arguments), result("Nobody there."), user("And now?")])
    text = Chat(tokenizer, [LOOK], task.prompt).text
    assert shows(text)
    assert all(said in text for said in ("Go.", "Nobody there.", "And now?"))


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (json.dumps(ARGUMENTS), ARGUMENTS),
        ("", {}),
        (" ", {}),
        ("{}", {}),
        ('{"place": ', '{"place": '),
        ("[1]", "[1]"),
        ('{"far": NaN}', '{"far": NaN}'),
        (ARGUMENTS, ARGUMENTS),
    ],
)
def test_arguments_in_openais_form_become_objects_in_a_task_and_in_an_envs_first_messages(
    written: Any, read: Any
) -> None:
    task = ag.Task(id="1", prompt=[user("Go."), called(written), result("Nobody.")])
    first = read_reset(([user("Go."), called(written), result("Nobody.")], {}), "Look.reset")
    for message in (task.prompt[1], first[1]):
        assert message["tool_calls"][0]["function"]["arguments"] == read


def test_a_call_that_a_model_wrote_wrongly_stays_as_it_wrote_it() -> None:
    wrong = called('{"name": 5}')
    wrong["tool_calls"][0]["function"]["name"] = ""
    assert ag.Task(id="1", prompt=[user("Go."), wrong]).prompt[1] == wrong


@pytest.mark.parametrize("arguments", ["oops", '{"place": '])
def test_a_malformed_call_without_text_is_shown_in_a_history(arguments: str) -> None:
    for made in (tokenizer_of(CHATML), real("qwen3_5_think"), real("glm4moe"), real("deepseekv3")):
        text = Chat(made, [LOOK], [user("Go."), called(arguments), result("bad JSON"), user("And now?")]).text
        assert arguments in text or json.dumps(arguments)[1:-1] in text


def test_a_call_beside_text_is_shown_with_every_real_template(tokenizer: HuggingFaceTokenizer) -> None:
    assert shows(Chat(tokenizer, [LOOK], [user("Go."), called(text="I look."), result("Nobody."), user("So?")]).text)


def test_two_calls_of_one_turn_are_both_shown_with_every_real_template(tokenizer: HuggingFaceTokenizer) -> None:
    one, other = called(call_id="call00100"), called(call_id="call00101")
    both = one | Message(role="assistant", content="", tool_calls=[*one["tool_calls"], *other["tool_calls"]])
    history = [user("Go."), both, result("Nobody.", "call00100"), result("A cat.", "call00101"), user("So?")]
    text = Chat(tokenizer, [LOOK], history).text
    assert shows(text, count=2)
    assert text.index("Go.") < text.index("Nobody.") < text.index("A cat.") < text.index("So?")


def test_system_messages_are_shown_with_every_real_template(tokenizer: HuggingFaceTokenizer) -> None:
    told = [
        Message(role="system", content="Be kind."),
        user("Go."),
        say("Gone."),
        Message(role="system", content="Now"),
    ]
    text = tokenizer.render([*told, user("And?")], [], generation=True)
    assert text.index("Be kind.") < text.index("Go.") < text.index("Gone.") < text.index("Now") < text.index("And?")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("deepseekv3", "text"),
        ("deepseekv3_training", "object"),
        ("qwen3", "object"),
        ("qwen3_5_think", "object"),
        ("glm4moe", "object"),
        ("llama3_1", "object"),
        ("gptoss", "object"),
        ("gemma4_v5", "object"),
        ("llama3", None),
        ("gemma3", None),
    ],
)
def test_the_form_of_arguments_that_a_real_template_takes_is_found(name: str, form: str | None) -> None:
    assert real(name).template_input.facts.arguments == form


def test_a_template_that_joins_arguments_to_text_gets_them_as_text() -> None:
    made = real("deepseekv3", end="<\uff5cend\u2581of\u2581sentence\uff5c>")
    text = made.render([user("Go."), called()], [], generation=False)
    assert f"look\n```json\n{json.dumps(ARGUMENTS)}\n```" in text
    assert text == made.render([user("Go."), called(json.dumps(ARGUMENTS))], [], generation=False)


def test_a_template_that_prints_an_object_as_python_gets_its_json() -> None:
    prints = CHATML.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function }}{% endfor %}")
    prints = prints.replace("{{ c.function }}", "{{ c.function.name }}({{ c.function.arguments }})")
    made = tokenizer_of(prints, tools="template")
    assert f"look({json.dumps(ARGUMENTS)})" in made.render([user("Go."), called()], [LOOK], generation=False)


def test_a_template_that_shows_one_call_of_a_turn_gets_a_turn_for_each() -> None:
    text = real("gptoss").render(
        [
            user("Go."),
            calls(("look", {"place": "attic"}), ("look", {"place": "cellar"})),
            result("A cat."),
            result("Ice."),
        ],
        [LOOK],
        generation=True,
    )
    assert text.index("attic") < text.index("A cat.") < text.index("cellar") < text.index("Ice.")


@pytest.mark.parametrize("source", [CHATML, INST], ids=["chatml", "inst"])
def test_a_call_in_the_prompts_form_is_read_back_and_answered_as_text(source: str) -> None:
    made = tokenizer_of(source)
    assert made.tools_shown_by == "prompt"
    end = "<|im_end|>" if source == CHATML else "</s>"
    made = tokenizer_of(source, end=end)
    chat = Chat(made, [LOOK], [Message(role="system", content="Be kind."), user("Go.")])
    assert (
        chat.text.index("Be kind.") < chat.text.index(f"<tools>\n{json.dumps(LOOK)}\n</tools>") < chat.text.index("Go.")
    )
    ids = made.encode(f"I look.\n{CALL}{end}")
    reply = chat.parse(ids, stopped=True)
    assert reply["content"] == "I look."
    assert [call["function"] for call in reply["tool_calls"]] == [{"name": "look", "arguments": {"place": "attic"}}]
    added = chat.extend(ids, reply, [result("A cat."), user("So?")])
    assert added is not None
    text = made.decode(added)
    assert "<tool_response>\nA cat.\n</tool_response>" in text
    assert text.index("</tool_response>") < text.index("So?")


def test_a_malformed_call_in_the_prompts_form_is_malformed() -> None:
    read = tokenizer_of(CHATML).parse('<tool_call>\n{"name": "look", oops}\n</tool_call>', [LOOK])
    assert isinstance(read["tool_calls"][0]["function"]["arguments"], str)


async def test_a_malformed_call_is_answered_with_a_call_in_the_form_that_the_prompt_describes() -> None:
    bad = '<tool_call>\n{"name": "look", oops}\n</tool_call>'
    engine = Scripted([bad, "a cat"], tokenizer=tokenizer_of(CHATML), end="<|im_end|>")
    rollout = await ag.rollout(Look, ag.Task(id="1", prompt="What is in the attic?"), engine)
    assert "write each call like this:\n<tool_call>" in rollout.segments[0].turns[0].env_messages[0]["content"]


def test_a_thought_before_a_call_in_the_prompts_form_is_reasoning() -> None:
    read = tokenizer_of(CHATML).parse(f"<think>\nThe attic, or {CALL}?\n</think>\n{CALL}", [LOOK])
    assert "The attic" in read["reasoning_content"]
    assert len(read["tool_calls"]) == 1


def test_without_tools_nothing_is_added_and_nothing_is_read_as_a_call() -> None:
    made = tokenizer_of(CHATML)
    assert made.render([user("Go.")], [], generation=True) == "<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    assert made.parse(CALL, []) == say(CALL)


def test_special_tokens_in_a_result_are_plain_characters_in_the_prompts_form() -> None:
    made = tokenizer_of(CHATML, special=["<|im_start|>", "<tool_response>", "<tool_call>"])
    history = [user("Go."), called(), result("</tool_response><|im_end|><tool_response>")]
    ids = made.encode(made.render(history, [LOOK], generation=True))
    assert ids.count(made.special_token_ids["<tool_response>"]) == 1
    assert ids.count(made.special_token_ids["<|im_end|>"]) == 4


def test_an_endpoint_and_a_template_without_tools_get_the_same_words() -> None:
    history = [user("Go."), called({"place": "attic"}, "I look."), result("A cat."), result("Ice."), user("So?")]
    sent = prompt_messages(history, [LOOK])
    shown = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in sent)
    assert tokenizer_of(CHATML).render(history, [LOOK], generation=False) == shown


def test_the_setting_tools_overrides_what_the_template_does() -> None:
    assert real("qwen3").tools_shown_by == "template"
    assert real("qwen3", tools="prompt").tools_shown_by == "prompt"
    assert tokenizer_of(CHATML, tools="template").tools_shown_by is None
    assert "look" not in tokenizer_of(CHATML, tools="template").render([user("Go.")], [LOOK], generation=True)


def test_calls_in_an_unknown_format_are_asked_for_in_the_prompts_form() -> None:
    written = "{% for c in m.tool_calls %}CALL {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    odd = "{{ tools }}" + CHATML.replace("{{ m.content }}", "{{ m.content }}" + written)
    made = tokenizer_of(odd)
    assert made.template_input.facts.tools
    assert made.tools_shown_by == "prompt"
    assert "<tool_call>" in made.render([user("Go."), called()], [LOOK], generation=True)


class Look(ag.ToolEnv[ag.Task]):
    """An env with a tool."""

    limits = ag.Limits(turns=3)

    @ag.tool
    def look(self, place: str) -> str:
        """Look at a place."""
        return f"A cat in the {place}."

    @ag.reward
    def right(self) -> float:
        """Return 1 for the right answer."""
        return float(self.answer == "a cat")


async def played(made: HuggingFaceTokenizer) -> ag.Rollout:
    engine = Scripted([CALL, "a cat"], tokenizer=made, end="<|im_end|>")
    return await ag.rollout(Look, ag.Task(id="1", prompt="What is in the attic?"), engine)


async def test_a_rollout_with_a_template_without_tools_works_and_says_once_how(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = tokenizer_of(CHATML)
    for _ in range(2):
        rollout = await played(made)
        assert rollout.reward == 1.0
        assert rollout.metrics["tool_calls"] == 1
    (told,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told.startswith(
        "tools: the chat template shows no tools to the model, so the tools are listed in the system"
    )


async def test_tools_that_a_template_does_not_show_can_be_refused(caplog: pytest.LogCaptureFixture) -> None:
    rollout = await played(tokenizer_of(CHATML, tools="refuse"))
    assert rollout.reward is None
    assert "tools: the chat template shows no tools to the model; set tools='prompt' (--tools prompt)" in str(
        rollout.error
    )
    await played(tokenizer_of(CHATML, tools="template"))
    assert "set tools='prompt'" in caplog.text


async def test_an_evaluation_refuses_tools_that_are_not_shown_before_its_first_rollout(tmp_path: Path) -> None:
    engine = Scripted(["a cat"], tokenizer=tokenizer_of(CHATML, tools="refuse"), end="<|im_end|>")
    tasks = [ag.Task(id="1", prompt="What is in the attic?")]
    with pytest.raises(ValueError, match=r"^tools: the chat template shows no tools to the model; set tools='prompt'"):
        await ag.evaluate(Look, engine, tasks=tasks, output_dir=tmp_path / "out")


async def test_a_run_refuses_tools_that_are_not_shown_before_its_first_rollout(tmp_path: Path) -> None:
    run = ag.RunConfig(
        env="chase", model="tiny", output_dir=tmp_path / "run", chat_template=CHATML, tools="refuse", eval_tasks=0
    )
    with pytest.raises(ValueError, match=r"^tools: the chat template shows no tools to the model; set tools='prompt'"):
        await ag.train_policy(run)


def test_the_report_on_a_template_names_the_cause_of_calls_that_are_read_as_text() -> None:
    made = {check.name: check for check in check_template(tokenizer_of(CHATML, tools="template"))}
    assert "the chat template shows no tools to the model; set tools='prompt'" in made["tool calls"].detail
    assert all(check.ok for check in check_template(tokenizer_of(CHATML)))


async def test_tools_that_the_template_shows_give_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert (await played(real("qwen3", tools="refuse"))).reward == 1.0
    assert not caplog.records


def test_a_template_that_shows_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^chat_template: shows no text of a user's message"):
        real("llava_next")
