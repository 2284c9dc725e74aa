"""The GPU guide: its commands are parsed, its recipes build, and its memory numbers are those of meta tensors."""

import argparse
import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.run import get_args_parser

import agentgym as ag
from agentgym.cli.recipe import settings
from agentgym.engines.sglang.config import LORA_MODULES
from agentgym.testing import sample
from agentgym.train.batching.layouts import Layout, lay_out
from benchmarks.memory import GIB, SHAPES, Memory, count, rows
from recipes import qwen3_4b_grpo, qwen3_8b_grpo_8gpu

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "gpus.md").read_text()
BY_FIGURE = (DOCS / "troubleshooting.md").read_text().partition("### By metric")[2].partition("\n## ")[0]
"""The table of fixes for bad metrics, which names the recipes' flags."""
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line.strip()
]
FLAG = re.compile(r"`--((?:train|engine|oversample|branching|gae)\.[\w-]+|[a-z][\w-]+)")
OF_OTHERS = {"mem-fraction-static", "context-length", "max-lora-rank", "base-gpu-id", "port", "nproc-per-node", "best"}
"""Flags in the guide's text that belong to a server, to torchrun or to `agentgym show`."""


@cache
def counted(name: str) -> Memory:
    return count(SHAPES[name], rank=32)


def parsed(module: str, arguments: list[str]) -> ag.RunConfig:
    """Return the settings of a module's recipe with these flags."""
    return settings(importlib.import_module(module).RECIPE, arguments)


def server_parser() -> argparse.ArgumentParser:
    """Return a parser for a server's flags: those that agentgym itself sets, and those for a server started by hand."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--model-path", "--host", "--base-gpu-id"):
        made.add_argument(flag)
    for number in ("--port", "--context-length", "--max-running-requests", "--max-lora-rank"):
        made.add_argument(number, type=int)
    made.add_argument("--mem-fraction-static", type=float)
    for switch in ("--enable-lora", "--enable-fp32-lm-head"):
        made.add_argument(switch, action="store_true")
    made.add_argument("--lora-target-modules", nargs="+")
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_guide_is_parsed(command: str) -> None:
    program, *words = shlex.split(command, comments=True)
    if program == "torchrun":
        asked = get_args_parser().parse_args(words)
        assert asked.module
        run = parsed(asked.training_script, asked.training_script_args)
        assert run.name == qwen3_8b_grpo_8gpu.RECIPE.name
        assert isinstance(run.engine, ag.SGLangConfig)
        on_one_machine = int(asked.nproc_per_node) + run.engine.servers * run.engine.tp
        assert run.engine.urls or on_one_machine == 8
        return
    assert program == "python"
    assert words[0] == "-m"
    if words[1] == "sglang.launch_server":
        check_server(words[2:])
    else:
        parsed(words[1], words[2:])


def check_server(words: list[str]) -> None:
    """Check that a server started by hand accepts the adapters and the context length of the recipe that uses it."""
    asked = server_parser().parse_args(words)
    recipe = next(
        made for made in (qwen3_4b_grpo.RECIPE, qwen3_8b_grpo_8gpu.RECIPE) if str(made.model) == asked.model_path
    )
    assert isinstance(recipe.engine, ag.SGLangConfig)
    assert asked.enable_lora
    assert asked.max_lora_rank == recipe.train.lora_rank
    assert tuple(asked.lora_target_modules) == LORA_MODULES
    assert asked.max_running_requests == recipe.engine.slots
    launched = recipe.engine.launch_command(asked.model_path, port=asked.port, context_limit=40_960)
    assert str(asked.context_length) == launched[launched.index("--context-length") + 1]


def test_recipes_and_servers_have_commands() -> None:
    for part in ("recipes.qwen3_4b_grpo", "recipes.qwen3_8b_grpo_8gpu", "sglang.launch_server", "--nnodes"):
        assert any(part in command for command in COMMANDS), part


def test_every_flag_in_the_text_belongs_to_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings(qwen3_4b_grpo.RECIPE, ["--help"])
    known = set(re.findall(r"--(?:no-)?([a-z][\w.-]*)", capsys.readouterr().out))
    prose = re.sub(r"^```sh\n.*?^```", "", GUIDE + BY_FIGURE, flags=re.DOTALL | re.MULTILINE)
    asked = {flag.replace("_", "-") for flag in FLAG.findall(prose)}
    assert len(asked) > 20
    assert sorted(asked - known - OF_OTHERS) == []


def test_the_guides_memory_table_matches_the_counted_policy() -> None:
    named = {name: rows(counted(name), 16_384) for name in SHAPES}
    lines = [f"| {line} | {' | '.join(named[name][line] for name in SHAPES)} |" for line in named["Qwen3-4B"]]
    assert "\n".join(lines) in GUIDE


@pytest.mark.parametrize("name", SHAPES)
def test_the_counts_match_the_published_dimensions(name: str) -> None:
    """Each weight counted by hand: q and o, k and v, the MLP, the norms, embedding and output layer."""
    shape, found = SHAPES[name], counted(name)
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    pairs = [(shape.hidden, heads), (heads, shape.hidden), *[(shape.hidden, kv_heads)] * 2]
    pairs += [(shape.hidden, shape.intermediate)] * 3
    matrices = shape.layers * sum(one * other for one, other in pairs)
    norms = shape.layers * (2 * shape.hidden + 2 * shape.head_dim) + shape.hidden
    tables = shape.hidden * shape.vocabulary * (1 if shape.tied else 2)
    assert found.parameters == matrices + norms + tables
    assert found.weight_bytes == 2 * found.parameters
    assert found.adapter_parameters == 32 * shape.layers * sum(one + other for one, other in pairs)
    assert found.checkpoint_bytes == 2 * shape.hidden
    assert found.full_bytes == 16 * found.parameters
    assert found.gathered_bytes == 2 * tables
    assert found.full_layer_bytes < found.layer_bytes  # no float32 inputs of adapters


def test_a_layer_keeps_at_least_what_its_products_need() -> None:
    """A layer must keep at least the inputs of the MLP's product, of attention, and of the adapters in float32."""
    shape, found = SHAPES["Qwen3-4B"], counted("Qwen3-4B")
    heads = shape.heads * shape.head_dim
    adapters = 4 * (5 * shape.hidden + heads + shape.intermediate)
    attention = 2 * (2 * heads + 2 * shape.kv_heads * shape.head_dim)
    assert adapters + attention + 2 * 2 * shape.intermediate < found.layer_bytes


