"""Several clients of the same servers: one pushes each policy, all adopt it, and each removes only its own."""

import asyncio
import base64
import pickle
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.engines.base import SharedEngine, WeightsEngine
from agentgym.engines.scripted import ByteTokenizer
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.engines.sglang.policies.merged import MergedWeights
from agentgym.engines.sglang.policies.payloads import PolicyVersion
from agentgym.errors import EngineError
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Completion, Sampling
from agentgym.types.weights import Adapter, ModelWeights
from tests.engines.sglang.peer import Peer, giving, sample, sglang

MODEL = Path(__file__).parents[3] / "recipes" / "checkpoints" / "chase"
ADAPTER = Adapter(config={"r": 1, "lora_alpha": 1}, tensors={"a": torch.zeros(1)})


class Held:
    """Records the adapters that a server is told to load and unload, and the names that it knows."""

    def __init__(self, **info: Any) -> None:
        self.loads: list[dict[str, Any]] = []
        self.unloads: list[str] = []
        self.sampled: list[str | None] = []
        self.info = {"max_req_input_len": 401, "model_path": "unknown", **info}

    def peer(self, **changes: Any) -> Peer:
        async def load(payload: Any) -> None:
            self.loads.append(payload)

        async def unload(payload: Any) -> None:
            self.unloads.append(payload["lora_name"])

        async def generate(payload: Any) -> Any:
            self.sampled.append(payload["lora_path"])
            return await sample(payload)

        async def models(_: Any) -> Any:
            there = [load["lora_name"] for load in self.loads if load["lora_name"] not in self.unloads]
            return {"data": [{"id": name} for name in there]}

        paths = sglang(
            load_lora_adapter_from_tensors=load,
            unload_lora_adapter=unload,
            generate=generate,
            server_info=giving(self.info),
            **changes,
        )
        return Peer(paths | {"/v1/models": models})

    def start_anew(self) -> None:
        """Forget every adapter, as a restarted server does."""
        self.unloads.extend(load["lora_name"] for load in self.loads)


def client(*peers: Peer, **settings: Any) -> SGLangEngine:
    config = replace(SGLangConfig(health_s=60.0, server_wait_s=0.0), **settings)
    return SGLangEngine.attach(*(p.url for p in peers), model=MODEL, config=config, tokenizer=ByteTokenizer())


async def say(engine: SGLangEngine) -> Completion:
    return await engine.generate([1, 2], session="s", max_tokens=3, sampling=Sampling(), seed=5)


async def test_a_policy_is_loaded_once_and_sampled_by_every_client_under_one_name() -> None:
    held = Held()
    async with held.peer() as peer, client(peer) as owner, client(peer) as other:
        assert isinstance(owner, SharedEngine)
        pushed = pickle.loads(pickle.dumps(await owner.push(ADAPTER, version=1)))
        assert owner.version == other.version == 0
        for engine in (owner, other):
            await engine.pull(pushed)
            assert (await say(engine)).versions[0].version == 1
    assert len(held.loads) == 1
    assert held.sampled == [pushed.lora, pushed.lora]


async def test_the_owner_unloads_the_previous_policy_and_others_unload_nothing() -> None:
    held = Held()
    async with held.peer() as peer, client(peer) as owner:
        names = []
        async with client(peer) as other:
            for version in (1, 2, 3):
                pushed = await owner.push(ADAPTER, version=version)
                names.append(pushed.lora)
                await owner.pull(pushed)
                await other.pull(pushed)
                while len(held.unloads) < version - 2:  # noqa: ASYNC110  a list sends no notification
                    await asyncio.sleep(0)
        assert held.unloads == names[:1]
    assert set(held.unloads) == set(names)


async def test_a_restarted_server_gets_no_request_before_it_has_the_policy_again() -> None:
    held = Held()
    async with (
        held.peer() as peer,
        client(peer, health_s=60.0, server_wait_s=600.0) as owner,
        client(peer, health_s=0.05, server_wait_s=600.0) as other,
    ):
        pushed = await owner.push(ADAPTER, version=1)
        for engine in (owner, other):
            await engine.pull(pushed)
        await peer.die()
        held.start_anew()
        waiting = asyncio.create_task(say(other))
        while not other.counts.lost_servers:  # noqa: ASYNC110  a counter sends no notification
            await asyncio.sleep(0.005)
        await peer.rise()
        for _ in range(3):  # it is up but has no adapter
            assert await owner._fleet.servers[0].ready(5) == 200
            await asyncio.sleep(0.05)
        assert held.sampled == []
        held.unloads.clear()  # the owner sends it again
        assert (await waiting).versions[0].version == 1
        assert held.sampled == [pushed.lora]


