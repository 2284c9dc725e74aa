"""The bytes of single tokens: concatenated, they are the text that the tokenizer decodes."""

import pytest
from hypothesis import given, settings, strategies as st

from agentgym.chat.tokenizer import ChatTokenizer
from agentgym.engines.scripted import Scripted
from agentgym.engines.token_bytes import bytes_by_model
from agentgym.testing import say
from tests.chat.test_special_tokens import TOKENIZERS

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS | st.sampled_from(["<|im_start|>user\nhi<|im_end|>\n", "a 😀 b", "中文 é"]))
def test_the_bytes_of_a_texts_tokens_form_the_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    known = bytes_by_model(Scripted([say("x")], tokenizer=tokenizer), {})("", ids)
    joined = b"".join(known[token] for token in ids).decode(errors="replace")
    assert joined == tokenizer.decode(ids)


def test_a_tokenizer_without_token_bytes_decodes_each_token() -> None:
    class Plain:
        """A user's tokenizer with only what the protocol requires."""

        def decode(self, token_ids: list[int]) -> str:
            return {7: "seven", 8: "\ud800"}[token_ids[0]]

    plain: ChatTokenizer = Plain()  # type: ignore[assignment]
    known = bytes_by_model(Scripted([say("x")], tokenizer=plain), {})
    assert known("", [7, 8]) == {7: b"seven", 8: b"?"}


def test_each_model_has_its_own_tokenizer_and_unknown_models_have_none() -> None:
    policy = Scripted([say("x")], tokenizer=TOKENIZERS["byte_level"])
    judge = Scripted([say("x")])
    known = bytes_by_model(policy, {"judge": judge})
    assert known("judge", [104, 256]) == {104: b"h", 256: b"<|im_start|>"}
    assert known("", TOKENIZERS["byte_level"].encode("h")) != {104: b"h"}
    assert known("stranger", [104]) == {}


def test_nonexistent_ids_are_left_out() -> None:
    known = bytes_by_model(Scripted([say("x")], tokenizer=TOKENIZERS["byte_level"]), {})
    assert known("", [1 << 20]) == {}
    known = bytes_by_model(Scripted([say("x")], tokenizer=TOKENIZERS["sentencepiece"]), {})
    assert known("", [1 << 20]) == {}
