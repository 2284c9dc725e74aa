"""CPU milliseconds and bytes of storing a rollout, compared with the same columns written as Parquet files.

The two formats take turns, and the least of several runs each counts, so that a busy machine matters less.

`python -m benchmarks.store [--json] [--workloads FILE.py] [--seed N]`; Parquet needs `pip install pyarrow`. A file of
workloads has `kept_rollouts(seed)`, which returns a list of rollouts.
"""

import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentgym.store.reader import RolloutStore
from agentgym.store.rows import segment_row
from agentgym.store.training_step import Trained
from agentgym.store.writer import RolloutWriter
from agentgym.types.completion import Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from benchmarks.harness import arguments, at_most, load_workloads, report

BATCH = 16
"""Rollouts written at a time."""
RUNS = 5
"""Measurements of each format; the least counts."""


def kept_rollouts(seed: int = 0, *, count: int = 200, tokens: int = 5000, turns: int = 10) -> list[Rollout]:
    """Return rollouts of one segment, with half of each turn sampled and a word of text per three tokens."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(97, 123, n, np.uint8).tobytes().decode() for n in rng.integers(2, 9, 5000)]

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
    """Write the rollouts, and then the results that a step computed for them."""
    with RolloutWriter(folder) as writer:
        for step, part in enumerate(batches(rollouts)):
            writer.add([Group(group_id=r.group_id, rollouts=(r,)) for r in part], step=step)
            writer.add_step([trained for r in part for trained in step_of(r)], step=step)


def step_of(rollout: Rollout) -> list[Trained]:
    """Return a step's results, with the engine's log-probabilities as the trainer's."""
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
    """Read all rollouts back, whole."""
    with RolloutStore(folder) as store:
        for _ in store.find():
            pass


def keep_as_parquet(rollouts: Sequence[Rollout], folder: Path) -> None:
    """Write the same columns as one compressed file per batch; the trainer's log-probabilities are already known."""
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
    """Return the CPU milliseconds of this process, all threads, divided by `count` rollouts."""
    began = time.process_time()
    work()
    return (time.process_time() - began) * 1e3 / count


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def in_a_folder(way: Callable[[Path], object], count: int) -> tuple[float, int]:
    """Return the CPU milliseconds per rollout of writing into a new folder, and the bytes there."""
    with tempfile.TemporaryDirectory() as folder:
        return cpu_ms(lambda: way(Path(folder)), count), size_of(Path(folder))


def measure(ways: Mapping[str, Callable[[Path], object]], count: int) -> dict[str, tuple[float, int]]:
    """Return the least CPU milliseconds per rollout, and the bytes, of each format; the formats take turns."""
    runs = [{name: in_a_folder(way, count) for name, way in ways.items()} for _ in range(RUNS)]
    return {name: min(run[name] for run in runs) for name in ways}


def time_of_adding(rollouts: Sequence[Rollout]) -> float:
    """Return the ms that the caller, an event loop in a run, spends on a rollout, the least of several runs."""
    groups = [Group(group_id=r.group_id, rollouts=(r,)) for r in rollouts]
    found = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder, RolloutWriter(Path(folder)) as writer:
            began = time.thread_time()
            for step in range(0, len(groups), BATCH):
                writer.add(groups[step : step + BATCH], step=step)
            found.append((time.thread_time() - began) * 1e3 / len(groups))
    return min(found)


def read_ms(rollouts: Sequence[Rollout]) -> float:
    """Return the CPU milliseconds per rollout of reading all of them back, the least of several runs."""
    with tempfile.TemporaryDirectory() as folder:
        keep(rollouts, Path(folder))
        return min(cpu_ms(lambda: read(Path(folder)), len(rollouts)) for _ in range(RUNS))


def main() -> None:
    args = arguments(__doc__ or "")
    given = load_workloads(args.workloads).kept_rollouts if args.workloads else kept_rollouts
    rollouts: list[Rollout] = given(args.seed)
    tokens = sum(len(segment.token_ids) for r in rollouts for segment in r.segments)
    rows: list[Any] = [segment_row(segment) for r in rollouts for segment in r.segments]
    ways: dict[str, Callable[[Path], object]] = {"sqlite": lambda folder: keep(rollouts, folder)}
    parquet = importlib.util.find_spec("pyarrow") is not None
    if parquet:
        ways["parquet"] = lambda folder: keep_as_parquet(rollouts, folder)
        in_a_folder(ways["parquet"], len(rollouts))  # its imports are not counted
    found = measure(ways, len(rollouts))
    figures = {
        "write_cpu_ms": found["sqlite"][0],
        "event_loop_ms": time_of_adding(rollouts),
        "read_cpu_ms": read_ms(rollouts),
        "file_bytes_a_token": found["sqlite"][1] / tokens,
        # Ids, mask (the turns' spans) and both log-probabilities; messages are text and not counted.
        "bytes_a_token": sum(len(row[3]) + 2 * len(row[5]) + len(row[6]) for row in rows) / tokens,
    }
    reference: dict[str, float | str] = {"parquet": "not measured: no pyarrow"}
    goals = {
        "CPU ms a rollout": at_most(figures["write_cpu_ms"], 1.0),
        "bytes a token without text": at_most(figures["bytes_a_token"], 12.0),
    }
    if parquet:
        reference = {
            "parquet_write_cpu_ms": found["parquet"][0],
            "parquet_file_bytes_a_token": found["parquet"][1] / tokens,
        }
        goals["CPU, share of Parquet's"] = at_most(found["sqlite"][0] / found["parquet"][0], 1.0)
    report("store", figures=figures, reference=reference, goals=goals, as_json=args.json)


if __name__ == "__main__":
    main()