LENGTHS = [1000 * answer for answer in range(1, 9)]


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_the_guide_has_the_token_counts_of_each_layout(layout: Layout) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(1, 500, 1000).tolist()
    answers = [rng.integers(1, 500, length).tolist() for length in LENGTHS]
    samples = [sample(prompt, answer, rollout_id=str(len(answer))) for answer in answers]
    laid = lay_out(samples, layout=layout, pad_id=0)
    tokens = laid.input_ids_BT.numel()
    memory = counted("Qwen3-4B").activation_bytes(tokens, checkpointing=True) / GIB
    assert f"| `{layout}` | {tokens:,} | {memory:.1f} GiB |" in GUIDE


@pytest.mark.parametrize("run", [qwen3_4b_grpo.RECIPE, qwen3_8b_grpo_8gpu.RECIPE])
def test_a_recipe_fits_into_80_gb_by_the_count(run: ag.RunConfig) -> None:
    memory = counted(str(run.model).removeprefix("Qwen/"))
    assert run.train.gradient_checkpointing
    assert run.train.max_tokens_per_microbatch is not None
    assert isinstance(run.engine, ag.SGLangConfig)
    trained = memory.total_bytes(run.train.max_tokens_per_microbatch, gpus=1)
    share = server_parser().parse_args(run.engine.arguments.split()).mem_fraction_static
    if run.engine.colocate == "off":
        assert trained < 0.9 * 79 * GIB
        assert share * 79 * GIB > 2 * memory.weight_bytes
    else:  # at its largest, next to the part of the server's memory that the trainer leaves when it starts
        free = 79 * GIB - memory.weight_bytes
        assert trained + share * free < 0.9 * 79 * GIB


def test_the_guides_numbers_for_8b_on_one_gpu_match_the_count() -> None:
    memory, run = counted("Qwen3-8B"), qwen3_4b_grpo.RECIPE
    assert run.train.max_tokens_per_microbatch is not None
    state = memory.total_bytes(0, gpus=1) / GIB  # before the first row
    free = 79 - state
    server = 0.6 * free
    cache = server - memory.weight_bytes / GIB
    largest = memory.total_bytes(run.train.max_tokens_per_microbatch, gpus=1) / GIB
    assert f"0.6 of the other {free:.1f} GiB, which is {server:.1f} GiB: " in GUIDE
    assert f"{cache:.1f} for its KV cache " in GUIDE
    assert f"takes at most {largest:.1f} GiB, so both together have {largest + server:.1f}" in GUIDE
