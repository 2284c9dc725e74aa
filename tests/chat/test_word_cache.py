"""Words looked up in a table have the same ids as the tokenizer gives them in the whole text."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from agentgym.chat.encoding import SpecialTokenSplitter
from agentgym.chat.word_cache import WordCache, _ascii, raw_ids

LINES = ["the sum of 3 and 4 is 7, isn't it?\n", 'def add(a, b):\n    return {"sum": a + b}\n', "  12345 67 \t\r\n\n"]
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split(pattern: str, **settings: Any) -> pre_tokenizers.PreTokenizer:
    """Return a pre-tokenizer that splits like large models: by a pattern, and then into bytes."""
    cut = pre_tokenizers.Split(Regex(pattern), **{"behavior": "isolated"} | settings)
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(cut: pre_tokenizers.PreTokenizer, normalizer: Any = None) -> Tokenizer:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.normalizer = cut, normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(LINES * 4, trainer)
    core.add_tokens([AddedToken("<|end|>", special=False, normalized=False)])
    return core


GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

KNOWN = {
    "gpt2": trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "qwen": trained(split(QWEN), normalizers.NFC()),
    "llama3": trained(split(LLAMA)),
    "gpt4o": trained(split(GPT4O)),
}
WORDS = {name: WordCache.of(core) for name, core in KNOWN.items()}
TEXT = st.one_of(
    st.text(st.characters(max_codepoint=126), max_size=40),
    st.lists(st.sampled_from([*" \n\r\t'sSéx1\x1c_", "  ", "sum", "isn't", "<|end|>", "<|", "123"])).map("".join),
)


@pytest.mark.parametrize("name", KNOWN)
@settings(deadline=None)
@given(text=TEXT)
def test_words_have_the_ids_of_the_whole_text(name: str, text: str) -> None:
    whole = KNOWN[name].encode(text, add_special_tokens=False).ids
    assert SpecialTokenSplitter(KNOWN[name]).encode(text).tolist() == whole
    words = WORDS[name]
    assert words is not None
    if "<|end|>" not in text:
        assert words.encode(text) in (None, raw_ids(whole))


@pytest.mark.parametrize("text", ["é", "\x1c", "a" * ((1 << 17) + 1)])
def test_unusual_texts_are_left_to_the_tokenizer(text: str) -> None:
    words = WORDS["gpt2"]
    assert words is not None
    assert words.encode(text) is None


def test_a_known_word_is_not_encoded_again() -> None:
    core = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    words = WordCache.of(core)
    assert words is not None
    merged, merge = list[str](), words.ids.merge

    def watched(word: str) -> Any:
        merged.append(word)
        return merge(word)

    words.ids.merge = watched
    first = words.encode("the sum of 3")
    assert words.encode("the sum of 3 of 3") == (first or b"") + raw_ids(core.encode(" of 3").ids)
    assert merged == ["the", "Ġsum", "Ġof", "Ġ3"]


def test_the_words_of_a_long_text_have_the_ids_of_the_whole_text() -> None:
    words, text = WORDS["gpt2"], Path(__file__).read_text() * 3
    assert words is not None
    plain = text.encode("ascii", "ignore").decode().replace("<|end|>", "")
    assert words.encode(plain) == raw_ids(KNOWN["gpt2"].encode(plain, add_special_tokens=False).ids)


UNKNOWN = {
    "a prepended space": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "two splits": trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(), *[split(QWEN)]])),
    "a discarded pattern": trained(split(r"\s+", behavior="removed")),
    "lower case": trained(split(QWEN), normalizers.Lowercase()),
    "no bytes": trained(pre_tokenizers.Whitespace()),
    "nothing": Tokenizer(models.BPE()),
    "a group that captures": trained(split(r"(\s+|\S+)")),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_a_tokenizer_whose_word_boundaries_are_unknown_has_no_cache(why: str) -> None:
    assert WordCache.of(UNKNOWN[why]) is None


def test_a_pattern_that_skips_text_is_detected() -> None:
    assert WordCache.of(trained(split(r"\p{L}+"))) is None


def test_a_tokenizer_that_drops_merges_at_random_has_no_cache() -> None:
    core = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    core.model.dropout = 0.5
    assert WordCache.of(core) is None


def test_an_added_token_inside_a_piece_is_still_recognized() -> None:
    core = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    core.add_tokens([AddedToken("sum", special=False, normalized=True)])
    assert SpecialTokenSplitter(core).words is None
    assert SpecialTokenSplitter(core).encode("the sum<|end|>").tolist() == core.encode("the sum<|end|>").ids


def test_long_words_are_not_cached_so_that_the_table_stays_small() -> None:
    words = WordCache.of(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)))
    assert words is not None
    before = len(words.ids)
    for n in range(50):
        assert words.encode("x" * (100 + n)) is not None
    assert len(words.ids) == before


@pytest.mark.parametrize("pattern", [r"\p{Han}+|\p{L}+", r"\p{Lo}+|.", r"[\p{Lo}\p{M}]+|."])
def test_a_pattern_with_a_class_without_an_ascii_form_is_not_rewritten(pattern: str) -> None:
    assert _ascii(pattern) is None


@pytest.mark.parametrize("pattern", [QWEN, LLAMA, GPT4O])
def test_the_patterns_of_large_models_are_rewritten_for_ascii(pattern: str) -> None:
    assert _ascii(pattern) is not None
