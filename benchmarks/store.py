"""CPU milliseconds and bytes of keeping a rollout, beside the same columns written as Parquet files.

`python -m benchmarks.store [--json] [--workloads FILE.py] [--seed N]`; Parquet needs `pip install pyarrow`.
A file of workloads has `kept_rollouts(seed)`, a list of rollouts.
"""

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.messages import Message
from agentgym.store.reader import RolloutStore
from agentgym.store.rows import segment_row
from agentgym.store.writer import RolloutWriter, Trained
from agentgym.types import Group, Rollout, Segment, Turn, Version
from benchmarks.harness import Goal, arguments, at_most, load_workloads, report

BATCH = 16
"""Rollouts written at a time."""


def kept_rollouts(seed: int = 0, *, count: int = 200, tokens: int = 5000, turns: int = 10) -> list[Rollout]:
    """Rollouts of one segment; half of each turn is sampled, and a word is said for each three tokens."""
    rng = np.random.default_rng(seed)
    words = [bytes(rng.integers(97, 123, n)).decode() for n in rng.integers(2, 9, 5000)]

    def text(count: int) -> str:
        return " ".join(words[i] for i in rng.zipf(1.3, count) % len(words))

    def rollout(number: int) -> Rollout:
        sampled, made, size = np.zeros(tokens, np.bool_), list[Turn](), tokens // turns
        for turn in range(turns):
            start, stop = turn * size + size // 2, (turn + 1) * size
            sampled[start:stop] = True
            made.append(
                Turn(
                    start=start,
                    stop=stop,
                    finish_reason="stop",
                    versions=(Version(0, 3),),
                    message=Message(role="assistant", content=text(size // 6)),
                    env_messages=(Message(role="tool", content=text(size // 6), name="bash"),),
                    number=turn,
                )
            )
        segment = Segment(
            index=0,
            parent=None,
            kind="root",
            token_ids=rng.integers(0, 150_000, tokens),
            sampled=sampled,
            logprobs=np.where(sampled, -rng.random(tokens, np.float32), 0),
            turns=tuple(made),
            prompt_messages=(Message(role="user", content=text(100)),),
        )
        return Rollout(
            rollout_id=f"task-{number}/0",
            group_id=f"task-{number}",
            segments=(segment,),
            reward=1.0,
            stop_reason="answer",
        )

    return [rollout(number) for number in range(count)]


def keep(rollouts: Sequence[Rollout], folder: Path) -> None:
    """Write the rollouts, and then what a step computed for them."""
    with RolloutWriter(folder) as writer:
        for step, part in enumerate(batches(rollouts)):
            writer.add([Group(group_id=r.group_id, rollouts=(r,)) for r in part], step=step)
            writer.add_step([trained for r in part for trained in step_of(r)], step=step)


def step_of(rollout: Rollout) -> list[Trained]:
    """As if the trainer's log-probabilities were the engine's."""
    return [
        Trained(
            rollout_id=rollout.rollout_id,
            segment=segment.index,
            logprobs=segment.logprobs[segment.sampled],
            advantages=[0.5] * len(segment.turns),
        )
        for segment in rollout.segments
    ]


def read(folder: Path) -> None:
    """Read all of them back, whole."""
    with RolloutStore(folder) as store:
        for _ in store.find():
            pass


def keep_as_parquet(rollouts: Sequence[Rollout], folder: Path) -> None:
    """The same columns as one compressed file a batch; the trainer's log-probabilities are known beforehand."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for number, part in enumerate(batches(rollouts)):
        segments = [segment for r in part for segment in r.segments]
        texts = [[s.prompt_messages, [(t.message, t.env_messages) for t in s.turns]] for s in segments]
        columns = {
            "token_ids": [s.token_ids.astype(np.int32) for s in segments],
            "logprobs": [s.logprobs[s.sampled] for s in segments],
            "trained": [s.logprobs[s.sampled] for s in segments],
            "turns": [
                json.dumps([(t.start, t.stop, t.versions, t.seconds, t.reward) for t in s.turns]) for s in segments
            ],
            "messages": [json.dumps(text) for text in texts],
        }
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", compression="zstd")


def batches(rollouts: Sequence[Rollout]) -> list[Sequence[Rollout]]:
    return [rollouts[i : i + BATCH] for i in range(0, len(rollouts), BATCH)]


def cpu_ms(work: Callable[[], object], count: int) -> float:
    """Of this process, all threads, for one of `count` rollouts."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3 / count


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    args = arguments(__doc__ or "")
    given = load_workloads(args.workloads).kept_rollouts if args.workloads else kept_rollouts
    rollouts: list[Rollout] = given(args.seed)
    tokens = sum(len(segment.token_ids) for r in rollouts for segment in r.segments)
    rows: list[Any] = [segment_row(segment) for r in rollouts for segment in r.segments]
    figures, reference, goals = dict[str, float](), dict[str, float | str](), dict[str, Goal]()
    with tempfile.TemporaryDirectory() as folder:
        figures["write_cpu_ms"] = cpu_ms(lambda: keep(rollouts, Path(folder)), len(rollouts))
        figures["read_cpu_ms"] = cpu_ms(lambda: read(Path(folder)), len(rollouts))
        figures["file_bytes_a_token"] = size_of(Path(folder)) / tokens
    # Ids, mask (the turns' spans) and both log-probabilities: the messages are text, and stand apart.
    figures["bytes_a_token"] = sum(len(row[3]) + 2 * len(row[5]) + len(row[6]) for row in rows) / tokens
    goals["CPU ms a rollout"] = at_most(figures["write_cpu_ms"], 1.0)
    goals["bytes a token without text"] = at_most(figures["bytes_a_token"], 12.0)
    if importlib.util.find_spec("pyarrow") is None:
        reference["parquet"] = "not measured: no pyarrow"
    else:
        with tempfile.TemporaryDirectory() as folder:
            keep_as_parquet(rollouts[:BATCH], Path(folder))  # its imports are not counted
            reference["parquet_write_cpu_ms"] = cpu_ms(lambda: keep_as_parquet(rollouts, Path(folder)), len(rollouts))
            reference["parquet_file_bytes_a_token"] = size_of(Path(folder)) / tokens
        ratio = figures["write_cpu_ms"] / float(reference["parquet_write_cpu_ms"])
        goals["CPU, share of Parquet's"] = at_most(ratio, 1.0)
    report("store", figures=figures, reference=reference, goals=goals, as_json=args.json)


if __name__ == "__main__":
    main()
