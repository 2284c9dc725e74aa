"""Tokenizers of other model families for tests: real chat templates, and a byte for each id but the special tokens."""

from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentgym.chat.tokenizer import HuggingFaceTokenizer


def byte_tokenizer(template: str, end: str, special_tokens: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ids are bytes and special tokens.

    Args:
        template: The chat template.
        end: The special token that ends a turn.
        special_tokens: The other special tokens.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token=end)
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    made.chat_template = template
    return made


@cache
def trl_template(name: str) -> str:
    """Return a chat template of a model on the Hugging Face hub, as the installed version of TRL has it."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


WANT_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates of TRL that show only contents that are lists of parts."""


def trl_names() -> list[str]:
    """Return the names of TRL's templates of models whose messages may be text, without those changed for training."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    names = [path.stem for path in sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))]
    return [name for name in names if not name.startswith(WANT_PARTS) and not name.endswith("_training")]


def family_tokenizer(
    template: str, end: str, special_tokens: Iterable[str] = (), **settings: Any
) -> HuggingFaceTokenizer:
    """Return a chat tokenizer with a family's template and special tokens, one byte per id.

    `settings` are further arguments of HuggingFaceTokenizer.
    """
    return HuggingFaceTokenizer(byte_tokenizer(template, end, special_tokens), **settings)
