"""Step samples to the tensors of a batch by skyrl and trl: the other kits' side of `benchmarks.layout`.

skyrl: the functions that its trainer calls on its generator's output, `convert_prompts_responses_to_batch_tensors`
and before it `merge_stepwise_output`. trl: rows of a prefix trie, `TreeRow.add` and `TreeRow.pack` for each group.
Its samples are tensors made before the measurement, one sample per segment.
"""

import importlib
import importlib.util
import os
import sys
import typing
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np
import torch

from benchmarks.harness import load_workloads
from benchmarks.layout.step_lists import joined, stretches
from benchmarks.peers.serve import Ways, digest, serve, work


def skyrl(batch: Any, way: str, pad_id: int) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return functions that make a left-padded block of turns or merged turns, and that report on it."""
    if sys.version_info < (3, 12):  # pydantic reads its types and needs the TypedDict of Python 3.12
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    from loguru import logger
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.generators.utils import merge_stepwise_output

    importlib.import_module("skyrl.train.utils.trainer_utils")  # merging imports it in its first call
    logger.remove()
    given = {
        "prompt_token_ids": batch.prompts,
        "response_ids": batch.responses,
        "rewards": batch.rewards,
        "loss_masks": batch.loss_masks,
        "stop_reasons": ["stop"] * len(batch),
        "rollout_metrics": None,
        "rollout_logprobs": batch.logprobs,
        "trajectory_ids": [TrajectoryID(str(n), 0) for n in batch.traj.tolist()],
        "rollout_expert_indices": None,
        "is_last_step": batch.is_last.tolist(),
    }

    def do() -> Any:
        ready = merge_stepwise_output(given) if way == "merged" else given
        names = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs")
        prompts, responses, rewards, masks, logprobs = (ready[name] for name in names)
        return convert_prompts_responses_to_batch_tensors(pad_id, prompts, responses, rewards, masks, logprobs)

    return do, _told_of_block


def _told_of_block(made: Any) -> dict[str, Any]:
    """Return what `ours.told` returns, for a block."""
    ids_BT, attention_BT, _, _, mask_BR, logprobs_BR = (tensor.numpy() for tensor in made[:6])
    width = mask_BR.shape[1]
    trained, rows = [], []
    for ids, real, mask, logprobs in zip(ids_BT, attention_BT > 0, mask_BR > 0, logprobs_BR, strict=True):
        whole = np.zeros(len(ids), np.bool_)
        whole[len(ids) - width :] = mask
        at = whole.nonzero()[0]
        positions = at - int(real.argmax())
        trained.append(b"".join(values.tobytes() for values in (ids[at], positions, logprobs[mask])))
        kept = slice(int(real.argmax()), int(at[-1]) + 1)
        rows.append(ids[kept].tobytes() + whole[kept].tobytes())
    return {
        "tokens": ids_BT.size,
        "real": int(attention_BT.sum()),
        "trained_tokens": int((mask_BR > 0).sum()),
        "trained": digest(trained),
        "rows": digest(rows),
    }


def trl(batch: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return functions that make a row of a prefix trie per group, and that report on them."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.async_grpo.packing import TreeRow

    groups = [
        [
            {
                "input_ids": torch.tensor(one.ids),
                "completion_mask": torch.tensor([0] * one.starts[0] + joined(batch, one, batch.loss_masks)),
                "old_log_probs": torch.tensor([0.0] * one.starts[0] + joined(batch, one, batch.logprobs)),
                "advantage": sum(joined(batch, one, batch.rewards)),
                "group_id": group,
            }
            for one in members
        ]
        for group, members in groupby(stretches(batch), lambda one: one.group)
    ]

    def do() -> Any:
        packed = []
        for samples in groups:
            row = TreeRow()
            for sample in samples:
                row.add(sample)
            packed.append(row.pack())
        return packed

    return do, _told_of_rows


def _told_of_rows(packed: Any) -> dict[str, Any]:
    """Return what `ours.told` returns, for a tree."""
    trained: list[bytes] = []
    for row in packed:
        index, owner = row["token_index"], row["segment_id"]
        ids, positions = row["shift_labels"][index].numpy(), row["position_ids"][index].numpy() + 1
        logprobs = row["old_log_probs"].numpy()
        for number in owner.unique().tolist():
            mine = (owner == number).numpy()
            trained.append(b"".join(values[mine].tobytes() for values in (ids, positions, logprobs)))
    tokens = sum(len(row["input_ids"]) for row in packed)
    count = sum(len(row["token_index"]) for row in packed)
    return {"tokens": tokens, "real": tokens, "trained_tokens": count, "trained": digest(trained)}


def main() -> None:
    torch.set_num_threads(1)
    asked = work()
    module = load_workloads(asked["workloads"])
    kit = "trl" if asked["way"] == "tree" else "skyrl"
    ways: Ways = {}
    if importlib.util.find_spec(kit):
        batch = module.stepwise(seed=asked["seed"], **asked["preset"])
        ways = {asked["way"]: trl(batch) if kit == "trl" else skyrl(batch, asked["way"], module.PAD)}
    serve(ways)


if __name__ == "__main__":
    main()
