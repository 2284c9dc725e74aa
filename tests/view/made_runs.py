"""Runs for the viewer's tests: folders as a run leaves them, written by the real writer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from agentgym.store.writer import RolloutWriter, Trained
from agentgym.types.completion import Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from agentgym.view.runs import Runs
from agentgym.view.search.indexing import Indexing
from agentgym.view.server import application
from tests.store.test_store import group, rollout

HOSTS = frozenset(["127.0.0.1", "localhost"])
HOSTILE = "<script>alert(1)</script> \x1b[31m\u202e \ud800 \0 ``` \"'&"
"""Text that must stay text."""


def token_bytes(model: str, ids: Sequence[int]) -> Mapping[int, bytes]:
    return {token: f"<{token}>".encode() for token in ids}


def make_run(
    folder: Path, *, steps: int = 3, env: Sequence[str] = ("Chase",), recipe: str = "chase_grpo", said: str = "said"
) -> Path:
    """Write a finished run of `steps` steps, with an evaluation.

    Each step has a group of three rollouts, one of which failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    envs = {name: {"where": f"envs.{name}:{name}", "version": "1", "sha256": "ab" * 32} for name in env}
    settings = {"versions": {"python": "3.11"}, "envs": envs, "settings": {"recipe": recipe, "max_steps": steps}}
    (folder / "settings.json").write_text(json.dumps(settings))
    rows: list[dict[str, Any]] = [{"step": 0, "eval/reward": 0.25, "eval/rollouts": 1.0, "eval/failed": 0.0}]
    with RolloutWriter(folder, token_bytes=token_bytes) as writer:
        for step in range(steps):
            writer.add([group(*attempts(step, said))], step=step)
            names = [f"task{step}/{place}" for place in (0, 2)]
            writer.add_step([trained(name) for name in names], step=step)
            rows.append({"step": step, "reward": step / 2, "reward/std": None, "time/step": 1.5, "time/train": 0.5})
        writer.add([group(rollout("held/0", 1.0))], phase="eval_after", step=steps)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def attempts(step: int, said: str) -> list[Rollout]:
    """Return three rollouts of one task: two with rewards, and a failure."""
    made = [rollout(f"task{step}/{place}", reward) for place, reward in enumerate((1.0, None, 0.25 * step))]
    return [*made[:2], replace(made[2], segments=(talk(said),))]


def talk(said: str) -> Segment:
    """Return a segment of two turns with a system message, a tool's result and a final message."""
    sampled = np.array([False, True, True, False, True])
    times = [(0.5, 0.125, 1.0, 0.25), (2.0, 0.0, 0.5, 0.0)]
    turns = tuple(
        Turn(
            start=start,
            stop=stop,
            finish_reason="stop",
            versions=(Version(0, 3), Version(1, 4)) if stop - start > 1 else (Version(0, 4),),
            message=Message(role="assistant", content=said),
            env_messages=(Message(role="tool", content=said, name="bash"),) if number == 0 else (),
            asked_at=asked_at,
            waited=waited,
            seconds=seconds,
            env_seconds=env_seconds,
            number=number,
        )
        for number, ((start, stop), (asked_at, waited, seconds, env_seconds)) in enumerate(
            zip([(1, 3), (4, 5)], times, strict=True)
        )
    )
    return Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=np.array([10, 11, 12, 13, 14]),
        sampled=sampled,
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)),
        turns=turns,
        prompt_messages=(Message(role="system", content=said),),
    )


def trained(name: str) -> Trained:
    """Return a step's numbers for each scored rollout of `make_run`: log-probabilities and two advantages."""
    many = 3 if name.endswith("/2") else 6
    return Trained(
        rollout_id=name,
        segment=0,
        logprobs=np.linspace(-0.25, -0.75, many, dtype=np.float32),
        advantages=[0.5, -0.5],
        gap=0.25,
    )


def add_rollouts(folder: Path, names: Sequence[str], *, step: int, done: int | None = None) -> None:
    """Write more rollouts, as a run does that continues, or one that is resumed after `done` steps."""
    with RolloutWriter(folder, done=step if done is None else done) as writer:
        writer.add([Group(group_id=name.partition("/")[0], rollouts=(rollout(name),)) for name in names], step=step)


def run_trained_in_part(folder: Path) -> Path:
    """Write a run of one rollout, only some of whose sampled tokens were trained, and return its folder."""
    make_run(folder, steps=0)
    with RolloutWriter(folder) as writer:
        writer.add([group(rollout("part/0", 1.0))], step=0)
        writer.add_step([Trained(rollout_id="part/0", segment=0, logprobs=None, advantages=())], step=0)
    return folder


@contextmanager
def client(*folders: Path, token: str | None = None) -> Iterator[TestClient]:
    """Yield a client of a server on these folders; `client.indexing` is the server's."""
    with Indexing() as indexing:
        app = application(Runs(list(folders)), indexing, token=token, hosts=HOSTS)
        made = TestClient(app, base_url="http://127.0.0.1:8765", follow_redirects=False)
        made.indexing = indexing  # type: ignore[attr-defined]
        yield made
