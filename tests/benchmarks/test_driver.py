"""The driver benchmark: its rollouts, and its report if the peers are missing."""

import asyncio
from pathlib import Path

import numpy as np

from benchmarks.driver.__main__ import goals
from benchmarks.driver.alive import alive, open_bytes
from benchmarks.driver.dialogs import Tool, added, call_in, tracebacks
from benchmarks.driver.instant import Instant, replies, word_tokenizer
from benchmarks.driver.others import playing
from benchmarks.driver.ours import GROUP, ours, task
from benchmarks.harness import load_workloads

WORKLOADS = load_workloads(None)
DIALOGS = {"t0": replies(WORKLOADS, 0), "t1": replies(WORKLOADS, 1)}
TOKENIZER = word_tokenizer([text for texts in DIALOGS.values() for text in texts])


def test_unseen_texts_are_all_different() -> None:
    texts = tracebacks(50, 1)
    assert len({*texts, *tracebacks(50, 2)}) == 100
    assert texts == tracebacks(50, 1)


def test_the_tool_returns_unseen_texts_while_there_are_any() -> None:
    tool = Tool()
    tool.unseen.append("new")
    assert [tool.answer(1, 2), tool.answer(1, 2)] == ["new", added(1, 2)]


def test_each_reply_but_the_last_has_a_call() -> None:
    calls = [call_in(text) for text in DIALOGS["t0"]]
    assert [call is not None for call in calls] == [True] * 7 + [False]


def test_without_peers_their_goals_count_as_not_measured() -> None:
    with playing(Path("there-is-none"), TOKENIZER, DIALOGS, group=1, calls=1) as others:
        assert others.ways == []
    figures = {"ours_us": 1.0, "kept_bytes_a_rollout": 1.0, "open_bytes_an_id": 1.0}
    assert goals(figures)["skyrl over ours"] == {"value": None, "goal": 2.5, "met": None}


async def test_all_rollouts_are_active_before_the_first_response() -> None:
    engine = Instant(TOKENIZER, DIALOGS)
    most = 0

    async def play(paced: object, rollouts: int) -> int:
        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(engine.played))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        turns = await ours(paced, [task(f"t{n % 2}-{n}") for n in range(rollouts // GROUP)])  # type: ignore[arg-type]
        watching.cancel()
        return turns

    figures = await alive(play, engine, 80, rounds=1)
    assert most == 80
    assert figures.keys() == {"alive_80_us", "alive_80_pause_ms"}
    assert np.isfinite(list(figures.values())).all()


def test_the_bytes_per_id_include_overhead() -> None:
    assert open_bytes(chunks=20) > 8
