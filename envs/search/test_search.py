"""Tests of search, played by scripts."""

import sqlite3
import threading
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.errors import ToolError
from agentgym.scheduling import run_groups
from agentgym.testing import Reply, Scripted, call, check_env, say
from envs.search import env as module
from envs.search.env import Search, SearchTask, make_task, make_world, oracle

TASK = make_task("test", 3, 0)


async def play(*script: Reply, task: SearchTask = TASK) -> ag.Rollout:
    return await ag.rollout(Search, task, Scripted([*script]))


async def test_search_keeps_the_contract_of_an_env() -> None:
    await check_env(Search, TASK, oracle=oracle(TASK), reward_range=(0.0, 1.0))


async def test_the_oracle_finds_each_document_by_name_and_is_rewarded(no_leaks: None) -> None:
    tasks = Search.configured(hops=4).tasks("train")[:40]
    assert {len(task.path) for task in tasks} == {2, 3, 4}
    async with ag.open_resources(Search):
        for task in tasks[:8]:
            rollout = await play(*oracle(task), task=task)
            assert rollout.reward == 1.0, rollout
            for hop, name in enumerate(task.path):
                searched, read = rollout.segments[0].turns[2 * hop : 2 * hop + 2]
                assert searched.env_messages[0]["content"].splitlines()[0].endswith(f": {name}")
                assert name in read.env_messages[0]["content"]


async def test_stopping_before_the_last_document_does_not_reveal_the_answer() -> None:
    async with ag.open_resources(Search):
        for task in Search.tasks("test")[:8]:
            *early, _, _ = oracle(task)  # without the last document and the answer
            rollout = await play(*early, say("I guess."), task=task)
            assert task.answer not in str(rollout), rollout
            assert rollout.reward == 0.0


@pytest.mark.parametrize("answer", ["{0} or nobody", "{0}, {1}", "It is {0}.", "", "{1}"])
async def test_only_the_exact_answer_is_rewarded(answer: str) -> None:
    said = answer.format(TASK.answer, TASK.path[-1])
    assert (await play(say(said))).reward == 0.0


def test_the_splits_share_no_name_and_have_hundreds_of_documents() -> None:
    train, test = make_world("train"), make_world("test")
    assert not train.keys() & test.keys()
    assert len(train) == len(test) == 340
    assert Search.tasks("train")[7] == make_task("train", 3, 7)


async def test_the_index_is_written_once_for_all_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], module.write_index

    def counted(folder: Path) -> None:
        written.append(folder)
        write(folder)

    monkeypatch.setattr(module, "write_index", counted)
    engine = Scripted([call("search", query="x"), say("")])
    groups = await run_groups(Search, list(Search.tasks("test")[:2]), engine, n=2)
    assert all(rollout.reward == 0.0 for rollout in groups.rollouts)
    assert len(written) == 1
    assert not written[0].exists()


@pytest.mark.parametrize("query", ['"', "*", "title:x NEAR(", "a* OR", "'; DROP TABLE documents; --", "", "?!"])
async def test_any_text_is_a_valid_query(query: str) -> None:
    rollout = await play(call("search", query=query), say(""))
    assert (rollout.metrics["tool_errors"], rollout.error) == (0.0, None), rollout


async def test_a_missing_document_gives_a_message_to_the_model() -> None:
    rollout = await play(call("read", document=999), say(""))
    assert "error: there is no document 999" in str(rollout)


async def test_an_interrupt_ends_only_the_query_of_its_own_rollout() -> None:
    async with ag.open_resources(Search) as folder:
        slow, other = Search(TASK), Search(TASK)
        for env in (slow, other):
            env.resources = folder
            await env.setup()
        began, ended = threading.Event(), []

        def hang() -> None:
            slow.db.set_progress_handler(began.set, 1000)
            with pytest.raises(sqlite3.OperationalError, match="interrupted"):
                slow.db.execute("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n")
            ended.append(True)

        thread = threading.Thread(target=hang)
        thread.start()
        began.wait()
        slow.interrupt()
        thread.join()
        assert ended
        assert TASK.path[0] in other.search(TASK.path[0])
        with pytest.raises(ToolError):
            slow.read(0)  # The connection still works.
        await slow.close()
        await other.close()
