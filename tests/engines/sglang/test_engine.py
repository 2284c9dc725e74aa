"""The SGLang engine on servers that do what a real one doesn't do on request: die, lie, hang or refuse."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentgym.engines.base import Engine
from agentgym.engines.scripted import ByteTokenizer
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.errors import EngineError
from agentgym.types.completion import Completion, Sampling, Version
from agentgym.types.weights import Adapter
from tests.engines.sglang.peer import HangUp, Peer, generated, giving, sample, sglang

MODEL = Path(__file__).parents[3] / "recipes" / "checkpoints" / "chase"
ADAPTER = Adapter(config={"r": 1}, tensors={"a": torch.zeros(1)})
REQUEST = {"rid", "input_ids", "sampling_params", "return_logprob", "lora_path"}


@asynccontextmanager
async def over(
    *peers: Peer, health_s: float = 60.0, stall_s: float = 60.0, wait_s: float = 0.0
) -> AsyncIterator[SGLangEngine]:
    """Yield an engine on servers in this process.

    Health is checked only by requests unless a test says otherwise.
    """
    async with AsyncExitStack() as stack:
        for peer in peers:
            await stack.enter_async_context(peer)
        config = SGLangConfig(health_s=health_s, stall_s=stall_s, server_wait_s=wait_s)
        urls = [peer.url for peer in peers]
        engine = SGLangEngine.attach(*urls, model=MODEL, config=config, tokenizer=ByteTokenizer())
        yield await stack.enter_async_context(engine)


async def say(engine: Engine, session: str = "s", tokens: int = 3, ids: list[int] | None = None) -> Completion:
    return await engine.generate(
        ids or [1, 2], session=session, max_tokens=tokens, sampling=Sampling(temperature=0.7), seed=5
    )


async def hang_up(_: Any) -> Any:
    raise HangUp


class Held:
    """A /generate handler that answers when released, or with a partial turn when aborted."""

    def __init__(self) -> None:
        self.asked = asyncio.Queue[dict[str, Any]]()
        self.go = asyncio.Event()
        self.aborted: dict[str, asyncio.Event] = {}

    async def generate(self, payload: Any) -> Any:
        ended = self.aborted.setdefault(payload["rid"], asyncio.Event())
        self.asked.put_nowait(payload)
        waits = [asyncio.ensure_future(event.wait()) for event in (self.go, ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return generated([7, 8], "abort") if ended.is_set() else await sample(payload)

    async def abort(self, payload: Any) -> None:
        self.aborted.setdefault(payload["rid"], asyncio.Event()).set()

    def peer(self, **changes: Any) -> Peer:
        return Peer(sglang(generate=self.generate, abort_request=self.abort, **changes))


def test_sglang_engine_fulfills_the_engine_protocol() -> None:
    engine: Engine = SGLangEngine.attach("http://host", model=MODEL, tokenizer=ByteTokenizer())
    assert engine.version == 0


async def test_a_bundled_model_is_found_by_its_name() -> None:
    async with Peer(sglang()) as peer, SGLangEngine("tiny", SGLangConfig(urls=(peer.url,))) as engine:
        assert engine.tokenizer.decode(engine.tokenizer.encode("<|im_end|>")) == "<|im_end|>"
        with pytest.raises(ValueError, match="vocabulary of 512"):
            await say(engine, ids=[512])


async def test_a_request_contains_everything_that_affects_the_distribution() -> None:
    held = Held()
    held.go.set()
    async with over(held.peer()) as engine:
        done = await say(engine)
    payload = await held.asked.get()
    assert payload.keys() == REQUEST
    assert (payload["input_ids"], payload["return_logprob"], payload["lora_path"]) == ([1, 2], True, None)
    assert payload["sampling_params"] == {
        "temperature": 0.7,
        "max_new_tokens": 3,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "stop_token_ids": [2],
        "sampling_seed": 5,
    }
    assert (done.token_ids.tolist(), done.finish_reason, done.versions) == ([10, 11, 12], "length", (Version(0, 0),))


async def test_a_request_contains_truncation_and_stop_texts() -> None:
    held = Held()
    held.go.set()
    how = Sampling(top_p=0.5, top_k=3, min_p=0.1, stop=("END", "<|im_end|>"))
    async with (
        Peer(sglang(generate=held.generate)) as peer,
        SGLangEngine("tiny", SGLangConfig(urls=(peer.url,))) as engine,
    ):
        await engine.generate([1, 2], session="s", max_tokens=3, sampling=how, seed=5)
        mark = engine.tokenizer.encode("<|im_end|>")
    said = (await held.asked.get())["sampling_params"]
    assert [said[name] for name in ("top_p", "top_k", "min_p", "stop")] == [0.5, 3, 0.1, ["END"]]
    assert set(mark) <= set(said["stop_token_ids"])


async def test_a_turn_ended_by_a_stop_text_differs_from_one_ended_by_a_stop_token() -> None:
    async def by_text(payload: Any) -> Any:
        answer = generated([10, 11])
        answer["meta_info"]["finish_reason"] = {"type": "stop", "matched": "END"}
        return answer

    async with over(Peer(sglang(generate=by_text))) as engine:
        assert (await say(engine)).finish_reason == "stop_text"


LYING = {"finish_reason": {"type": "stop"}}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(
            generated([10], meta_info=LYING), "0 log-probabilities are not those of the 1 ids", id="no_logprobs"
        ),
        pytest.param(
            generated([10, 11, 12]) | {"output_ids": [10, 11]},
            "3 log-probabilities are not those of the 2 ids",
            id="lengths",
        ),
        pytest.param(
            generated([10, 11]) | {"output_ids": [10, 12]}, "log-probabilities are not those of the", id="other_ids"
        ),
        pytest.param(generated([10]) | {"output_ids": "10"}, "not those of the '10' ids", id="ids_as_text"),
        pytest.param(generated([10.5]), "cannot be interpreted as an integer", id="half_an_id"),  # type: ignore[list-item]
        pytest.param(generated([1 << 70]), "too big|as an integer", id="a_huge_id"),
        pytest.param(generated([]), "empty, but the finish_reason is not an abort", id="nothing"),
        pytest.param(generated([512]), "outside the vocabulary", id="vocabulary"),
        pytest.param(generated([10] * 4), "sampled 4 ids, but at most 3 were requested", id="too_many"),
        pytest.param(generated([10], "banana"), "ended a request with finish reason 'banana'", id="reason"),
        pytest.param({"text": "hello"}, "has no output_ids", id="text_only"),
        pytest.param([generated([10])], "has no output_ids", id="a_list"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno", "has no output_ids", id="no_json"),
        pytest.param(b"\0\0\0\0\r\n\r\n", "not HTTP/1", id="no_http"),
        pytest.param((400, {"error": "bad field"}), "/generate: 400: bad field", id="refused"),
        pytest.param((400, {"error": {"message": "too long"}}), "/generate: 400: too long", id="refused_in_detail"),
        pytest.param(
            generated([10], meta_info=LYING | {"output_token_logprobs": [[None, 10, None]]}),
            "expected a value and an id in each",
            id="a_logprob_that_is_none",
        ),
        pytest.param(
            generated([10], meta_info=LYING | {"output_token_logprobs": [[float("-inf"), 10, None]]}),
            "must all be finite",
            id="infinite",
        ),
    ],
)
async def test_an_invalid_answer_is_an_engine_error(answer: Any, said: str) -> None:
    async with over(Peer(sglang(generate=giving(answer)))) as engine:
        with pytest.raises(EngineError, match=said):
            await say(engine)


async def test_versions_named_by_the_server_are_read_span_by_span() -> None:
    spans = [(0, 2, "default"), (2, 2, "6"), (2, 3, "7"), (3, 4, "7"), (4, 5, "8")]
    answer = generated([10] * 5)
    answer["meta_info"]["weight_versions"] = [{"version": v, "start": a, "end": b} for a, b, v in spans]
    async with over(Peer(sglang(generate=giving(answer)))) as engine:
        done = await say(engine, tokens=5)
    assert done.versions == (Version(0, 0), Version(2, 7), Version(4, 8))


async def test_a_dead_servers_request_is_sent_to_another_one() -> None:
    held = Held()
    peers = [held.peer(), held.peer()]
    async with over(*peers) as engine:
        saying = asyncio.create_task(say(engine))
        await held.asked.get()
        dead, alive = sorted(peers, key=lambda peer: -peer.asked["/generate"])
        await dead.die()
        held.go.set()
        done = await saying
        assert done.token_ids.tolist() == [10, 11, 12]
        assert alive.asked["/generate"] == 1
        counts = engine.counts
        assert (counts.turns, counts.requests, counts.retried, counts.lost_servers) == (1, 2, 1, 1)


async def test_without_another_server_the_turn_fails_with_an_engine_error() -> None:
    peer = Peer(sglang())
    async with over(peer) as engine:
        await say(engine)
        await peer.die()
        with pytest.raises(EngineError, match=f"no server is left of the configured ones: {peer.url}"):
            await say(engine)


async def test_a_broken_connection_to_a_living_server_is_retried_once() -> None:
    answers = iter([hang_up, sample, hang_up, hang_up])

    async def unreliable(payload: Any) -> Any:
        return await next(answers)(payload)

    async with over(Peer(sglang(generate=unreliable))) as engine:
        assert len((await say(engine)).token_ids) == 3
        with pytest.raises(EngineError, match="no server is left"):
            await say(engine)
        assert engine.counts.lost_servers == 0


async def test_a_server_that_returns_503_is_skipped_for_this_request() -> None:
    busy, idle = Peer(sglang(generate=giving((503, {"error": "draining"})))), Peer(sglang())
    async with over(busy, idle) as engine:
        for i in range(6):
            assert len((await say(engine, f"{i}")).token_ids) == 3
    async with over(Peer(sglang(generate=giving((503, {"error": "draining"}))))) as engine:
        with pytest.raises(EngineError, match="503: draining"):
            await say(engine)


async def test_a_server_that_hangs_is_lost_and_its_requests_go_elsewhere() -> None:
    async def never(_: Any) -> Any:
        await asyncio.Event().wait()

    asked = asyncio.Event()

    async def deaf(_: Any) -> Any:
        hanging.paths["/ready"] = never
        asked.set()
        await never(_)

    hanging, well = Peer(sglang(generate=deaf)), Peer(sglang())
    async with over(hanging, well, health_s=0.5) as engine:
        for i in range(4):
            assert len((await say(engine, f"{i}")).token_ids) == 3
        assert asked.is_set()
        assert engine.counts.lost_servers >= 1


async def test_a_returning_server_gets_the_current_adapter_before_any_request() -> None:
    served: list[str] = []
    loaded = asyncio.Event()

    async def load(payload: Any) -> None:
        served.append("load")
        loaded.set()

    async def generate(payload: Any) -> Any:
        served.append(payload["lora_path"])
        return await sample(payload)

    peer = Peer(sglang(load_lora_adapter_from_tensors=load, generate=generate))
    async with over(peer, health_s=0.5) as engine:
        await engine.load_adapter(ADAPTER, version=4)
        await peer.die()
        with pytest.raises(EngineError):
            await say(engine)
        loaded.clear()
        await peer.rise()
        await loaded.wait()
        while not engine.counts.revived_servers:  # noqa: ASYNC110  a counter sends no notification
            await asyncio.sleep(0)
        await say(engine)
    assert served[-2] == "load"
    assert served[-1].endswith("-v4")


@pytest.mark.parametrize("keep", [True, False])
async def test_an_abort_ends_the_turn_and_keeps_or_drops_its_tokens(keep: bool) -> None:
    held = Held()
    async with over(held.peer()) as engine:
        saying = asyncio.create_task(say(engine))
        await held.asked.get()
        await engine.abort("s", keep=keep)
        done = await saying
        assert (done.token_ids.tolist(), done.finish_reason) == ([7, 8] if keep else [], "abort")
        await engine.abort("s", keep=keep)
        held.go.set()
        assert (await say(engine)).finish_reason == "length"


async def test_cancelling_a_turn_closes_its_connection_and_aborts_its_request() -> None:
    held = Held()
    peer = held.peer()
    async with over(peer) as engine:
        saying = asyncio.create_task(say(engine))
        asked = await held.asked.get()
        saying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saying
        await peer.hung_up.wait()
        await held.aborted[asked["rid"]].wait()
        held.go.set()
        assert (await say(engine)).finish_reason == "length"


async def test_a_swap_ends_the_request_and_continues_from_its_tokens() -> None:
    held = Held()
    unloaded = asyncio.Queue[str]()

    async def unload(payload: Any) -> None:
        unloaded.put_nowait(payload["lora_name"])

    async with over(held.peer(unload_lora_adapter=unload)) as engine:
        await engine.load_adapter(ADAPTER, version=3)
        saying = asyncio.create_task(say(engine, tokens=6))
        first = await held.asked.get()
        await engine.load_adapter(ADAPTER, version=4)
        second = await held.asked.get()
        held.go.set()
        done = await saying
        assert (second["input_ids"], second["sampling_params"]["max_new_tokens"]) == ([1, 2, 7, 8], 4)
        assert await unloaded.get() == first["lora_path"] != second["lora_path"]
    assert done.token_ids.tolist() == [7, 8, 10, 11, 12, 13]
    assert done.versions == (Version(0, 3), Version(2, 4))


async def test_a_server_that_scales_by_rank_gets_a_compensating_alpha() -> None:
    loaded: list[dict[str, Any]] = []

    async def load(payload: Any) -> None:
        loaded.append(payload["config_dict"])

    config = {"r": 16, "lora_alpha": 32, "use_rslora": True, "use_dora": False}
    async with over(Peer(sglang(load_lora_adapter_from_tensors=load))) as engine:
        await engine.load_adapter(Adapter(config=config, tensors=ADAPTER.tensors), version=1)
        with pytest.raises(ValueError, match="use_dora is not supported"):
            await engine.load_adapter(Adapter(config=config | {"use_dora": True}, tensors=ADAPTER.tensors), version=2)
        assert engine.version == 1
    assert loaded == [config | {"use_rslora": False, "lora_alpha": 128.0}]


async def test_an_adapter_that_one_server_refuses_is_removed_from_the_other() -> None:
    refusal = (400, {"success": False, "error_message": "rank 64 is over 16"})
    picky, easy = Peer(sglang(load_lora_adapter_from_tensors=giving(refusal))), Peer(sglang())
    async with over(picky, easy) as engine:
        with pytest.raises(ValueError, match=r"adapter: .* rejected it: rank 64 is over 16"):
            await engine.load_adapter(ADAPTER, version=1)
        with pytest.raises(ValueError, match="adapter: a must be a torch tensor, got ndarray"):
            await engine.load_adapter(Adapter(config={}, tensors={"a": np.zeros(1)}), version=1)
        assert engine.version == 0
        assert easy.asked["/unload_lora_adapter"] == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"token_ids": []}, "token_ids: must be a sequence of at least one integer"),
        ({"token_ids": [1.5]}, "token_ids: must be a sequence of at least one integer"),
        ({"token_ids": [1, -2]}, "token_ids: id -2 at position 1"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": 400}, "max_tokens: 2 ids and 400 new ones exceed context_tokens, which is 400"),
    ],
)
async def test_an_invalid_request_is_a_value_error_and_is_not_sent(given: Any, said: str) -> None:
    peer = Peer(sglang())
    usual: dict[str, Any] = {"token_ids": [1, 2], "session": "s", "max_tokens": 3, "sampling": Sampling(), "seed": 0}
    async with over(peer) as engine:
        with pytest.raises(ValueError, match=said):
            await engine.generate(**usual | given)
    assert peer.asked["/generate"] == 0


async def test_a_session_generates_one_turn_at_a_time() -> None:
    held = Held()
    async with over(held.peer()) as engine:
        saying = asyncio.create_task(say(engine))
        await held.asked.get()
        with pytest.raises(ValueError, match="'s' is still generating"):
            await say(engine)
        held.go.set()
        await saying


async def test_closing_fails_requests_in_flight_and_leaves_nothing(no_leaks: None) -> None:
    held = Held()
    async with over(held.peer()) as engine:
        saying = asyncio.create_task(say(engine))
        await held.asked.get()
        await engine.close()
        with pytest.raises(EngineError, match="not open"):
            await saying
        await engine.close()
        with pytest.raises(EngineError, match="not open"):
            await say(engine)


async def test_an_unreachable_url_is_an_engine_error() -> None:
    engine = SGLangEngine.attach("http://127.0.0.1:1", model=MODEL, tokenizer=ByteTokenizer())
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1: no response; check the URL"):
        await engine.__aenter__()


def test_no_urls_or_duplicate_urls_are_refused() -> None:
    with pytest.raises(ValueError, match="urls: expected at least one"):
        SGLangEngine.attach()
    with pytest.raises(ValueError, match="appear twice"):
        SGLangEngine.attach("http://a", "http://a")
    with pytest.raises(ValueError, match=r"use SGLangEngine\.attach"):
        SGLangEngine.launch(MODEL, SGLangConfig(urls=("http://a",)))
    with pytest.raises(ValueError, match="model: "):
        SGLangEngine(None)


@pytest.mark.parametrize(
    ("named", "fits"), [([7, 0, 3], True), ([0, 9, 3], False), ([7, 9], False), ([7, 4, 3], False)]
)
async def test_the_last_id_of_a_vocabulary_is_scored_although_the_server_writes_0_for_it(
    named: list[int], fits: bool
) -> None:
    rows = [[None, 5, None], *([-0.5, name, None] for name in named)]
    answer = generated([], meta_info={"input_token_logprobs": rows})
    async with over(Peer(sglang(generate=giving(answer)))) as engine:
        if fits:
            assert (await engine.score([5, 7, 9, 3], sampling=Sampling())).tolist() == [-0.5] * 3
        else:
            with pytest.raises(EngineError, match="scored different ids from the requested ones"):
                await engine.score([5, 7, 9, 3], sampling=Sampling())
