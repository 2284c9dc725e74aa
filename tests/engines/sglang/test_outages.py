"""The SGLang engine while servers are down, busy, hanging or coming back."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.errors import EngineError
from agentgym.machine.time_limits import TimeLimit
from agentgym.types.completion import Sampling, Version
from tests.engines.sglang.peer import Peer, generated, giving, sample, sglang
from tests.engines.sglang.test_engine import ADAPTER, MODEL, Held, over, say


async def until(law: Callable[[], object]) -> None:
    """Poll until the condition holds, since counters send no notifications."""
    while not law():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


async def never(_: Any) -> Any:
    await asyncio.Event().wait()


# ---------------------------------------------------------------------------------------------- request ids


async def test_no_request_id_is_a_prefix_of_another() -> None:
    """A server aborts every request whose id starts with the given one."""
    rids: list[str] = []

    async def generate(payload: Any) -> Any:
        rids.append(payload["rid"])
        return await sample(payload)

    async with over(Peer(sglang(generate=generate))) as engine:
        for i in range(120):
            await say(engine, f"{i}")
    assert len(set(rids)) == 120
    assert [(a, b) for a in rids for b in rids if a != b and b.startswith(a)] == []


# ---------------------------------------------------------------------------------------------- servers that are down


async def test_a_turn_waits_for_the_only_server_to_come_back() -> None:
    peer = Peer(sglang())
    async with over(peer, health_s=1.0, wait_s=600) as engine:
        await say(engine)
        await peer.die()
        turns = [asyncio.create_task(say(engine, f"{i}")) for i in range(4)]
        await until(lambda: engine.counts.lost_servers)
        await peer.rise()
        assert [len((await turn).token_ids) for turn in turns] == [3] * 4
        counts = engine.counts
        assert (counts.lost_servers, counts.revived_servers) == (1, 1)
        assert counts.requests == counts.turns + counts.retried


async def test_the_time_limit_of_a_rollout_is_paused_while_it_waits_for_a_server() -> None:
    peer = Peer(sglang())
    async with over(peer, health_s=1.0, wait_s=600) as engine:
        await say(engine)
        await peer.die()
        limited = asyncio.create_task(TimeLimit(0.5).bound(say(engine)))
        await until(lambda: engine.counts.lost_servers)
        with pytest.raises(TimeoutError):
            await TimeLimit(0.5).bound(never(None))
        await peer.rise()
        assert len((await limited).token_ids) == 3


async def test_a_turn_that_waited_too_long_is_an_engine_error_that_names_the_setting() -> None:
    peer = Peer(sglang())
    async with over(peer, wait_s=0.2) as engine:
        await peer.die()
        with pytest.raises(EngineError, match=r"generate: .*no server is left .*server_wait_s: waited for 0\.2 s"):
            await say(engine)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_request_to_a_busy_server_is_retried_after_a_pause(status: int) -> None:
    answers = iter([giving((status, {"error": {"message": "the queue is full"}}))] * 3)

    async def busy(payload: Any) -> Any:
        return await next(answers, sample)(payload)

    async with over(Peer(sglang(generate=busy)), wait_s=600) as engine:
        assert len((await say(engine)).token_ids) == 3
        counts = engine.counts
        assert (counts.requests, counts.retried, counts.lost_servers) == (4, 3, 0)


async def test_a_server_that_fails_the_request_is_not_waited_for() -> None:
    async with over(Peer(sglang(generate=giving((500, {"error": "a bug"})))), wait_s=600) as engine:
        with pytest.raises(EngineError, match=r"500: a bug; no server is left"):
            await say(engine)


@pytest.mark.parametrize("keep", [True, False])
async def test_an_abort_ends_a_turn_that_waits_for_a_server(keep: bool) -> None:
    peer = Peer(sglang())
    async with over(peer, wait_s=600) as engine:
        await peer.die()
        saying = asyncio.create_task(say(engine))
        await until(lambda: engine.counts.lost_servers)
        await engine.abort("s", keep=keep)
        assert (await saying).finish_reason == "abort"


async def test_closing_ends_everything_that_waits_for_a_server() -> None:
    peer = Peer(sglang())
    async with over(peer, wait_s=600) as engine:
        await peer.die()
        waiting: list[asyncio.Task[Any]] = [
            asyncio.create_task(say(engine)),
            asyncio.create_task(engine.score([1, 2], sampling=Sampling())),
            asyncio.create_task(engine.load_adapter(ADAPTER, version=1)),
        ]
        await until(lambda: engine.counts.lost_servers)
        await engine.close()
        for each in waiting:
            with pytest.raises(EngineError, match=r"not open|closed"):
                await each


async def test_a_new_adapter_waits_for_the_only_server_to_come_back() -> None:
    loaded: list[str] = []

    async def load(payload: Any) -> None:
        loaded.append(payload["lora_name"])

    peer = Peer(sglang(load_lora_adapter_from_tensors=load))
    async with over(peer, health_s=1.0, wait_s=600) as engine:
        await peer.die()
        loading = asyncio.create_task(engine.load_adapter(ADAPTER, version=1))
        await until(lambda: engine.counts.lost_servers)
        await peer.rise()
        await loading
        assert (engine.version, len((await say(engine)).token_ids)) == (1, 3)
    assert [name.endswith("-v1") for name in loaded] == [True]
    async with over(peer, wait_s=0.1) as engine:
        await peer.die()
        with pytest.raises(EngineError, match="load_adapter: no server is left"):
            await engine.load_adapter(ADAPTER, version=1)


async def test_a_score_request_moves_to_another_server_and_the_dead_one_is_lost() -> None:
    rows = [[None, 1, None], [-0.5, 2, None]]
    scored = generated([], meta_info={"input_token_logprobs": rows})
    peers = [Peer(sglang(generate=giving(scored))) for _ in range(2)]
    async with over(*peers) as engine:
        await peers[0].die()
        for _ in range(4):
            assert (await engine.score([1, 2], sampling=Sampling())).tolist() == [-0.5]
        counts = engine.counts
        assert (counts.lost_servers, counts.retried, counts.requests) == (1, 0, 0)
        await peers[1].die()
        with pytest.raises(EngineError, match=r"score: .*no server is left"):
            await engine.score([1, 2], sampling=Sampling())


# ---------------------------------------------------------------------------------------------- servers that hang


async def test_a_server_whose_scheduler_hangs_is_lost() -> None:
    hung, well = Peer(sglang(generate=never, health_generate=never)), Peer(sglang())
    async with over(hung, well, health_s=1.0, stall_s=0.3) as engine:
        done = await asyncio.gather(*(say(engine, f"{i}") for i in range(6)))
        assert [len(each.token_ids) for each in done] == [3] * 6
        assert engine.counts.lost_servers == 1
        hung.paths |= sglang()
        await until(lambda: engine.counts.revived_servers)


async def test_a_server_that_reports_no_sampling_is_lost_only_after_the_stall_time() -> None:
    answers = iter([(503, None)] * 2)
    asked = asyncio.Event()

    async def slow(_: Any) -> Any:
        answer = next(answers, None)
        asked.set() if answer is None else None
        return answer

    async with over(Peer(sglang(health_generate=slow)), health_s=1.0) as engine:
        await asked.wait()
        assert engine.counts.lost_servers == 0


async def test_a_paused_server_is_not_mistaken_for_a_hanging_one() -> None:
    peer = Peer(sglang())
    async with over(peer, health_s=1.0, stall_s=0.05) as engine:
        await engine.pause()
        peer.paths["/health_generate"] = never
        before = peer.asked["/ready"]
        await until(lambda: peer.asked["/ready"] > before + 1)
        assert engine.counts.lost_servers == 0
        peer.paths |= sglang()
        await engine.resume()
        assert len((await say(engine)).token_ids) == 3


async def test_a_returning_server_that_hangs_blocks_neither_the_watch_nor_a_new_adapter() -> None:
    loading, hang = asyncio.Event(), False

    async def load(_: Any) -> None:
        if hang:
            loading.set()
            await never(_)

    back, well, third = Peer(sglang(load_lora_adapter_from_tensors=load)), Peer(sglang()), Peer(sglang())
    async with over(back, well, third, health_s=0.5) as engine:
        await engine.load_adapter(ADAPTER, version=1)
        hang = True
        await back.die()
        await until(lambda: engine.counts.lost_servers)
        await back.rise()
        await loading.wait()
        await engine.load_adapter(ADAPTER, version=2)
        assert engine.version == 2
        third.paths["/ready"] = never
        await until(lambda: engine.counts.lost_servers >= 2)
        assert len((await say(engine)).token_ids) == 3
        hang = False
        third.paths |= sglang()
        await back.die()
        await back.rise()
        await until(lambda: engine.counts.revived_servers >= 2)


async def test_a_server_that_returns_during_a_swap_gets_the_newer_adapter_first() -> None:
    wanted: list[str] = []
    slow, go = asyncio.Event(), asyncio.Event()
    hold = False

    async def load_slowly(_: Any) -> None:
        if hold:
            slow.set()
            await go.wait()

    async def load(payload: Any) -> None:
        wanted.append(payload["lora_name"])

    back, busy = (
        Peer(sglang(load_lora_adapter_from_tensors=load)),
        Peer(sglang(load_lora_adapter_from_tensors=load_slowly)),
    )
    async with over(back, busy, health_s=1.0) as engine:
        await engine.load_adapter(ADAPTER, version=1)
        await back.die()
        await until(lambda: engine.counts.lost_servers)
        hold = True
        swap = asyncio.create_task(engine.load_adapter(ADAPTER, version=2))
        await slow.wait()
        await back.rise()
        await until(lambda: engine.counts.revived_servers)
        go.set()
        await swap
    assert [name[-2:] for name in wanted] == ["v1", "v1", "v2"]


# ---------------------------------------------------------------------------------------------- edge cases


async def test_closing_right_after_a_swap_leaves_no_adapter_on_an_attached_server() -> None:
    """With a turn in flight, the old adapter can't be unloaded yet when the engine closes."""
    held, there = Held(), set[str]()

    async def load(payload: Any) -> None:
        there.add(payload["lora_name"])

    async def unload(payload: Any) -> None:
        there.discard(payload["lora_name"])

    peer = Peer(sglang(generate=held.generate, load_lora_adapter_from_tensors=load, unload_lora_adapter=unload))
    async with over(peer) as engine:
        await engine.load_adapter(ADAPTER, version=1)
        saying = asyncio.create_task(say(engine))
        await held.asked.get()
        await engine.load_adapter(ADAPTER, version=2)
        assert len(there) == 2
        await engine.close()
        assert there == set()
        with pytest.raises(EngineError):
            await saying


