"""The event loop serves the rollouts: the host's work runs in threads, while rollout clocks are stopped."""

import asyncio
from pathlib import Path

import pytest

from agentgym.machine.time_limits import TimeLimit, all_clocks_stopped
from tests.torchrun import of_each_rank, run_on_ranks

SCRIPT = Path(__file__).parent / "free_loop_script.py"


@pytest.mark.slow
def test_host_work_does_not_block_uneven_rollouts_on_two_processes(tmp_path: Path) -> None:
    run_on_ranks(SCRIPT, None, tmp_path)
    ranks = of_each_rank(tmp_path)
    assert [rank["long"] for rank in ranks] == [[], []]
    assert [rank["waits"] for rank in ranks] == [[], []]
    assert all(held >= 1 for rank in ranks for held in rank["held"][:-2])  # nothing runs after the last batch
    assert [len(rank["held"]) for rank in ranks] == [1 + 2 * 4] * 2
    assert "seconds" not in ranks[0]["stops"]
    assert len(ranks[0]["stops"]) == 4 * 2 * 3
    assert ranks[0]["ended"]


async def passed(seconds: float) -> None:
    """Return when the loop's clock has advanced by this many seconds."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await over.wait()


async def test_clocks_stop_while_the_host_works_even_if_started_meanwhile() -> None:
    async def wait(event: asyncio.Event) -> str:
        await event.wait()
        return "done"

    early, late, outer = TimeLimit(0.02), TimeLimit(0.02), TimeLimit(0.02)
    go = asyncio.Event()
    first = asyncio.create_task(early.bound(wait(go)))
    await asyncio.sleep(0)
    with all_clocks_stopped():
        second = asyncio.create_task(late.bound(wait(go)))
        with all_clocks_stopped():
            await passed(0.1)
        await passed(0.1)
        assert not early.expired()
        assert not late.expired()
        go.set()
        assert [await first, await second] == ["done", "done"]
    with pytest.raises(TimeoutError):
        await outer.bound(wait(asyncio.Event()))


async def test_a_clock_continues_with_its_remaining_time() -> None:
    limit = TimeLimit(0.05)
    waiting = asyncio.create_task(limit.bound(asyncio.Event().wait()))
    await asyncio.sleep(0)
    with all_clocks_stopped():
        await passed(0.2)
        assert not waiting.done()
    with pytest.raises(TimeoutError):
        await waiting
