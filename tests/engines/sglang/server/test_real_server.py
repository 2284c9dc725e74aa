"""The SGLang engine against the real server, on a CPU."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from agentgym.engines.base import Engine
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.engines.sglang.server import Server
from agentgym.engines.transformers.engine import TransformersConfig, TransformersEngine
from agentgym.errors import EngineError
from agentgym.run.collector import Collector
from agentgym.samples import build_samples
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.scheduling import Schedule, run_groups
from agentgym.scheduling.run_groups import Groups
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.arrays import Floats
from agentgym.types.completion import Completion, Sampling, Version
from agentgym.types.weights import Adapter
from agentgym.weight_sync.sync import WeightSync
from envs.chase.env import Chase, ChaseCompaction
from tests.engines.sglang.server.conftest import MODEL, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WARM = Sampling(temperature=0.7, max_tokens=40)
GREEDY = Sampling(temperature=0.0)
LOOP = [20] * 12
"""After this prompt, the model repeats itself forever under greedy sampling."""
SHORT = [30] * 12


@pytest_asyncio.fixture
async def engine(url: str) -> AsyncIterator[SGLangEngine]:
    async with SGLangEngine.attach(url, config=SGLangConfig(context_tokens=512)) as engine:
        yield engine


@pytest.fixture(scope="module")
def trained() -> Adapter:
    """Return an adapter that changes the model's output."""
    with Trainer(MODEL, TrainConfig(device="cpu")) as trainer:
        adapter = trainer.adapter()
    draw = np.random.default_rng(0)
    tensors = {
        name: torch.from_numpy(draw.normal(0, 0.03, tensor.shape).astype(np.float32)) if "lora_B" in name else tensor
        for name, tensor in adapter.tensors.items()
    }
    return Adapter(config=adapter.config, tensors=tensors)


async def say(engine: Engine, ids: list[int], session: str = "s", tokens: int = 20, how: Sampling = WARM) -> Completion:
    return await engine.generate(ids, session=session, max_tokens=tokens, sampling=how, seed=1)


@asynccontextmanager
async def in_mid_turn(engine: SGLangEngine) -> AsyncIterator["asyncio.Task[Completion]"]:
    """Yield a turn of 400 ids that has sampled some of them: a shorter turn next to it has ended."""
    turn = asyncio.create_task(say(engine, LOOP, "long", 400, GREEDY))
    await say(engine, LOOP, "clock", 8, GREEDY)
    assert not turn.done()
    yield turn


async def scores(ids: list[int], adapter: Adapter | None, how: Sampling) -> Floats:
    """Return the embedded engine's scores."""
    async with TransformersEngine(MODEL, TransformersConfig(slots=1)) as local:
        await local.load_adapter(adapter, version=1)
        return await local.score(ids, sampling=how)


def largest_gap(trainer: Trainer, groups: Groups) -> float:
    """Return the largest gap between the engine's and the trainer's log-probability of a sampled token, in nats."""
    gaps = [
        np.abs(trainer.score(s.token_ids.tolist(), sampling=WARM) - s.logprobs[1:])[s.sampled[1:]].max()
        for r in groups.rollouts
        for s in r.segments
    ]
    return float(max(gaps))


@pytest.mark.parametrize("adapters", ["tensors", "disk"])
async def test_the_engines_logprobs_match_the_trainers_on_every_sampled_token(url: str, adapters: Any) -> None:
    config = SGLangConfig(adapters=adapters, slots=16)
    async with (
        Trainer(MODEL, TrainConfig(temperature=0.7, lr=2e-3, device="cpu")) as trainer,
        SGLangEngine.attach(url, config=config) as engine,
    ):
        play = Collector(ChaseCompaction, engine, trainer, FakeSandboxPool(), WARM, concurrency=16)
        tasks = list(ChaseCompaction.tasks("train")[:4])
        before = await play.collect(tasks, Schedule(group_size=4, seed=0))
        assert largest_gap(trainer, before) < 1e-4
        probe = before.rollouts[0].segments[0].token_ids.tolist()
        sync = WeightSync(trainer, engine, probe, WARM, tolerance=1e-4)
        for version in (1, 2):
            await trainer.step(build_samples(before))
            assert (await sync(version))["sync/logprob_gap"] < 1e-4
        after = await play.collect(tasks, Schedule(group_size=4, seed=1))
        assert largest_gap(trainer, after) < 1e-4
        assert {v.version for r in after.rollouts for s in r.segments for t in s.turns for v in t.versions} == {2}
        await engine.load_adapter(None, version=3)
        local = await scores(SHORT, None, WARM)
        np.testing.assert_allclose(await engine.score(SHORT, sampling=WARM), local, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 1.7])