def numbered(version: str) -> dict[str, Any]:
    answer = generated([10, 11])
    answer["meta_info"]["weight_versions"] = [{"version": version, "start": 0, "end": 2}]
    return answer


async def test_with_an_adapter_the_version_is_the_adapters_whatever_the_base_weights_are() -> None:
    info = {"max_req_input_len": 401, "model_path": "unknown", "weight_version": "7"}
    peer = Peer(sglang(generate=giving(numbered("7")), server_info=giving(info)))
    async with over(peer) as engine:
        assert (await say(engine)).versions == (Version(0, 0),)
        await engine.load_adapter(ADAPTER, version=3)
        assert (await say(engine)).versions == (Version(0, 3),)
        peer.paths["/generate"] = giving(numbered("9"))
        assert (await say(engine)).versions == (Version(0, 3),)
        await engine.load_adapter(None, version=4)
        assert (await say(engine)).versions == (Version(0, 9),)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[None, 1], [None, 2]], "expected a value and an id in each"),
        ([[None, 1], [float("nan"), 2]], "must all be finite"),
        ([[None, 1], [-0.5, 3]], "different ids"),
        ([[None, 1], None], "expected a value and an id in each"),
    ],
)
async def test_an_invalid_score_is_an_engine_error(rows: Any, said: str) -> None:
    prompt = generated([], meta_info={"input_token_logprobs": rows})
    drawn = [generated([5], meta_info={"output_token_ids_logprobs": [rows[1:]]})]
    for answer, how in ((prompt, Sampling()), (drawn, Sampling(temperature=0.5))):
        async with over(Peer(sglang(generate=giving(answer)))) as engine:
            with pytest.raises(EngineError, match=said):
                await engine.score([1, 2], sampling=how)


