"""Random tiny models of many transformers families, in each layout, beside the plain forward of each sequence alone.

Log-probabilities and the adapter's gradient of every family are compared in float32. A cell of the table is `right`,
`refused` (a ValueError at opening that names the setting), `wrong`, or `error` (any other exception). With `--shard`
FAMILIES_SHARDED are also trained by two processes, sharded with FSDP2.
"""

import argparse
import logging
import pickle
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from agentgym.train.batching.batch import collate
from agentgym.train.batching.layouts import Layout
from agentgym.train.config import TrainConfig
from agentgym.train.distributed import Ranks, open_ranks
from agentgym.train.policy.adapter_io import whole
from agentgym.train.policy.fsdp import open_policy
from agentgym.train.policy.model import PolicyModel, load_policy
from agentgym.types import Sample
from benchmarks.harness import at_least, at_most, report

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "tree")
LIMIT = 1e-3
"""Largest difference of a log-probability (nats), and of the gradient relative to its norm, that is right."""
VOCAB = 64
TEMPERATURE = 0.8

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "sliding_window": 5,
    "attention_chunk_size": 5,
    "rotary_dim": 8,
    "lru_width": 32,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_expand": 2,
    "state_size": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_mamba_heads": 2,
}
"""Small values of the settings that families have; each takes those that it knows."""

LAYER_SETTINGS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")


ROPE = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 8}
"""Scaled rotary positions that begin to differ at the ninth token."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "llama": {},
    "llama4_text": {},
    "mistral": {},
    "ministral3": {},
    "mixtral": {},
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "gemma3_text": {},
    "vaultgemma": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "gpt_oss": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {},
    "olmo_hybrid": {},
    "flex_olmo": {},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "smollm3": {},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v3": {},
    "cohere": {},
    "cohere2": {},
    "cohere2_moe": {},
    "granite": {},
    "granite_swa": {},
    "granitemoe": {},
    "granitemoehybrid": {},
    "granitemoeshared": {},
    "seed_oss": {},
    "starcoder2": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone_moe": {},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "afmoe": {},
    "helium": {},
    "hy_v3": {},
    "jais2": {},
    "internlm3": {},
    "laguna": {},
    "mellum": {},
    "minimax": {},
    "minimax_m2": {},
    "mimo_v2_flash": {},
    "nanochat": {},
    "nemotron_h": {},
    "kimi_linear": {},
    "bailing_hybrid": {},
    "inkling_text": {},
    "lfm2": {},
    "lfm3": {},
    "jamba": {},
    "zamba2": {},
    "falcon_mamba": {},
    "mamba": {},
    "rwkv": {},
    "xlstm": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_bigcode": {},
    "gptj": {},
    "gpt-sw3": {},
    "codegen": {},
    "opt": {},
    "biogpt": {},
    "bloom": {},
    "mpt": {},
    "xglm": {},
    "stablelm": {},
    "persimmon": {},
    "diffllama": {},
    "doge": {},
    "cwm": {},
    "solar_open": {},
    "youtu": {},
    "minicpm3": {},
    "falcon": {},
    "jetmoe": {},
    "axk1": {},
    "flint": {},
    "kolibri1": {},
    "hyperclovax": {},
    "aria_text": {},
    "gpt_neox_japanese": {},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 5},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
    },
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "qwen2, sliding windows": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
    "llama, llama3 rope": {
        "rope_parameters": ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    },
    "qwen3, yarn": {"rope_parameters": ROPE | {"rope_type": "yarn"}},
    "phi3, longrope": {
        "rope_parameters": ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4},
        "original_max_position_embeddings": 8,
    },
    "phi3, no window": {"sliding_window": None},
    "qwen3, tied": {"tie_word_embeddings": True},
    "mistral, no window": {"sliding_window": None},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
}
"""The families by transformers' model type, some with changed settings; what stands behind a comma is a remark."""
FAMILIES_SHARDED = (
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "llama",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3, longrope",
    "gpt_oss",
    "deepseek_v3",
    "granitemoehybrid",
)
"""Families that two processes train, too."""