async def test_logprobs_are_taken_at_the_sampling_temperature(engine: SGLangEngine, temperature: float) -> None:
    how = Sampling(temperature=temperature)
    done = await say(engine, SHORT, how=how)
    ids = [*SHORT, *done.token_ids.tolist()]
    local = await scores(ids, None, how)
    np.testing.assert_allclose(done.logprobs, local[len(SHORT) - 1 :], atol=1e-4)
    np.testing.assert_allclose(await engine.score(ids, sampling=how), local, atol=1e-4)


async def test_the_stop_id_is_the_last_and_is_kept(engine: SGLangEngine) -> None:
    task = Chase.tasks("train")[0]
    text = engine.tokenizer.render(task.prompt, Chase(task).tools, generation=True)
    stop = engine.tokenizer.encode("<|im_end|>")
    done = [await say(engine, engine.tokenizer.encode(text), f"{i}", 60) for i in range(8)]
    ended = [c.token_ids.tolist() for c in done if c.finish_reason == "stop"]
    assert ended
    assert all([*ids[-1:]] == stop and stop[0] not in ids[:-1] for ids in ended)


async def test_a_turn_may_fill_the_context_to_its_last_id_and_no_further(engine: SGLangEngine) -> None:
    limit = engine.context_tokens
    assert limit == 512
    done = await say(engine, (LOOP * 50)[: limit - 1], tokens=1)
    assert len(done.token_ids) == 1
    assert len(await engine.score((LOOP * 50)[:limit], sampling=WARM)) == limit - 1
    with pytest.raises(ValueError, match="exceed context_tokens, which is 512"):
        await say(engine, (LOOP * 50)[:limit], tokens=1)


@pytest.mark.parametrize("bad", [-1, 512, 10**6])
async def test_an_id_outside_the_vocabulary_never_reaches_the_server(engine: SGLangEngine, bad: int) -> None:
    with pytest.raises(ValueError, match=f"id {bad} at position 1 is not in the vocabulary of 512"):
        await say(engine, [5, bad])
    assert (await say(engine, SHORT, tokens=1)).finish_reason


@pytest.mark.parametrize("keep", [True, False])
async def test_an_abort_during_a_turn_keeps_or_drops_the_partial_turn(engine: SGLangEngine, keep: bool) -> None:
    async with in_mid_turn(engine) as turn:
        await engine.abort("long", keep=keep)
        done = await turn
    assert done.finish_reason == "abort"
    assert 0 < len(done.token_ids) < 400 if keep else len(done.token_ids) == 0
    if keep:
        local = await scores([*LOOP, *done.token_ids.tolist()], None, GREEDY)
        np.testing.assert_allclose(done.logprobs, local[len(LOOP) - 1 :], atol=1e-4)
    assert (await say(engine, LOOP, "long", 4, GREEDY)).finish_reason == "length"


async def test_an_abort_and_a_cancel_end_only_their_own_request(url: str) -> None:
    """The server ends every request whose id starts with the given one; aborting `1` must not end `10` to `19`."""
    async with SGLangEngine.attach(url, config=SGLangConfig(slots=32)) as engine:
        turns = [asyncio.create_task(say(engine, LOOP, f"{i}", 200, GREEDY)) for i in range(24)]
        await say(engine, LOOP, "clock", 8, GREEDY)
        turns[1].cancel()
        await engine.abort("2", keep=False)
        done = await asyncio.gather(*turns, return_exceptions=True)
        assert isinstance(done[1], asyncio.CancelledError)
        others = [each for i, each in enumerate(done) if i not in (1, 2)]
        assert all(isinstance(each, Completion) and each.finish_reason == "length" for each in others)