async def test_a_boolean_is_not_a_token_id() -> None:
    async with over(Peer(sglang())) as engine:
        odd: list[Any] = [[True, 3], [np.int64(3), np.True_]]
        for ids in odd:
            with pytest.raises(ValueError, match="token_ids: must be a sequence of at least one integer"):
                await say(engine, ids=ids)


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (
            {"ready": giving((404, None)), "health_generate": giving((404, None))},
            "has neither /ready nor /health_generate: it is not an SGLang server, or is older than 0.5.16",
        ),
        ({"server_info": giving((404, "<!DOCTYPE html>" * 99))}, "has no /server_info, so it is not an SGLang server"),
        ({"server_info": giving("hello")}, "not an SGLang server's response"),
    ],
)
async def test_an_incompatible_server_is_refused_in_one_line(paths: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said) as raised:
        async with over(Peer(sglang(**paths))):
            pass
    assert len(str(raised.value)) < 300


async def test_a_turn_that_a_swap_interrupts_at_its_last_id_ends_with_length() -> None:
    held = Held()
    peer = held.peer()
    async with over(peer) as engine:
        saying = asyncio.create_task(say(engine, tokens=2))
        await held.asked.get()
        await engine.load_adapter(ADAPTER, version=1)
        done = await saying
        assert (done.token_ids.tolist(), done.finish_reason, done.versions) == ([7, 8], "length", (Version(0, 0),))
        assert peer.asked["/generate"] == 1


