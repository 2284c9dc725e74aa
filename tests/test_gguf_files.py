"""GGUF files: converted once, whole or not at all, to the model that they hold."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentgym as ag
from agentgym import gguf_files
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.cli import main as cli
from agentgym.errors.extras import MissingPackage
from agentgym.files.names import cache_folder
from agentgym.hub import find_model, is_tiny, loading, refuse_missing
from agentgym.train import Trainer
from tests.files.limits import files_up_to

gguf = pytest.importorskip("gguf", reason="the package gguf writes and reads the files of these tests")

LAYERS, HEADS, KV_HEADS, WIDTH, INNER, IDS = 2, 4, 2, 64, 128, 512
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The names of a layer's weights in transformers, by their names in a GGUF file."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the converted files, which is new in each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder("gguf")


@pytest.fixture(scope="module")
def model() -> Any:
    """Return a small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=IDS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def file(model: Any, tmp_path: Path) -> Path:
    """Return a GGUF file of the model, with the tokenizer of "tiny"."""
    return write_gguf(model, tmp_path / "small.gguf")


def write_gguf(
    model: Any,
    path: Path,
    *,
    quantized: bool = False,
    splits: str = "smollm",
    architecture: str = "llama",
    without: str = "",
    **fields: int,
) -> Path:
    """Write a Llama as llama.cpp's converter does.

    Args:
        model: The model.
        path: The file.
        quantized: Whether matrices are stored in blocks of 8-bit integers, instead of in float32.
        splits: How the tokenizer splits a text into words.
        architecture: The name of the architecture.
        without: Name of a weight to leave out.
        fields: Integers to add to the tokenizer's fields.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(IDS)
    _add_tokenizer(writer, splits)
    for name, value in fields.items():
        writer.add_uint32(f"tokenizer.ggml.{name}" if name != "split_count" else "split.count", value)
    for name, weight in _weights(model).items():
        if name == without:
            continue
        if quantized and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, splits: str) -> None:
    tokenizer = chat_tokenizer("tiny").tokenizer
    added = tokenizer.added_tokens_decoder
    words = tokenizer.convert_ids_to_tokens(range(IDS))
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splits)
    writer.add_token_list(words)
    writer.add_token_types(
        [
            kinds.NORMAL if i not in added else kinds.CONTROL if added[i].special else kinds.USER_DEFINED
            for i in range(IDS)
        ]
    )
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    )
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)


def _weights(model: Any) -> dict[str, Any]:
    """Return the weights by their names in a GGUF file, in which rows of queries and keys have another order."""
    own = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    found = {"token_embd.weight": own["model.embed_tokens.weight"], "output_norm.weight": own["model.norm.weight"]}
    for layer in range(LAYERS):
        for name, theirs in BLOCK.items():
            weight = own[f"model.layers.{layer}.{theirs}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name)
            found[f"blk.{layer}.{name}.weight"] = weight if heads is None else _pairs(weight, heads)
    return found


def _pairs(weight: Any, heads: int) -> Any:
    rows, columns = weight.shape
    return np.ascontiguousarray(
        weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def logits(model: Any, ids: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits


def left_in(cache: Path) -> list[str]:
    """Return the names of everything in the cache."""
    return sorted(path.name for path in cache.iterdir())


def test_a_gguf_file_becomes_the_model_that_it_holds(file: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = find_model(file)
    read = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert read.dtype == torch.float32
    ids = list(range(40))
    assert torch.equal(logits(read, ids), logits(model, ids))
    tiny, own = chat_tokenizer("tiny"), chat_tokenizer(folder)
    assert own.tokenizer.chat_template == tiny.tokenizer.chat_template
    assert (own.special_token_ids, own.stop_ids) == (tiny.special_token_ids, tiny.stop_ids)
    text = "<|im_start|>user\nwhere is 10?<|im_end|>"
    assert own.decode(own.encode(text)) == text
    assert own.encode("where12") == tiny.encode("where12")


def test_quantized_numbers_are_kept_exactly(model: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    file = write_gguf(model, tmp_path / "small.Q8_0.gguf", quantized=True)
    read = load_file(Path(find_model(file)) / "model.safetensors")
    blocks = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.1.ffn_up.weight")
    held = torch.from_numpy(gguf.dequantize(blocks.data, blocks.tensor_type))
    assert torch.equal(read["model.layers.1.mlp.up_proj.weight"], held)
    assert not torch.equal(held, held.bfloat16().float())


def test_a_file_is_converted_once_and_again_if_its_content_changes(
    file: Path, model: Any, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = find_model(file)
    assert [record.getMessage() for record in caplog.records] == [
        f"converting {file} to the model folder {folder} (only once)"
    ]
    caplog.clear()
    gguf_files._digest.cache_clear()  # as in another process
    assert find_model(file) == folder
    (moved := file.parent / "elsewhere").mkdir()
    assert find_model(str(file.rename(moved / file.name))) == folder
    assert not caplog.records
    write_gguf(model, file, splits="gpt-2")
    changed = find_model(file)
    assert changed != folder
    assert left_in(cache) == sorted([Path(folder).name, Path(changed).name])


@pytest.mark.parametrize(("splits", "ids"), [("smollm", 2), ("gpt-2", 3)])
def test_text_is_split_into_words_as_the_file_says(splits: str, ids: int, model: Any, tmp_path: Path) -> None:
    folder = find_model(write_gguf(model, tmp_path / "small.gguf", splits=splits))
    pieces = chat_tokenizer(folder).backend.pre_tokenizer.pre_tokenize_str("\n\n3")
    assert len(pieces) == ids


def test_an_unknown_way_to_split_text_is_reported(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    find_model(write_gguf(model, tmp_path / "small.gguf", splits="newest"))
    assert "by the rule 'newest', which transformers doesn't know" in caplog.text


def test_the_end_of_a_turn_stops_the_model_as_well_as_the_end_of_a_text(model: Any, tmp_path: Path) -> None:
    from transformers import GenerationConfig

    folder = find_model(write_gguf(model, tmp_path / "small.gguf", eot_token_id=5))
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2, 5]


def test_threads_that_need_one_file_at_once_wait_for_one_conversion(
    file: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[Path | str] = []
    threads = [threading.Thread(target=lambda: found.append(find_model(file))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert left_in(cache) == [Path(found[0]).name]
    assert found == [found[0]] * 3
    assert len(caplog.records) == 1


def test_two_processes_that_convert_one_file_at_once_leave_one_folder(file: Path, cache: Path) -> None:
    other = "import sys; from agentgym.hub import find_model; print(find_model(sys.argv[1]))"
    with subprocess.Popen([sys.executable, "-c", other, str(file)], stdout=subprocess.PIPE, text=True) as process:
        folder = find_model(file)
        said, _ = process.communicate()
    assert said.strip() == str(folder)
    assert left_in(cache) == [Path(folder).name]


def test_a_full_disk_leaves_nothing(file: Path, cache: Path) -> None:
    with files_up_to(100_000), pytest.raises(Exception, match="File too large"):
        find_model(file)
    assert left_in(cache) == []
    assert Path(find_model(file), "model.safetensors").exists()


def test_what_a_killed_process_left_is_removed(file: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    kill = "import os, sys; from pathlib import Path; from agentgym.machine.process_identity import new_folder; "
    kill += "(new_folder('gguf', Path(sys.argv[1])) / 'model.safetensors').touch(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", kill, str(cache)], check=False)
    assert len(left_in(cache)) == 1
    folder = find_model(file)
    assert left_in(cache) == [Path(folder).name]
    subprocess.run([sys.executable, "-c", kill, str(cache)], check=False)
    assert cli.main(["gc"]) in (0, 1)
    assert left_in(cache) == [Path(folder).name]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("text", "it is not a GGUF file; give the model's .gguf file"),
        ("cut", "cannot be converted: "),
        ("part", "it is one part of several; join them"),
        ("unknown", "architecture newest is not supported"),
        ("incomplete", "it lacks 1 of the model's weights, such as model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_in_one_line(
    fault: str, said: str, model: Any, tmp_path: Path, cache: Path
) -> None:
    file = tmp_path / "broken.gguf"
    if fault == "text":
        file.write_text("a page of HTML, as a failed download leaves it")
    elif fault == "cut":
        write_gguf(model, file)
        file.write_bytes(file.read_bytes()[:5000])
    elif fault == "part":
        write_gguf(model, file, split_count=3)
    elif fault == "unknown":
        write_gguf(model, file, architecture="newest")
    else:
        write_gguf(model, file, without="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match=f"^model: {file} cannot be converted: ") as refused:
        find_model(file)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert left_in(cache) == []


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingPackage, match=r"^gguf is not installed: pip install .*\[gguf\]"):
        chat_tokenizer(file)


def test_a_missing_file_is_not_taken_for_a_name_on_the_hub(tmp_path: Path) -> None:
    for name in ("small.gguf", str(tmp_path / "small.gguf")):
        with pytest.raises(ValueError, match=f"^model: there is no file {name}; give .* a GGUF file"), loading(name):
            raise AssertionError


def test_a_folder_of_gguf_files_is_refused_with_the_file_to_give(file: Path) -> None:
    with pytest.raises(ValueError, match=f"^model: {file.parent} holds only GGUF files; .* such as {file}$"):
        refuse_missing(file.parent)


def test_whether_a_model_is_tiny_is_known_without_a_conversion(file: Path, cache: Path) -> None:
    assert not is_tiny(file)
    assert not cache.exists()


async def test_a_gguf_file_is_trained_and_evaluated(file: Path, tmp_path: Path) -> None:
    with Trainer(file, ag.TrainConfig(lora_rank=2)) as trainer:
        trainer.save(tmp_path / "adapter")
    played = await ag.evaluate("chase", tmp_path / "adapter", n=1, sampling=ag.Sampling(max_tokens=4))
    own = await ag.evaluate("chase", file, n=1, sampling=ag.Sampling(max_tokens=4))
    assert len(own.rollouts) == len(played.rollouts) == 1
