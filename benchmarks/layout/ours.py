"""Step samples to the tensors of a batch, from Python lists or a run's rollouts: our side of `benchmarks.layout`."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch

from agentgym.samples import build_samples
from agentgym.train.batching.batch import Batch, collate
from agentgym.train.batching.layouts import Layout, PackedInputs, PaddedInputs
from agentgym.types.sample import Sample
from benchmarks.harness import load_workloads
from benchmarks.layout.rows import make_groups, make_samples
from benchmarks.peers.serve import digest, serve, work

FORWARD = 16
"""Rows per forward pass."""
WAYS: dict[str, tuple[bool, Layout]] = {
    "padded": (False, "padded"),
    "merged": (True, "padded"),
    "packed": (True, "packed"),
    "tree": (True, "tree"),
}
"""Whether the turns of a segment are merged, and the layout."""


def one_batch(rows: Sequence[Sample], layout: Layout, pad_id: int) -> list[Batch]:
    """Collate all samples into one batch, or with `tree` each group into one, as micro-batches of one group do."""
    if layout != "tree":
        batch = collate(rows, pad_id=pad_id, layout=layout)
        if isinstance(batch.inputs, PaddedInputs):
            make_ready(batch.inputs)
        return [batch]
    groups = groupby(rows, lambda row: row.group_id)
    return [collate(list(members), pad_id=pad_id, layout=layout) for _, members in groups]


def make_ready(inputs: PaddedInputs) -> None:
    """Make the mask, and the 8-byte ids a few rows at a time, as a forward pass does.

    The other kit's seconds include both.
    """
    _ = inputs.attention_BT
    for ids in torch.split(inputs.input_ids_BT, FORWARD):
        _ = ids.long()


def told(batches: Sequence[Batch]) -> dict[str, Any]:
    """Return the number of computed tokens, and digests of the trained tokens and of the rows.

    Rows count up to their last trained token.
    """
    trained = [part for batch in batches for part in trained_parts(batch)]
    said = {
        "tokens": sum(batch.inputs.input_ids_BT.numel() for batch in batches),
        "real": sum(batch.inputs.tokens for batch in batches),
        "trained_tokens": sum(int(batch.loss_mask_BR.sum()) for batch in batches),
        "trained": digest(trained),
    }
    if isinstance(batches[0].inputs, PaddedInputs):
        said["rows"] = digest(row_parts(batches[0]))
    return said


def trained_parts(batch: Batch) -> list[bytes]:
    """Return each sample's trained ids with their positions and log-probabilities, as bytes."""
    index = batch.inputs.index_M
    ids = batch.inputs.target_N[index].numpy().astype(np.int64)
    inputs = batch.inputs
    assert isinstance(inputs, PaddedInputs | PackedInputs)
    positions = inputs.positions_BT.reshape(-1)[inputs.source_N][index].numpy().astype(np.int64) + 1
    logprobs = batch.logprobs_BR[batch.loss_mask_BR].numpy()
    stops = batch.loss_mask_BR.sum(1).cumsum(0).tolist()
    return [
        b"".join(values[start:stop].tobytes() for values in (ids, positions, logprobs))
        for start, stop in zip([0, *stops], stops, strict=False)
    ]


def row_parts(batch: Batch) -> list[bytes]:
    """Return each sample's ids and mask up to the last trained token, as bytes."""
    assert isinstance(batch.inputs, PaddedInputs)
    parts = []
    width = batch.loss_mask_BR.shape[1]
    attention_BT = batch.inputs.attention_BT
    for ids, real, mask in zip(
        batch.inputs.input_ids_BT.numpy(), attention_BT.numpy(), batch.loss_mask_BR.numpy(), strict=True
    ):
        last = len(ids) - width + int(mask.nonzero()[0][-1]) + 1
        whole = np.zeros(len(ids), np.bool_)
        whole[len(ids) - width :] = mask
        parts.append(ids[:last][real[:last]].astype(np.int64).tobytes() + whole[:last][real[:last]].tobytes())
    return parts


def main() -> None:
    torch.set_num_threads(1)
    asked = work()
    module = load_workloads(asked["workloads"])
    batch = module.stepwise(seed=asked["seed"], **asked["preset"])
    turns, layout = WAYS[asked["way"]]
    made: Callable[[], Sequence[Sample]]
    if asked["source"] == "lists":
        made = lambda: make_samples(batch, merge=turns)  # noqa: E731
    else:
        groups = make_groups(batch)
        del batch
        made = lambda: build_samples(groups, merge=turns)  # noqa: E731
    serve({asked["way"]: (lambda: one_batch(made(), layout, module.PAD), told)})


if __name__ == "__main__":
    main()
