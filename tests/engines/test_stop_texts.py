"""Texts that end a turn: found at the id that completes them, at a cost that does not grow with the turn."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from agentgym.engines.scripted import ByteTokenizer
from agentgym.engines.stop_texts import StopTexts
from agentgym.types.completion import Sampling


class Pairs(ByteTokenizer):
    """A tokenizer with ids of one byte or two that counts the ids it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return b"".join(divmod_bytes(i) for i in token_ids).decode(errors="replace")


def divmod_bytes(i: int) -> bytes:
    return bytes([i]) if i < 1000 else bytes([(i - 1000) // 256, (i - 1000) % 256])


def ids_of(text: bytes, cuts: Sequence[bool]) -> list[int]:
    """Return a text's ids; an id has two bytes if its cut is true."""
    ids, at = list[int](), 0
    for two in cuts:
        if at < len(text):
            ids.append(1000 + 256 * text[at] + text[at + 1] if two and at + 1 < len(text) else text[at])
            at += 1 + (two and at + 1 < len(text))
    return ids + list(text[at:])


def ended_at(ids: Sequence[int], stop: tuple[str, ...], tokenizer: ByteTokenizer) -> int | None:
    """Return the length at which one of these texts ends the turn, or None if none does."""
    stops = StopTexts.of(tokenizer, Sampling(stop=stop))
    assert stops is not None
    turn = np.array(ids)
    return next((end for end in range(1, len(ids) + 1) if stops.reason(turn[:end]) == "stop_text"), None)


TEXT = st.text("ab é🙂", max_size=30)


@given(TEXT, st.lists(st.text("ab é🙂", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.booleans()))
def test_a_turn_ends_with_the_first_id_that_completes_a_stop_text(text: str, stop: list[str], cuts: list[bool]) -> None:
    tokenizer, ids = Pairs(), ids_of(text.encode(), cuts)
    whole = (end for end in range(1, len(ids) + 1) if any(one in tokenizer.decode(ids[:end]) for one in stop))
    assert ended_at(ids, tuple(stop), tokenizer) == next(whole, None)


@pytest.mark.parametrize("sampled", [b"a", b"\xff", b"\xf0\x9f"])
def test_an_id_costs_the_same_however_long_the_turn_and_the_stop_texts_are(sampled: bytes) -> None:
    tokenizer, ids = Pairs(), list(sampled) * (4000 // len(sampled))
    stop = tuple("a" * 255 + chr(98 + i) for i in range(16))
    assert ended_at(ids, stop, tokenizer) is None
    assert tokenizer.decoded <= 40 * len(ids)
    assert ended_at([*ids, *b"END"], ("END",), tokenizer) == len(ids) + 3


def test_at_most_16_stop_texts_of_256_characters_are_accepted() -> None:
    assert len(Sampling(stop=("x" * 256,) * 16).stop) == 16
    with pytest.raises(ValueError, match=r"^stop: must have at most 16 items, got"):
        Sampling(stop=("x",) * 17)
    with pytest.raises(ValueError, match=r"^stop\.1: must have at most 256 characters, got"):
        Sampling(stop=("x", "x" * 257))
