"""GGUF files, in which llama.cpp keeps a whole model: converted to model folders, once for each file's content."""

import hashlib
import logging
import re
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from agentgym.errors.extras import needs_extra
from agentgym.errors.tracebacks import describe
from agentgym.files.disk import disk_trouble
from agentgym.files.names import cache_folder
from agentgym.machine.process_identity import dead_folders, new_folder, remove_folder

_LOG = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_VERSION = b"1"
"""Version of the conversion. A file that was converted by another version is converted again."""
_GPT2 = frozenset(("default", "gpt-2", "gpt2"))
"""Names in `tokenizer.ggml.pre` of GPT-2's way to split a text into words, which transformers uses by default."""
_DIGITS = frozenset(("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"))
"""Names in `tokenizer.ggml.pre` of the same way, but with each digit as a separate word."""
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""The fields with the ids that end a turn."""
_ONE_AT_A_TIME = threading.Lock()
"""Held during a conversion, because transformers can't load two models at once in one process."""


def is_gguf(model: Path | str) -> bool:
    """Return whether a model is named like a GGUF file."""
    return str(model).lower().endswith(".gguf")


def gguf_folder(file: Path) -> Path:
    """Return the model folder of a GGUF file in the cache; convert the file if the cache doesn't have it.

    The folder is named after the file and its content, so that a file can be moved or replaced. Two processes may
    convert the same file at once: the first one that finishes creates the folder.

    Raises:
        ValueError: If the file can't be read or converted.
        MissingPackage: If the package gguf isn't installed.
        OSError: If the disk is full.
    """
    file = file.resolve()
    found = file.stat()
    name = re.sub(r"[^A-Za-z0-9._-]", "-", file.stem)[:80]
    folder = cache_folder("gguf") / f"{name}-{_digest(file, found.st_size, found.st_mtime_ns)[:16]}"
    with _ONE_AT_A_TIME:
        if not folder.is_dir():
            _LOG.warning("converting %s to the model folder %s (only once)", file, folder)
            convert_gguf(file, folder)
    return folder


@lru_cache(maxsize=64)
def _digest(file: Path, size: int, modified_ns: int) -> str:
    """Return a digest of the file's content; its size and time are parts of the key under which it is cached."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.sha256(_VERSION)).hexdigest()


def convert_gguf(file: Path, folder: Path) -> None:
    """Write a GGUF file as a model folder: its weights, config, tokenizer, chat template and stop ids.

    The weights are float32, the smallest type of transformers that holds each number of the file exactly: a quantized
    number is the product of an integer and a 16-bit scale. An engine and a trainer convert them to their own dtype.

    Args:
        file: The file.
        folder: The folder, which is complete or doesn't exist. If it exists in the end because another process wrote
            it, it is left as it is.

    Raises:
        ValueError: If the file can't be read or converted.
        MissingPackage: If the package gguf isn't installed.
        OSError: If the disk is full.
    """
    with needs_extra():
        import gguf  # noqa: F401  transformers' reader needs it, and reports it missing in its own words
        import transformers  # noqa: F401
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in dead_folders(folder.parent):
        remove_folder(left)
    fresh = new_folder("gguf", folder.parent)
    try:
        _write(file, fresh)
        fresh.chmod(0o755)
        if not folder.is_dir():
            fresh.rename(folder)
    except Exception as error:  # A broken file raises anything that its readers raise: KeyError, struct.error.
        if folder.is_dir():
            return
        if disk_trouble(error) is not None or isinstance(error, MemoryError):
            raise
        raise ValueError(f"model: {file} cannot be converted: {' '.join(describe(error).split())}") from error
    finally:
        remove_folder(fresh)


def _write(file: Path, folder: Path) -> None:
    """Write the model, the tokenizer and the generation config into an existing folder."""
    fields = _fields(file)
    _convert_model(file, fields).save_pretrained(folder)
    _convert_tokenizer(file, fields).save_pretrained(folder)


def _fields(file: Path) -> dict[str, Any]:
    """Return the file's fields of one value.

    Raises:
        ValueError: If it isn't a GGUF file, or only a part of one.
    """
    from gguf import GGUFReader

    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is not a GGUF file; give the model's .gguf file, or its Hugging Face folder")
    fields = {name: field.contents() for name, field in GGUFReader(file).fields.items() if len(field.data) == 1}
    if fields.get("split.count", 1) > 1:
        raise ValueError(
            "it is one part of several; join them with `llama-gguf-split --merge`, and give the joined file"
        )
    return fields


def _convert_model(file: Path, fields: dict[str, Any]) -> Any:
    """Return the model of a GGUF file in a form that can be saved: transformers saves no model that it read from one.

    Raises:
        ValueError: If the file lacks weights of the model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded, found = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype="float32",
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if missing := sorted(map(str, found["missing_keys"])):
        raise ValueError(f"it lacks {len(missing)} of the model's weights, such as {missing[0]}")
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(loaded.config, dtype="float32")
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    ends = sorted({fields[name] for name in _ENDS if name in fields})
    if ends:
        model.generation_config.eos_token_id = ends
    return model


def _convert_tokenizer(file: Path, fields: dict[str, Any]) -> Any:
    """Return the tokenizer of a GGUF file, with its chat template."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    splits = fields.get("tokenizer.ggml.pre", "default")
    if fields.get("tokenizer.ggml.model") != "gpt2" or splits in _GPT2 or splits in GGUF_PRE_TOKENIZER_SPLITS:
        return tokenizer
    if splits in _DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        return tokenizer
    _LOG.warning(
        "%s: its tokenizer splits text into words by the rule %r, which transformers doesn't know, so GPT-2's is used: "
        "some texts may get other ids than in the model's training; use its Hugging Face folder if you can",
        file,
        splits,
    )
    return tokenizer