async def test_cancelling_a_turn_ends_its_request_on_the_server(engine: SGLangEngine) -> None:
    async with in_mid_turn(engine) as turn:
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
    # Each round trip to the scheduler takes at least one step of its loop; the turn had several hundred left.
    for _ in range(20):
        await round_trip(engine)
        if not await running(engine):
            break
    assert not await running(engine)


async def round_trip(engine: SGLangEngine) -> None:
    """Send a request to the server's scheduler, which answers between two steps."""
    await engine._fleet.living[0].facts()


async def running(engine: SGLangEngine) -> int:
    """Return the number of requests that the server is sampling or has queued."""
    server = engine._fleet.living[0]
    loads = (await server.client.get("/v1/loads")).body
    return sum(int(one["num_running_reqs"] + one["num_waiting_reqs"]) for one in loads["loads"])


async def test_a_pause_stops_turns_and_resume_continues_them(engine: SGLangEngine) -> None:
    async with in_mid_turn(engine) as turn:
        await engine.pause()
        try:
            late = asyncio.create_task(say(engine, LOOP, "late", 4, GREEDY))
            for _ in range(20):  # enough steps for the late one to end
                await round_trip(engine)
            assert (turn.done(), late.done()) == (False, False)
        finally:
            await engine.resume()
        done = await turn
        assert (len(done.token_ids), done.finish_reason) == (400, "length")
        assert len((await late).token_ids) == 4


async def test_a_swap_during_a_turn_continues_under_the_new_weights_and_records_where(
    engine: SGLangEngine, trained: Adapter
) -> None:
    async with in_mid_turn(engine) as turn:
        await engine.load_adapter(trained, version=7)
        assert engine.version == 7
        done = await turn
    assert [v.version for v in done.versions] == [0, 7]
    cut = done.versions[1].start
    assert 0 < cut < len(done.token_ids) <= 400
    ids = [*LOOP, *done.token_ids.tolist()]
    old, new = await scores(ids, None, GREEDY), await scores(ids, trained, GREEDY)
    at = len(LOOP) - 1
    np.testing.assert_allclose(done.logprobs[:cut], old[at : at + cut], atol=1e-4)
    np.testing.assert_allclose(done.logprobs[cut:], new[at + cut :], atol=1e-3)
    assert np.abs(new - old).max() > 0.01  # so that neither could be mistaken for the other
    assert engine.counts.continued == 1


async def test_weights_pushed_during_a_turn_are_named_per_token(engine: SGLangEngine) -> None:
    server = engine._fleet.living[0]
    try:
        async with in_mid_turn(engine) as turn:
            change = {"new_version": "5", "abort_all_requests": False}
            assert (await server.client.post("/update_weight_version", change)).status == 200
            done = await turn
    finally:
        await server.client.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    assert done.versions[0] == Version(0, 0)
    assert [v.version for v in done.versions] == [0, 5]
    assert len(done.token_ids) == 400


async def test_an_adapter_that_does_not_fit_is_a_value_error_and_changes_nothing(
    engine: SGLangEngine, trained: Adapter
) -> None:
    await engine.load_adapter(trained, version=1)
    before = await engine.score(SHORT, sampling=WARM)
    wide = {
        name: torch.zeros(64, tensor.shape[1]) if "lora_A" in name else torch.zeros(tensor.shape[0], 64)
        for name, tensor in trained.tensors.items()
    }
    with pytest.raises(ValueError, match="adapter: "):
        await engine.load_adapter(Adapter(config=dict(trained.config) | {"r": 64}, tensors=wide), version=2)
    assert engine.version == 1
    np.testing.assert_allclose(await engine.score(SHORT, sampling=WARM), before, atol=1e-4)


async def test_a_closed_engine_leaves_no_adapter_on_a_server_it_did_not_launch(url: str, trained: Adapter) -> None:
    async with SGLangEngine.attach(url) as engine:
        await engine.load_adapter(trained, version=1)
        name = engine._fleet.policy.lora or "no name"
        server = engine._fleet.living[0]
        assert name in str((await server.client.get("/v1/models")).body)
    async with SGLangEngine.attach(url) as engine:
        server = engine._fleet.living[0]
        assert name not in str((await server.client.get("/v1/models")).body)