def main() -> None:
    """Compare the families, and print the table and the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the last line on stdout is the report as JSON")
    parser.add_argument("--only", nargs="+", default=None, metavar="FAMILY", help="compare these alone")
    parser.add_argument("--shard", action="store_true", help="train FAMILIES_SHARDED on two processes, too")
    args = parser.parse_args()
    table = compare_families(args.only or sorted(FAMILIES))
    if args.shard:
        for name, cells in compare_sharded([name for name in FAMILIES_SHARDED if not args.only or name in args.only]):
            table[name] |= {f"{layout}, 2 ranks": cell for layout, cell in cells.items()}
    out = sys.stderr if args.json else sys.stdout
    print("\n".join(rows(table)), file=out)
    found = Counter(cell.kind for cells in table.values() for cell in cells.values())
    count = sum(found.values())
    report(
        "families",
        figures={kind: float(found[kind]) for kind in KINDS} | {"families": float(len(table)), "cells": float(count)},
        reference={"transformers": transformers_version()},
        goals={
            "families": at_least(len(table), 40),
            "wrong": at_most(found["wrong"], 0),
            "errors": at_most(found["error"], 0),
            "share of cells that are right": at_least(found["right"] / count, 0.75),
            "families that are right in padded": at_least(
                sum(cells["padded"].kind == "right" for cells in table.values()) / len(table), 1
            ),
        },
        as_json=args.json,
    )


KINDS = ("right", "refused", "wrong", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a layout is for a family."""

    kind: str
    """One of KINDS."""
    said: str
    """The largest difference of a log-probability and the relative one of the gradient, or the error's text."""


