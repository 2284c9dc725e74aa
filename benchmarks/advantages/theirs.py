"""Advantages of other kits for `benchmarks.advantages`: one reward per sample, grouped by prompt.

verl: `compute_grpo_outcome_advantage` and its vectorized form. skyrl: `compute_grpo_outcome_advantage`. Each counts a
rollout once for each of its samples. trl has no separate function for it.
"""

import importlib.util
import sys
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness import load_workloads
from benchmarks.peers.serve import Ways, serve, work


def way(function: Callable[..., Any], rows: dict[str, Any], expected: Any, index: Any) -> tuple[Any, Any]:
    """Return a function that calls the kit's function, and one that computes the largest error of its result.

    The kit's function gets one token per sample.
    """
    rewards, mask = torch.from_numpy(rows["reward"])[:, None], torch.ones(len(rows["reward"]), 1)
    # The kits' functions write into their arguments.
    return lambda: function(rewards.clone(), mask, index)[0], lambda got: float(
        np.abs(got.numpy()[:, 0] - expected).max()
    )


def main() -> None:
    if sys.version_info < (3, 12):  # pydantic reads skyrl's types and needs the TypedDict of Python 3.12
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
    torch.set_num_threads(1)
    asked = work()
    module = load_workloads(asked["workloads"])
    ways: dict[str, Any] = {}
    for name, choice in asked["shapes"].items():
        rows = module.fanout(seed=asked["seed"], **choice)
        rows.pop("is_last")
        expected = module.fanout_reference(**rows)
        prompt = rows["prompt"]
        names = np.array([f"task-{number}" for number in prompt.tolist()], object)
        if importlib.util.find_spec("verl"):
            from verl.trainer.ppo import core_algos

            ways[f"verl_{name}"] = way(core_algos.compute_grpo_outcome_advantage, rows, expected, prompt)
            vectorized = core_algos.compute_grpo_vectorized_outcome_advantage
            ways[f"verl_vectorized_{name}"] = way(vectorized, rows, expected, prompt)
            ways[f"verl_vectorized_{name}_string_ids"] = way(vectorized, rows, expected, names)
        if importlib.util.find_spec("skyrl"):
            from skyrl.backends.skyrl_train.utils import ppo_utils

            ways[f"skyrl_{name}"] = way(ppo_utils.compute_grpo_outcome_advantage, rows, expected, prompt)
    ready: Ways = ways
    serve(ready)


if __name__ == "__main__":
    main()