def crash(server: Server) -> None:
    """Kill a server and all its processes, as if the machine had run out of memory."""
    assert server.process is not None
    assert server.process.pid is not None
    os.killpg(server.process.pid, signal.SIGKILL)


async def names(engine: SGLangEngine) -> set[str]:
    """Return the models and adapters that the first server offers."""
    answer = await engine._fleet.servers[0].client.get("/v1/models")
    return {model["id"] for model in answer.body["data"]}


async def test_closing_right_after_a_swap_with_turns_in_flight_leaves_no_adapter(url: str, trained: Adapter) -> None:
    async with SGLangEngine.attach(url) as engine:
        before = await names(engine)
        await engine.load_adapter(trained, version=1)
        turns = [asyncio.create_task(say(engine, LOOP, f"{i}", 400, GREEDY)) for i in range(8)]
        await say(engine, LOOP, "clock", 8, GREEDY)
        await engine.load_adapter(trained, version=2)
    await asyncio.gather(*turns, return_exceptions=True)
    async with SGLangEngine.attach(url) as engine:
        assert await names(engine) == before


async def test_a_dead_servers_turns_move_and_without_another_server_rollouts_fail() -> None:
    """Launch two servers; kill the first during a turn and the second during a rollout."""
    config = replace(real_config(), servers=2, startup_s=900, restarts=0)
    async with SGLangEngine.launch(MODEL, config) as engine:
        turns = [asyncio.create_task(say(engine, [20 + i] * 40, f"{i}", 200, GREEDY)) for i in range(8)]
        await say(engine, [10] * 40, "clock", 8, GREEDY)
        first = max(engine._fleet.router.sessions().items(), key=lambda pair: pair[1])[0]
        crash(first)
        for turn in turns:
            assert (await turn).finish_reason in ("length", "stop")
        counts = engine.counts
        assert (counts.lost_servers, counts.turns) == (1, 9)
        assert counts.requests == counts.turns + counts.retried
        last = engine._fleet.living[0]
        one_is_done = asyncio.Event()
        current_usage = asyncio.create_task(
            run_groups(
                Chase,
                Chase.tasks("train")[:4],
                engine,
                n=4,
                concurrency=4,
                sandboxes=FakeSandboxPool(),
                sampling=WARM,
                on_rollout=lambda _: one_is_done.set(),
            )
        )
        await one_is_done.wait()
        crash(last)
        groups = await current_usage
        metrics = groups.metrics()
        assert metrics["rollouts/failed"] > 0
        assert metrics["rollouts/finished"] > 0
        assert metrics["rollouts/started"] == 16 == metrics["rollouts/finished"] + metrics["rollouts/failed"]
        assert all("no server is left" in (r.error or "") for r in groups.rollouts if r.reward is None)
        with pytest.raises(EngineError, match="no server is left"):
            await say(engine, SHORT)


async def test_a_truncated_distribution_is_sampled_with_logprobs_of_the_whole(engine: SGLangEngine) -> None:
    part = Sampling(temperature=0.7, top_k=2, top_p=0.99, min_p=0.01)
    done = await say(engine, SHORT, "part", 20, part)
    sampled = done.token_ids.tolist()
    whole = await scores([*SHORT, *sampled], None, WARM)
    np.testing.assert_allclose(done.logprobs, whole[len(SHORT) - 1 :], atol=1e-3)


async def test_a_stop_text_ends_a_turn_at_the_same_place_as_on_the_local_engine(engine: SGLangEngine) -> None:
    async with TransformersEngine(MODEL, TransformersConfig(slots=1)) as local:
        ids = local.tokenizer.encode("<|im_start|>user\nStart at key 31.<|im_end|>\n<|im_start|>assistant\n")
        whole = await say(local, ids, "whole", 40, GREEDY)
        text = local.tokenizer.decode(whole.token_ids.tolist())
        for how in (Sampling(temperature=0, stop=(text[2:5],)), Sampling(temperature=0, stop=("<|im_end|>",))):
            here, there = [await say(on, ids, str(how.stop), 40, how) for on in (local, engine)]
            assert here.token_ids.tolist() == there.token_ids.tolist()
            assert here.finish_reason == there.finish_reason
            assert here.finish_reason == ("stop" if "<|im_end|>" in how.stop else "stop_text")