async def test_a_server_with_other_weights_than_the_last_push_is_not_reused() -> None:
    says = {"weight_version": "default"}
    async with Peer(sglang(model_info=lambda _: giving(says)(None))) as peer, client(peer, adapters="merged") as engine:
        [server] = engine._fleet.servers
        server.doubt()
        assert not await server.pull(PolicyVersion(None, 3, "agentgym-x-v3"))
        with pytest.raises(EngineError, match="does not have agentgym-x-v3, which another client pushed"):
            await engine._fleet.take(server, PolicyVersion(None, 3, "agentgym-x-v3"))
        says["weight_version"] = "3"
        assert await server.pull(PolicyVersion(None, 3, "agentgym-x-v3"))
        assert server.holds(PolicyVersion(None, 3, "agentgym-x-v3"))


async def test_a_policy_is_not_sampled_from_a_server_that_does_not_have_it() -> None:
    held = Held()
    async with held.peer() as peer, client(peer) as engine:
        await engine.pull(PolicyVersion("nobodys", 4))
        with pytest.raises(EngineError, match="no server is left"):
            await say(engine)
    assert held.sampled == []


@pytest.mark.parametrize("tp", [1, 2, 4])
async def test_each_process_of_a_server_gets_a_copy_of_the_adapter(tp: int) -> None:
    held = Held(tp_size=tp)
    async with held.peer() as peer, client(peer) as engine:
        await engine.load_adapter(ADAPTER, version=1)
    copies = held.loads[0]["serialized_named_tensors"]
    assert len(copies) == tp
    assert [pickle.loads(base64.b64decode(copy)).keys() for copy in copies] == [{"a"}] * tp


async def test_an_adapter_is_packed_once_for_all_servers_and_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import agentgym.engines.sglang.policies.payloads as policies

    loop, threads = asyncio.get_running_loop(), list[bool]()
    packed = policies.packed_tensors

    def noted(*arguments: Any, **named: Any) -> str:
        try:
            threads.append(asyncio.get_running_loop() is loop)
        except RuntimeError:  # a thread without a loop
            threads.append(False)
        return packed(*arguments, **named)

    monkeypatch.setattr(policies, "packed_tensors", noted)
    async with AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(Held().peer()) for _ in range(3)]
        engine = await stack.enter_async_context(client(*peers))
        await engine.load_adapter(ADAPTER, version=1)
    assert threads == [False]


async def test_requests_carry_the_api_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTGYM_SGLANG_API_KEY", "s3cret")
    heads: list[str] = []

    class Noting(Peer):
        async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            heads.append(head.decode())
            again = asyncio.StreamReader()
            length = next(int(line[15:]) for line in head.decode().split("\r\n") if line.startswith("Content-Length:"))
            again.feed_data(head + await reader.readexactly(length))
            await super()._answer(again, writer)

    async with Noting(sglang()) as peer, client(peer) as engine:
        await say(engine)
    assert heads
    assert all("\r\nAuthorization: Bearer s3cret\r\n" in head for head in heads)
    monkeypatch.setenv("AGENTGYM_SGLANG_API_KEY", "two\r\nlines")
    with pytest.raises(ValueError, match="api_key: must be printable ASCII in one line"):
        await client(peer).__aenter__()


