"""The result of each layout for a model, compared with transformers and PEFT alone."""

import logging
import pickle
import sys
import tempfile
import warnings
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
from tests.support.model_families import build, samples

LAYOUTS: tuple[Layout, ...] = ("padded", "packed", "tree")
LIMIT = 1e-3
"""Largest difference of a log-probability in nats, and of the gradient relative to its norm, that counts as right."""
TEMPERATURE = 0.8
KINDS = ("right", "refused", "wrong", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The result of a layout for a family."""

    kind: str
    """One of KINDS."""
    said: str
    """The largest difference of a log-probability and the relative difference of the gradient, or the error's text."""


def rows(table: Mapping[str, Mapping[str, Cell]]) -> Iterator[str]:
    """Yield the lines of the table as Markdown, then a line for each cell that is not right, with its message."""
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
    """Return the version of transformers with which the layouts are compared."""
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
            except Exception as error:  # keep the rest of the table
                failed = Cell(kind="error", said=f"can't be built: {type(error).__name__}: {error}")
                table[name] = dict.fromkeys(LAYOUTS, failed)
            print(name, {layout: cell.kind for layout, cell in table[name].items()}, file=sys.stderr, flush=True)
    return table


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the messages of transformers, PEFT and the trainer about random models."""
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


def plain(folder: Path, policy: PolicyModel) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probabilities and the adapter's gradient from transformers and PEFT alone, sequence by sequence."""
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
    """Compute the gradient of a weighted sum of the log-probabilities, each with a different weight."""
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()  # type: ignore[no-untyped-call]


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the unsharded gradients of the adapter by name."""
    return {name: whole(w.grad) for name, w in model.named_parameters() if w.requires_grad and w.grad is not None}


def trained(policy: PolicyModel, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same as `plain`, computed as the trainer does."""
    batch = collate(samples(), pad_id=0, layout=layout)
    logprobs = policy(batch.inputs, batch.loss_mask_BR, TEMPERATURE)[0][batch.loss_mask_BR]
    backward(logprobs)
    return logprobs.detach(), gradients(policy.model)


@torch.no_grad()
def disturb(policy: PolicyModel) -> None:
    """Change the adapter's weights: with its initial ones it has no effect."""
    for weight in policy.parameters():
        if weight.requires_grad:
            values = torch.arange(weight.numel(), dtype=torch.float32).mul_(1.7).sin_().mul_(0.1)
            like = values.reshape(weight.shape)
            weight.copy_(
                distribute_tensor(like, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else like
            )


def compare(folder: Path, *, ranks: Ranks | None = None) -> dict[str, Cell]:
    """Return the result of each layout for the model in a folder, on these ranks."""
    expected: Expected = []
    return {layout: _cell(folder, layout, ranks, expected) for layout in LAYOUTS}


Expected: TypeAlias = list[tuple[Tensor, dict[str, Tensor]]]
"""The result of `plain` for a model; empty until it is computed."""


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
    except Exception as error:  # a setting must be refused at opening; a later refusal is an error
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
    config = TrainConfig(lora_rank=2, lora_alpha=4, layout=layout, device="cpu", gradient_checkpointing=True)
    return open_policy(folder, config, ranks, seed=0)


def compare_sharded(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Compare these families on two processes over gloo, which shard the model with FSDP2.

    Yields:
        Each family's name and its results by layout.
    """
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