def rows(table: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    """Yield the table as Markdown, and below it what was said of the cells that are not right."""
    heads = list(dict.fromkeys(head for cells in table.values() for head in cells))
    yield "| family | " + " | ".join(heads) + " |"
    yield "|---" * (len(heads) + 1) + "|"
    for name, cells in table.items():
        yield f"| {name} | " + " | ".join(cells[head].kind if head in cells else "" for head in heads) + " |"
    for name, cells in table.items():
        for head, cell in cells.items():
            if cell.kind != "right":
                yield f"{name}, {head}: {cell.kind}: {cell.said}"


def transformers_version() -> str:
    """Return the version of transformers that is compared with."""
    import transformers

    version: str = transformers.__version__
    return version


def compare_families(names: Sequence[str]) -> dict[str, dict[str, Cell]]:
    """Compare these families, one after the other, in this process."""
    table: dict[str, dict[str, Cell]] = {}
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / name
            try:
                build(name).save_pretrained(path)
                table[name] = compare(path)
            except Exception as error:  # the rest of the table is worth having
                failed = Cell(kind="error", said=f"it cannot be built: {type(error).__name__}: {error}")
                table[name] = dict.fromkeys(LAYOUTS, failed)
            print(name, {layout: cell.kind for layout, cell in table[name].items()}, file=sys.stderr, flush=True)
    return table


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers, PEFT and the trainer say of random models."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def make_config(kind: str, changes: dict[str, Any]) -> Any:
    """Return a small config of this family, with these changes of it or of its text config."""
    from transformers import AutoConfig

    kind_class = type(AutoConfig.for_model(kind))
    whole_config = kind_class()
    fields = _small(whole_config, changes)
    nested = getattr(whole_config, "text_config", None)
    if nested is not None and not isinstance(nested, dict):
        fields = {"text_config": nested.to_dict() | _small(nested, changes)}
        for part in ("vision_config", "audio_config"):
            other = getattr(whole_config, part, None)
            if other is not None and not isinstance(other, dict):
                fields[part] = other.to_dict() | _small(other, {"intermediate_size": 48})
    try:
        return kind_class(**fields)
    except (ValueError, TypeError, KeyError):
        fields.pop("head_dim", None)
        return kind_class(**fields)


def _small(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    fixed = _fixed(config)
    fields = {
        name: value
        for name, value in SIZES.items()
        if name not in fixed and getattr(config, name, None) is not None and not isinstance(getattr(config, name), list)
    }
    if "kv_lora_rank" in fields:
        fields = {name: value for name, value in fields.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    for name in LAYER_SETTINGS:
        kinds = getattr(config, name, None)
        if isinstance(kinds, list | tuple) and name not in _fixed(config):
            fields[name] = (list(dict.fromkeys(kinds)) * 2)[:2]
    return fields | changes


def _fixed(config: Any) -> set[str]:
    """Return the settings of a config that follow from others."""
    kind = type(config)
    named = {name: kind.attribute_map.get(name, name) for name in (*SIZES, *LAYER_SETTINGS)}
    return {name for name, real in named.items() if isinstance(getattr(kind, real, None), property)}


def build(name: str) -> Any:
    """Return a random model of this family, in which every part has an effect."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(make_config(name.partition(",")[0], FAMILIES.get(name, {})))
    for weight in model.eval().float().parameters():
        if weight.ndim > 1 or not weight.isfinite().all():
            torch.nn.init.normal_(weight, std=0.15)
    return model


def samples() -> list[Sample]:
    """Return samples of different lengths that share prefixes, one of which begins like no other."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCAB - 2, 5)
    rows = []
    for number, (shared, length) in enumerate(((5, 6), (5, 14), (4, 3), (5, 9), (0, 7))):
        start = np.concatenate([prompt[:shared], rng.integers(3, VOCAB - 2, 5 - shared)])
        mask = np.ones(length, np.bool_)
        mask[0] = number % 2 == 0
        rows.append(
            Sample(
                group_id="g",
                rollout_id=f"r{number}",
                segment=0,
                step=0,
                prompt_ids=start,
                response_ids=rng.integers(3, VOCAB - 2, length),
                loss_mask=mask,
                logprobs=np.zeros(length, np.float32),
                advantages=np.ones(length, np.float32),
                weight=1.0,
            )
        )
    return rows


def plain(folder: Path, policy: PolicyModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities and the adapter's gradient by transformers and PEFT alone, sequence by sequence."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model: Any = get_peft_model(base, cast("Any", policy.model).peft_config["default"]).eval()
    mine = dict(policy.model.named_parameters())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(mine[name])
    found = []
    for sample in samples():
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]))[None]
        logits = model.get_base_model()(input_ids=ids, use_cache=False).logits[0, :-1].float() / TEMPERATURE
        scores = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
        found.append(scores[-len(sample.response_ids) :][torch.from_numpy(sample.loss_mask)])
    logprobs = torch.cat(found)
    backward(logprobs)
    return logprobs.detach(), gradients(model)


def backward(logprobs: Tensor) -> None:
    """Compute the gradient of a sum of the log-probabilities, each with a weight of its own."""
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()  # type: ignore[no-untyped-call]


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of the adapter by name, whole."""
    return {name: whole(w.grad) for name, w in model.named_parameters() if w.requires_grad and w.grad is not None}


def trained(policy: PolicyModel, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same as `plain`, as the trainer computes it."""
    batch = collate(samples(), pad_id=0, layout=layout)
    logprobs = policy(batch.inputs, batch.loss_mask_BR, TEMPERATURE)[0][batch.loss_mask_BR]
    backward(logprobs)
    return logprobs.detach(), gradients(policy.model)


@torch.no_grad()
def disturb(policy: PolicyModel) -> None:
    """Give the adapter other weights than its first ones, under which it changes nothing."""
    for weight in policy.parameters():
        if weight.requires_grad:
            values = torch.arange(weight.numel(), dtype=torch.float32).mul_(1.7).sin_().mul_(0.1)
            like = values.reshape(weight.shape)
            weight.copy_(
                distribute_tensor(like, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else like
            )


def compare(folder: Path, *, ranks: Ranks | None = None) -> dict[str, Cell]:
    """Return what each layout is for the model in a folder, on these ranks."""
    expected: Expected = []
    return {layout: _cell(folder, layout, ranks, expected) for layout in LAYOUTS}


Expected: TypeAlias = list[tuple[Tensor, dict[str, Tensor]]]
"""What `plain` returned for a model, once it was asked."""


def _cell(folder: Path, layout: Layout, ranks: Ranks | None, expected: Expected) -> Cell:
    try:
        policy = _open(folder, layout, ranks)
    except ValueError as error:
        return Cell(kind="refused", said=str(error))
    except Exception as error:
        return Cell(kind="error", said=f"{type(error).__name__}: {error}")
    disturb(policy)
    try:
        if not expected:
            alone = policy if ranks is None else _open(folder, layout, None)
            disturb(alone)
            expected.append(plain(folder, alone))
        got = trained(policy, layout)
    except Exception as error:  # a refusal comes at opening, or it is an error
        return Cell(kind="error", said=f"{type(error).__name__}: {error}")
    ((logprobs, gradient),) = expected
    gap = float((got[0] - logprobs).abs().max())
    apart = [got[1].get(name, torch.zeros_like(theirs)) - theirs for name, theirs in gradient.items()]
    norm, off = (float(torch.cat([x.flatten() for x in xs]).norm()) for xs in (gradient.values(), apart))
    right = gap <= LIMIT and off <= LIMIT * norm
    return Cell(kind="right" if right else "wrong", said=f"{gap:.1e} nats, gradient {off / norm:.1e}")


def _open(folder: Path, layout: Layout, ranks: Ranks | None) -> PolicyModel:
    if ranks is None:
        return load_policy(folder, dtype=torch.float32, rank=2, alpha=4, seed=0, layout=layout)
    config = TrainConfig(lora_rank=2, lora_alpha=4, layout=layout, device="cpu", checkpointing=True)
    return open_policy(folder, config, ranks, seed=0)


def compare_sharded(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Compare these families on two processes over gloo, which shard the model with FSDP2."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        for name in names:
            build(name).save_pretrained(Path(folder) / name)
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            list(pool.map(_rank, range(2), [folder] * 2, [tuple(names)] * 2))
        for name in names:
            cells: dict[str, Cell] = pickle.loads((Path(folder) / f"{name}.pickle").read_bytes())
            yield name, cells


def _rank(rank: int, folder: str, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        with quiet():
            for name in names:
                cells = compare(Path(folder) / name, ranks=open_ranks("cpu"))
                if rank == 0:
                    (Path(folder) / f"{name}.pickle").write_bytes(pickle.dumps(cells))
    finally:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
