"""A template that writes a turn's words after the result of its call: the turn is extended by the result alone."""

import pytest

from agentgym.chat.chat import Chat
from agentgym.chat.tokenizer import HuggingFaceTokenizer
from agentgym.engines.scripted import call, say
from agentgym.types.messages import Message
from tests.support.family_tokenizers import family_tokenizer, trl_template

MINIMAL = (
    "{% for m in messages %}{% if m.role == 'user' %}<|turn>user\n{{ m.content }}<turn|>\n"
    "{% elif m.role == 'assistant' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}"
    "<|turn>model\n{% endif %}{% for c in m.tool_calls or [] %}"
    "<|tool_call>call:{{ c.function.name }}{{ c.function.arguments | tojson }}<tool_call|>{% endfor %}"
    "{% if m.tool_calls and not loop.last %}<|tool_response>{{ messages[loop.index0 + 1].content }}<tool_response|>"
    "{% endif %}{{ m.content }}"
    "{% if not m.tool_calls or (m.content and (loop.index0 + 2 == messages|length)) %}<turn|>\n{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
)
"""Like Gemma 4: the words of a turn with calls follow the results, and close the turn if nothing follows them."""
MARKS = ["<|turn>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>"]
TEMPLATES = {"minimal": MINIMAL} | {
    name: trl_template(name) for name in ("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5")
}
ASK = Message(role="user", content="hi")
SEEN = Message(role="tool", name="look", tool_call_id="call00100", content="57")
CALLED = call("look") | {"content": "Let me look."}
"""A turn with a call, and words beside it."""


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest) -> HuggingFaceTokenizer:
    return family_tokenizer(TEMPLATES[request.param], "<turn|>", MARKS, tools="template")


def sampled(tokenizer: HuggingFaceTokenizer, words: str) -> list[int]:
    """Return the ids of a turn with a call, which ends with the opening of the result, as Gemma 4 samples it."""
    return tokenizer.encode(words + "<|tool_call>call:look{}<tool_call|><|tool_response>")


def shown(tokenizer: HuggingFaceTokenizer, words: str) -> str:
    """Return the text that is appended after a turn with these words and a call."""
    chat = Chat(tokenizer, [], [ASK])
    chat.prompt_ids()
    added = chat.extend(sampled(tokenizer, words), CALLED | {"content": words}, [SEEN])
    assert added is not None
    return tokenizer.decode(added)


def test_words_beside_a_call_change_nothing_about_what_is_appended(tokenizer: HuggingFaceTokenizer) -> None:
    appended = shown(tokenizer, "Let me look.")
    assert appended == shown(tokenizer, "")
    assert "Let me look." not in appended
    assert "<turn|>" not in appended


def test_the_conversation_goes_on_and_keeps_the_words(tokenizer: HuggingFaceTokenizer) -> None:
    chat = Chat(tokenizer, [], [ASK])
    chat.prompt_ids()
    for _ in range(3):
        assert chat.extend(sampled(tokenizer, "Let me look."), CALLED, [SEEN]) is not None
    said = chat.extend(tokenizer.encode("It is 57.<turn|>"), say("It is 57."), [ASK])
    assert said is not None
    assert tokenizer.decode(said).endswith("<|turn>model\n")
    assert chat.messages == [ASK, CALLED, SEEN, CALLED, SEEN, CALLED, SEEN, say("It is 57."), ASK]


def test_a_new_segment_shows_the_words_of_all_answered_turns(tokenizer: HuggingFaceTokenizer) -> None:
    chat = Chat(tokenizer, [], [ASK])
    chat.prompt_ids()
    chat.extend(sampled(tokenizer, "First words."), CALLED | {"content": "First words."}, [SEEN])
    stopped_by_text = sampled(tokenizer, "More words.")[:-1]
    assert chat.extend(stopped_by_text, CALLED | {"content": "More words."}, [SEEN], stopped=False) is None
    prompt = tokenizer.decode(chat.prompt_ids())
    assert prompt.count("First words.") == 1
    assert prompt.endswith("<tool_response|>")


def test_a_first_prompt_that_ends_with_results_lets_the_model_continue_its_turn(
    tokenizer: HuggingFaceTokenizer,
) -> None:
    for _ in range(2):  # The second chat finds the first prompt in the cache.
        chat = Chat(tokenizer, [], [ASK, CALLED, SEEN])
        assert tokenizer.decode(chat.prompt_ids()).endswith("<tool_response|>")
        assert chat.extend(tokenizer.encode("It is 57.<turn|>"), say("It is 57."), [ASK]) is not None
        assert chat.messages == [ASK, CALLED, SEEN, say("It is 57."), ASK]


def test_the_words_of_a_first_prompt_are_shown_again_after_the_answer(tokenizer: HuggingFaceTokenizer) -> None:
    for _ in range(2):
        chat = Chat(tokenizer, [], [ASK, CALLED, SEEN])
        chat.prompt_ids()
        assert chat.extend(tokenizer.encode("57, I say."), say("57."), [ASK], stopped=False) is None
        assert tokenizer.decode(chat.prompt_ids()).count("Let me look.") == 1


def test_a_template_that_writes_words_after_the_end_of_the_turn_opens_a_new_segment() -> None:
    template = (
        "{% for m in messages %}<|turn>{{ m.role }}\n{% if m.tool_calls %}<|tool_call>{% endif %}<turn|>"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|turn>assistant\n{% endif %}"
    )
    late = family_tokenizer(template, "<turn|>", MARKS, tools="template")
    chat = Chat(late, [], [ASK])
    chat.prompt_ids()
    assert chat.extend(late.encode("Let me look.<|tool_call><turn|>"), CALLED, [SEEN]) is None