class WeightsHeld:
    """A server that accepts weights and records the order of its requests and the weights it received."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.versions: set[str] = set()
        self.refuse = False

    def peer(self) -> Peer:
        def noting(path: str) -> Any:
            async def handle(payload: Any) -> Any:
                self.order.append(path)
                if path == "update_weights_from_tensor":
                    if self.refuse:
                        return 400, {"success": False, "message": "no such weight"}
                    (copy,) = payload["serialized_named_tensors"]
                    self.weights |= dict(pickle.loads(base64.b64decode(copy)))
                    self.versions.add(payload["weight_version"])
                return await sample(payload) if path == "generate" else None

            return handle

        names = ("begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache", "generate")
        return Peer(sglang(**{name: noting(name) for name in names}))


@pytest.fixture(scope="module")
def trained() -> Adapter:
    """Return an adapter of the model whose B matrices are not 0."""
    with Trainer(MODEL, TrainConfig(device="cpu")) as trainer:
        adapter = trainer.adapter()
    torch.manual_seed(0)
    tensors = {
        name: torch.randn_like(tensor) * 0.03 if "lora_B" in name else tensor
        for name, tensor in adapter.tensors.items()
    }
    return Adapter(config=adapter.config, tensors=tensors)


async def test_merged_weights_reach_the_server_in_buckets_and_are_restored(
    trained: Adapter,
) -> None:
    held = WeightsHeld()
    async with held.peer() as peer:
        async with client(peer, adapters="merged") as engine:
            engine._fleet._merged._bucket_bytes = 100_000  # the model is small
            await say(engine)
            await engine.load_adapter(trained, version=1)
            assert (await say(engine)).versions[0].version == 1
            pushed = dict(held.weights)
        idle, begin, *updates, end, flush = held.order[1 : held.order.index("end_weight_update") + 2]
        assert (idle, begin) == ("flush_cache", "begin_weight_update")
        assert (end, flush) == ("end_weight_update", "flush_cache")
        assert len(updates) > 1
        assert set(updates) == {"update_weights_from_tensor"}
    (own,) = MergedWeights(MODEL, bucket_bytes=1 << 40).of(trained)()
    assert pushed.keys() == dict(own).keys()
    assert all(torch.equal(pushed[name], weight) for name, weight in own)
    base = MergedWeights(MODEL, bucket_bytes=1 << 40)
    base.of(trained)
    (originals,) = base.of(None)()
    assert all(torch.equal(held.weights[name], weight) for name, weight in originals)  # after the engine closed
    assert not all(torch.equal(pushed[name], weight) for name, weight in originals)


async def test_full_model_weights_reach_the_server_and_are_restored() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    own = {name: weight.detach() for name, weight in model.named_parameters()}
    given = {name: 2 * weight for name, weight in own.items()}
    weights = ModelWeights(tensors=given, files=given)
    held = WeightsHeld()
    async with held.peer() as peer:
        async with client(peer, adapters="merged") as engine:
            assert isinstance(engine, WeightsEngine)
            engine._fleet._merged._bucket_bytes = 100_000  # the model is small
            await engine.load_weights(weights, version=1)
            assert (await say(engine)).versions[0].version == 1
            pushed = dict(held.weights)
            await engine.pull(await engine.push(weights, version=2))
            strange = ModelWeights(tensors={}, files={"strange": torch.zeros(1)})
            with pytest.raises(ValueError, match=r"^weights: strange is not a weight in the files of"):
                await engine.load_weights(strange, version=3)
        assert held.order.count("update_weights_from_tensor") > 4
    assert pushed.keys() == given.keys()
    assert all(torch.equal(pushed[name], weight) for name, weight in given.items())
    assert all(torch.equal(held.weights[name], weight.to(held.weights[name])) for name, weight in own.items())
    async with held.peer() as peer, client(peer) as engine:
        with pytest.raises(
            ValueError, match=r"^adapters: whole weights cannot be pushed with adapters=tensors; set adapters=merged"
        ):
            await engine.load_weights(weights, version=1)


async def test_a_server_with_incomplete_weights_gets_no_request(trained: Adapter) -> None:
    held = WeightsHeld()
    async with held.peer() as peer, client(peer, adapters="merged") as engine:
        held.refuse = True
        with pytest.raises(ValueError, match=r"rejected it: .*no such weight"):
            await engine.load_adapter(trained, version=1)
        with pytest.raises(EngineError, match="no server is left"):
            await say(engine)
    assert "generate" not in held.order


def test_merged_weights_equal_pefts(trained: Adapter, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from agentgym.train.policy.adapter_io import write_merged

    write_merged(MODEL, trained, tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    (ours,) = MergedWeights(MODEL, bucket_bytes=1 << 40).of(trained)()
    for name, weight in ours:
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-5)
    (exact,) = MergedWeights(MODEL, bucket_bytes=1 << 40, exact=True).of(trained)()  # for a server in float32
    assert {weight.dtype for _, weight in exact} == {torch.float32}
    assert all(
        torch.equal(weight.to(theirs[name].dtype), ours_)
        for (name, weight), (_, ours_) in zip(exact, ours, strict=True)
    )
    sides = {f"base_model.model.strange.lora_{side}.weight": torch.zeros(1, 1) for side in "AB"}
    strange = Adapter(config={"r": 1, "lora_alpha": 1}, tensors=sides)
    with pytest.raises(ValueError, match=r"adapter: strange\.weight is not a weight in the files"):
        MergedWeights(MODEL, bucket_bytes=1).of(strange)


async def test_no_request_is_sent_while_memory_is_released_and_turns_continue_afterwards() -> None:
    order: list[str] = []
    sent = asyncio.Event()

    def noting(name: str) -> Any:
        async def handle(payload: Any) -> Any:
            order.append(f"{name} {payload.get('tags', '')}".strip())
            sent.set()
            return await sample(payload) if name == "generate" else None

        return handle

    busy = iter([400, 400] * 2)

    async def flush(_: Any) -> Any:
        """Flush the cache; a request that was answered has not left the scheduler yet."""
        order.append("flush_cache")
        return next(busy, 200) if len(order) < 3 else 200, None

    names = ("release_memory_occupation", "resume_memory_occupation", "generate")
    async with (
        Peer(sglang(flush_cache=flush, **{name: noting(name) for name in names})) as peer,
        client(peer) as engine,
    ):
        keep: Any
        for keep, tags in (("keep", "['kv_cache']"), ("drop", "['kv_cache', 'weights']")):
            order.clear()
            engine._config = replace(engine._config, urls=(), colocate=keep)  # like a launched server
            await engine.drain()
            await engine.release_memory()
            late = asyncio.create_task(say(engine))
            await asyncio.sleep(0)
            await engine.resume_memory()
            assert order[:3] == ["flush_cache"] * 3
            assert order[3:] == [f"release_memory_occupation {tags}", f"resume_memory_occupation {tags}"]
            await engine.reopen()
            assert len((await late).token_ids) == 3
        engine._config = replace(engine._config, urls=(peer.url,), colocate="off")
