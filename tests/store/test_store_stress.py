"""The rollout store under stress: concurrent readers, a full disk, many rollouts, and values that cannot be written."""

import asyncio
import sqlite3
import subprocess
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentgym.store import rows, statements
from agentgym.store.reader import RolloutStore
from agentgym.store.schema import FILE
from agentgym.store.suspicious import FEWEST
from agentgym.store.writer import RolloutWriter
from agentgym.types.rollout import Group, Rollout
from tests.store.test_store import group, rollout, same, segment


def test_two_readers_see_only_complete_and_ever_more_rollouts_during_writes(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("t0/0"))], step=0)
        writer.flush()
        seen: list[list[int]] = [[], []]
        done = threading.Event()
        readers = [threading.Thread(target=read_on, args=(tmp_path, seen[i], done)) for i in range(2)]
        for reader in readers:
            reader.start()
        for number in range(1, 300):
            writer.add([group(rollout(f"t{number}/0"))], step=number)
        writer.flush()
        done.set()
        for reader in readers:
            reader.join()
    assert writer.lost == 0
    assert all(counts == sorted(counts) and counts[-1] == 300 for counts in seen)


def read_on(folder: Path, counts: list[int], done: threading.Event) -> None:
    """Read everything repeatedly, and once more after the writer is done; count -1 if a rollout is incomplete."""
    with RolloutStore(folder) as store:
        last = False
        while not last:
            last = done.is_set()
            found = list(store.find())
            whole = all(same(of.rollout, rollout(of.rollout.rollout_id)) for of in found)
            counts.append(len(found) if whole else -1)


def test_outliers_are_judged_by_the_rollouts_of_one_moment_during_writes(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("t/0"))], step=0)
        writer.flush()
        with RolloutStore(tmp_path) as store:
            read = store.query

            def read_while_others_are_written(sql: str, *values: object) -> list[Any]:
                found = read(sql, *values)
                if "LIMIT" in sql:
                    writer.add([group(*(rollout(f"t{len(sql)}/{i}") for i in range(FEWEST)))], step=1)
                    writer.flush()
                return found

            store.query = read_while_others_are_written  # type: ignore[method-assign]
            assert {of.suspicious for of in store.find()} == {()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder on a one-megabyte disk."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def large(name: str) -> Rollout:
    """Return a rollout of about 30 kB."""
    rng = np.random.default_rng(len(name))
    return rollout(name, segments=(segment([(2, 8000)], length=8001, text=bytes(rng.bytes(99)).hex(), top=1 << 20),))


@pytest.mark.slow
def test_a_full_disk_does_not_stop_a_run_and_losses_are_counted(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RolloutWriter(small_disk) as writer:
        for number in range(60):
            writer.add([group(large(f"t{number}/0"))], step=number)
            writer.flush()
    with RolloutStore(small_disk) as store:
        found = list(store.find())
    assert 0 < len(found) < 60
    assert len(found) + writer.lost == 60
    assert all(same(of.rollout, large(of.rollout.rollout_id)) for of in found)
    assert len([record for record in caplog.records if "are lost so far" in record.message]) == 1


def test_an_unwritable_rollout_affects_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = rows.rollout_row

    def refusing(made: Rollout, **place: Any) -> tuple[object, ...]:
        if made.rollout_id == "a/1":
            raise TypeError("no form for it")
        return row(made, **place)

    monkeypatch.setattr(statements, "rollout_row", refusing)
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0"), rollout("a/1"), rollout("a/2")), group(rollout("b/0"))], step=0)
    with RolloutStore(tmp_path) as store:
        assert {of.rollout_id for of in store.summaries()} == {"a/0", "a/2", "b/0"}
    assert writer.lost == 1
    assert "TypeError: no form for it" in caplog.text


def test_values_without_a_json_form_are_stored_as_text(tmp_path: Path) -> None:
    odd = rollout("a/0")
    object.__setattr__(odd, "metrics", {"score": np.float32(0.5)})
    object.__setattr__(odd, "failed_cases", {"where": Path("x")})
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(odd)], step=0)
    with RolloutStore(tmp_path) as store:
        (found,) = store.find()
    assert (writer.lost, found.rollout.metrics, found.rollout.failed_cases) == (0, {"score": 0.5}, {"where": "x"})


