"""The HTTP benchmark: its server's responses, and the rollouts of its loops and floors."""

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agentgym.engines.sglang.http import JsonClient
from benchmarks.driver.dialogs import tracebacks
from benchmarks.driver.instant import replies, word_tokenizer
from benchmarks.driver.ours import TOOL, task
from benchmarks.harness import load_workloads
from benchmarks.http.__main__ import goals
from benchmarks.http.answering import Dialog, answering
from benchmarks.http.loops import Bare, TokenLoop, each_of, request
from benchmarks.http.works import Ready, Work

WORKLOADS = load_workloads(None)
TEXTS = {"t0": replies(WORKLOADS, 0), "t1": replies(WORKLOADS, 1)}
TOKENIZER = word_tokenizer([text for texts in TEXTS.values() for text in texts])


@pytest_asyncio.fixture
async def work() -> Work:
    tasks = [task(name) for name in TEXTS]
    return Work(tasks=tasks, dialogs=await Ready(TOKENIZER, TEXTS).dialogs(tasks), concurrency=4)


@pytest_asyncio.fixture
async def client(work: Work) -> AsyncIterator[JsonClient]:
    with answering(work.dialogs.values(), {}) as url:
        client = JsonClient(url)
        yield client
        client.close()


@pytest.mark.parametrize("unseen", [False, True])
async def test_the_server_identifies_dialog_and_turn_whatever_the_tool_returned(
    work: Work, client: JsonClient, unseen: bool
) -> None:
    asked: list[tuple[list[int], list[int]]] = []

    async def ask(payload: object) -> object:
        answer = (await client.post("/generate", payload)).body
        asked.append((payload["input_ids"], answer["output_ids"]))  # type: ignore[index]
        return answer

    dialogs = [dialog for dialog in work.dialogs.values() for _ in range(2)]
    TOOL.unseen.extend(tracebacks(28, 1) if unseen else [])
    assert await each_of(dialogs, 3, lambda dialog: TokenLoop(TOKENIZER.backend, TOOL).play(dialog, ask)) == 32
    assert not TOOL.unseen
    said = sorted(reply for _, reply in asked)
    assert said == sorted(list(r.token_ids) for dialog in dialogs for r in dialog.replies)


async def test_prepared_requests_equal_those_of_a_loop_and_get_its_responses(work: Work) -> None:
    bodies = work.bodies(TOKENIZER)
    first: Dialog = work.dialogs["t0"]
    assert json.loads(bodies[0][0]) == request(list(first.opening), 0)
    got: list[bytes] = []
    with answering(work.dialogs.values(), {}) as url:
        bare = await Bare.open(url, 2)
        assert await bare.play([[bare.ready(body) for body in each] for each in bodies], got.append) == 16
        bare.close()
    said = [json.loads(answer)["output_ids"] for answer in got]
    assert sorted(said) == sorted(list(r.token_ids) for dialog in work.dialogs.values() for r in dialog.replies)


def test_unmeasured_values_neither_meet_nor_miss_a_goal() -> None:
    made = goals({"short64_ours_us": 2.0, "short64_bare_us": 1.0})
    assert made["short64: an aiohttp loop over ours"]["met"] is None
    assert made["short64: ours over the bare client"] == {"value": 2.0, "goal": 1.8, "met": False}