async def test_an_adapter_is_unloaded_only_after_the_requests_that_use_it_end() -> None:
    said: list[str] = []
    asked, go, unloaded = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(payload: Any) -> Any:
        if asked.is_set():
            return await sample(payload)
        asked.set()
        await go.wait()
        said.append("answered")
        return generated([7], "abort")

    async def unload(_: Any) -> None:
        said.append("unloaded")
        unloaded.set()

    peer = Peer(sglang(generate=generate, unload_lora_adapter=unload))
    async with over(peer) as engine:
        await engine.load_adapter(ADAPTER, version=1)
        saying = asyncio.create_task(say(engine))
        await asked.wait()
        await engine.load_adapter(ADAPTER, version=2)
        await until(lambda: peer.asked["/abort_request"] > 1)
        go.set()
        await saying
        await unloaded.wait()
    assert said[:2] == ["answered", "unloaded"]


async def test_a_server_with_another_vocabulary_is_refused_before_it_gets_fatal_ids(tmp_path: Path) -> None:
    other = json.loads((MODEL / "config.json").read_text()) | {"vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(other))
    info = {"max_req_input_len": 401, "model_path": str(tmp_path)}
    with pytest.raises(
        ValueError,
        match=r"model: .* has a vocabulary of 512 ids, but the server serves .* with a vocabulary of 300 ids",
    ):
        async with over(Peer(sglang(server_info=giving(info)))):
            pass


async def test_a_prompt_over_the_engines_context_names_the_engines_setting() -> None:
    class Wordy(ag.ToolEnv[ag.Task]):
        """An env whose prompt is longer than the server accepts."""

        async def setup(self) -> None:
            """Do nothing."""

    task = ag.Task(id="a", prompt=({"role": "user", "content": "word " * 200},))
    async with over(Peer(sglang())) as engine:
        rollout = await ag.rollout(Wordy, task, engine)
    assert "ContextOverflow: Wordy: the first prompt fills the 400 tokens of the engine's context_tokens" in (
        rollout.error or ""
    )