def test_a_store_that_disappears_does_not_stop_the_run(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.flush()
        with closing(sqlite3.connect(tmp_path / FILE)) as other, other:
            other.execute("DROP TABLE rollouts")
        writer.add([group(rollout("a/0"), rollout("a/1"))], step=0)
        writer.add_step([], step=0)
        writer.flush()
    assert writer.lost == 2


async def test_closing_does_not_block_the_event_loop(tmp_path: Path) -> None:
    gate = threading.Event()

    def late() -> Iterator[Any]:
        gate.wait()
        yield from ()

    async with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("a/0"))], step=0)
        writer.add_step(late(), step=0)  # the writer's thread waits here until the event loop releases it
        asyncio.get_running_loop().call_soon(gate.set)
    with RolloutStore(tmp_path) as store:
        assert len(store) == 1


async def test_a_cancelled_close_waits_for_the_added_rollouts(tmp_path: Path) -> None:
    gate, closing = threading.Event(), asyncio.Event()

    def late() -> Iterator[Any]:
        gate.wait()
        yield from ()

    async def run() -> None:
        async with RolloutWriter(tmp_path) as writer:
            writer.add_step(late(), step=0)
            writer.add([group(rollout("a/0"))], step=0)
            closing.set()

    job = asyncio.create_task(run())
    await closing.wait()
    job.cancel()
    asyncio.get_running_loop().call_soon(gate.set)
    with pytest.raises(asyncio.CancelledError):
        await job
    with RolloutStore(tmp_path) as store:
        assert len(store) == 1


def stored(folder: Path, steps: int) -> Path:
    """Store this many steps with a hundred rollouts each."""
    segments = (segment([(2, 40)], length=200),)
    with RolloutWriter(folder) as writer:
        for step in range(steps):
            groups = [
                Group(
                    group_id=f"{step}-{g}",
                    rollouts=tuple(rollout(f"{step}-{g}/{i}", g + i / 8, segments=segments) for i in range(10)),
                )
                for g in range(10)
            ]
            writer.add(groups, step=step)
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a thousand rollouts in ten steps."""
    return stored(tmp_path_factory.mktemp("many"), 10)


@pytest.mark.parametrize(
    "asked",
    [
        {"order": "latest"},
        {"order": "worst"},
        {"order": "best"},
        {"failed": True},
        {"suspicious": True},
        {"step": 5, "phase": "train"},
        {"ids": ["5-3/2", "7", "6-1"]},
    ],
    ids=str,
)
def test_selecting_a_few_of_many_rollouts_uses_an_index(many: Path, asked: dict[str, Any]) -> None:
    with RolloutStore(many) as store:
        assert len(store) == 1000
        connection = store._opened().connection
        assert connection is not None
        plans: list[str] = []
        rows = store.query

        def explained(sql: str, *values: object) -> list[Any]:
            plans.extend(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {sql}", values))
            return rows(sql, *values)

        store.query = explained  # type: ignore[method-assign]
        list(store.find(**asked, limit=10))
    scans = [plan for plan in plans if plan.startswith(("SCAN rollouts", "SCAN segments")) and "INDEX" not in plan]
    assert scans == (["SCAN rollouts"] if asked == {"order": "latest"} else [])  # scans backwards and stops at ten
    assert not any("TEMP B-TREE FOR ORDER BY" in plan for plan in plans)


@pytest.mark.slow
def test_ten_thousand_rollouts_are_read_in_constant_memory(tmp_path: Path) -> None:
    with RolloutStore(stored(tmp_path, 100)) as store:
        tracemalloc.start()
        try:
            assert sum(1 for _ in store.find()) == 10_000
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 4 << 20
