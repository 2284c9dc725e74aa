# ruff: noqa: RUF001  DeepSeek's special tokens are written with a fullwidth bar
"""Published readers write and read what vectors.json has of them. `make test-peers` installs those of Python packages.

Those of SGLang and vLLM are recorded from the sources in their wheels, since the packages need CUDA.
"""

import json
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.chat.families.family import AGAIN, ASK, SAID, THOUGHT, TOOLS
from tests.support.family_tokenizers import byte_tokenizer

pytest.importorskip("renderers", reason="`make test-peers` installs it")
pytest.importorskip("mistral_common", reason="`make test-peers` installs it")

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())
KIMI = (
    "<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|im_end|> [EOS] <|tool_calls_section_begin|> "
    "<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>"
)
RENDERERS: dict[str, tuple[str, str, str]] = {
    "Kimi K2": ("kimi_k2", "KimiK2Renderer", KIMI),
    "Kimi K2.5": (
        "kimi_k25",
        "KimiK25Renderer",
        f"{KIMI} <think> </think> <|media_begin|> <|media_content|> <|media_end|> <|media_pad|>",
    ),
    "MiniMax M2": (
        "minimax_m2",
        "MiniMaxM2Renderer",
        "]~!b[ ]~b] [e~[ <think> </think> <minimax:tool_call> </minimax:tool_call>",
    ),
    "GLM 5": (
        "glm5",
        "GLM5Renderer",
        "<|endoftext|> <|user|> <|assistant|> <|observation|> <|system|> [gMASK] <sop> <think> </think> <tool_call> "
        "</tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <tool_response> </tool_response>",
    ),
    "DeepSeek V4": (
        "deepseek_v4",
        "DeepSeekV4Renderer",
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think> ｜DSML｜ "
        "<｜latest_reminder｜> <｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜>",
    ),
}
"""The module, the class and the special tokens of each renderer."""
FORMATS = {"kimi": "Kimi K2", "minimax": "MiniMax M2", "glm": "GLM 5", "dsml_v4": "DeepSeek V4"}
OPENS_THINKING = {"MiniMax M2", "GLM 5"}


def of(reader: str, kind: str) -> pytest.MarkDecorator:
    """Parametrize a test with the vectors of a reader."""
    found = [vector for vector in VECTORS[kind] if vector["reader"].startswith(reader)]
    return pytest.mark.parametrize("vector", found)


def renderer(family: str) -> tuple[Any, Any]:
    """Return a family's renderer, and its tokenizer."""
    module, name, special_tokens = RENDERERS[family]
    tokenizer = byte_tokenizer("-", "<|end of text|>", special_tokens.split())
    return getattr(import_module(f"renderers.{module}"), name)(tokenizer), tokenizer


def conversation(ids: tuple[str, str]) -> list[dict[str, Any]]:
    """Return the chat of the vectors."""
    made = [("look", {"at": 3, "what": "a b"}), ("find", {"what": "c"})]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, made, strict=True)
    ]
    results = [
        {"role": "tool", "name": name, "tool_call_id": call_id, "content": content}
        for call_id, (name, _), content in zip(ids, made, ("57", "58"), strict=True)
    ]
    turn = {"role": "assistant", "content": "So.", "reasoning_content": THOUGHT, "tool_calls": calls}
    return [dict(ASK), turn, *results, dict(SAID), dict(AGAIN)]


@pytest.mark.parametrize("kind", ["read", "written"])
def test_the_vectors_name_the_installed_versions(kind: str) -> None:
    named = {tuple(vector["reader"].split()) for vector in VECTORS[kind]}
    found = {(name, number) for name, number in named if name in ("renderers", "mistral-common")}
    assert found == {(name, version(name)) for name, _ in found}


@of("renderers", "written")
def test_a_renderer_writes_its_vectors(vector: dict[str, Any]) -> None:
    made, tokenizer = renderer(vector["family"])
    kimi = vector["family"].startswith("Kimi")
    messages = conversation(("functions.look:0", "functions.find:1") if kimi else ("call00001", "call00002"))
    ids = made.render_ids(messages[: vector["messages"]], add_generation_prompt=True)
    assert tokenizer.decode(ids).endswith(vector["text"])


@of("renderers", "read")
def test_a_renderer_reads_its_vectors(vector: dict[str, Any]) -> None:
    family = FORMATS[vector["format"]]
    made, tokenizer = renderer(family)
    text = f"</think>{vector['text']}" if family in OPENS_THINKING else vector["text"]
    read = made.parse_response(tokenizer.encode(text, add_special_tokens=False), tools=TOOLS)
    sound = all(call.status.name == "OK" for call in read.tool_calls)
    assert ([[call.name, call.arguments] for call in read.tool_calls] if sound else None) == vector["calls"]


def mistral(version: str, folder: Path) -> Any:
    """Return Mistral's tokenizer of a version, with the words of another one. The folder is for its file."""
    made = json.loads((files("mistral_common") / "data" / "tekken_240911.json").read_text())
    made["config"]["version"] = version
    special_tokens = import_module("mistral_common.tokens.tokenizers.base").SpecialTokens
    made["special_tokens"] = [
        {"rank": rank, "token_str": str(token.value), "is_control": True} for rank, token in enumerate(special_tokens)
    ]
    (folder / "tekken.json").write_text(json.dumps(made))
    kind = import_module("mistral_common.tokens.tokenizers.mistral").MistralTokenizer
    return kind.from_file(str(folder / "tekken.json"))


@of("mistral-common", "written")
def test_mistrals_tokenizer_writes_its_vectors(vector: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = mistral(vector["family"].split()[-1], tmp_path)
    messages = conversation(("call00001", "call00002"))[: vector["messages"]]
    for message in messages:
        message.pop("reasoning_content", None)
    request = import_module("mistral_common.protocol.instruct.request").ChatCompletionRequest
    ids = tokenizer.encode_chat_completion(request.from_openai(messages)).tokens
    policy = import_module("mistral_common.tokens.tokenizers.base").SpecialTokenPolicy.KEEP
    assert tokenizer.instruct_tokenizer.tokenizer.decode(ids, special_token_policy=policy) == vector["text"]
