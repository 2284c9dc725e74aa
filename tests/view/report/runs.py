"""Hand-made folders of runs and evaluations, for tests of the report."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentgym.store.writer import RolloutWriter
from agentgym.types.rollout import Group


def write_run(
    folder: Path,
    rewards: Sequence[float],
    *,
    seed: int = 0,
    ended: bool = True,
    held_out: Sequence[tuple[int, float]] = (),
    groups: Sequence[Group] = (),
    metrics: dict[str, float] | None = None,
    **settings: Any,
) -> Path:
    """Write the folder of a training with these rewards by step."""
    folder.mkdir(parents=True)
    kept = {
        "recipe": "chase",
        "env": "envs.chase.env:Chase",
        "seed": seed,
        "max_steps": len(rewards),
        "output_dir": str(folder),
    }
    content = {
        "versions": {"agentgym": "0.1.0", "torch": None},
        "envs": {"Chase": {"where": "envs.chase.env:Chase", "version": None, "sha256": "95b0e12255e6138c"}},
        "settings": kept | settings,
    }
    (folder / "settings.json").write_text(json.dumps(content))
    rows: list[dict[str, Any]] = [{"step": done, "eval/reward": reward} for done, reward in held_out]
    rows += [{"step": step, "reward": reward, **(metrics or {})} for step, reward in enumerate(rewards)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if ended:
        (folder / "summary.json").write_text(json.dumps({"reward_last": rewards[-1], "cpu_seconds": 12.5}))
    _write_rollouts(folder, groups, "train")
    return folder


def write_evaluation(folder: Path, reward: float, *, seed: int = 0, groups: Sequence[Group] = ()) -> Path:
    """Write the folder of an evaluation with this score."""
    folder.mkdir(parents=True)
    settings = {"env": "envs.chase.env:Chase", "model": "tiny", "seed": seed, "sampling": {"temperature": 0.7}}
    (folder / "settings.json").write_text(json.dumps(settings | {"versions": {}, "envs": {}}))
    ends = {"low": reward - 0.1, "high": reward + 0.1}
    summary = {"reward": reward, "reward_interval": ends, "pass_at": {"1": reward}, "rollouts": 8, "failed": 1}
    (folder / "summary.json").write_text(json.dumps(summary))
    _write_rollouts(folder, groups, "eval")
    return folder


def _write_rollouts(folder: Path, groups: Sequence[Group], phase: str) -> None:
    with RolloutWriter(folder) as writer:
        writer.add(list(groups), phase=phase, step=0)
