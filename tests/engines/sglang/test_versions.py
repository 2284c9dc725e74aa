"""Servers of SGLang 0.5.16 to 0.5.23 are spoken to in the form that each version reads.

The endpoints and fields are those in `entrypoints/http_server.py` and `managers/io_struct.py` of each version's wheel.
"""

import base64
import pickle
from dataclasses import replace
from typing import Any

import pytest

from agentgym.engines.base import Engine
from agentgym.engines.scripted import ByteTokenizer
from agentgym.engines.sglang.answers import server_facts
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from tests.engines.sglang.peer import Peer, giving, sglang
from tests.engines.sglang.test_engine import ADAPTER, MODEL

READY, SESSIONS, SPLIT = "0.5.20", "0.5.21", "0.5.17"
"""The first versions with /ready, with /begin_weight_update, and with one copy of an adapter for each process."""
VERSIONS = [f"0.5.{number}" for number in range(16, 24)]
WEIGHTS = ("begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache")


class Served:
    """A server of one version, which records the paths and bodies of uploads."""

    def __init__(self, version: str, tp: int = 1) -> None:
        self.version, self.uploads = version, list[tuple[str, Any]]()
        self.info = {"max_req_input_len": 401, "model_path": "unknown", "version": version, "tp_size": tp}

    def peer(self) -> Peer:
        missing = giving((404, {"detail": "Not Found"}))
        paths: dict[str, Any] = {"server_info": giving(self.info)}
        paths |= {name: self.noting(name) for name in (*WEIGHTS, "load_lora_adapter_from_tensors")}
        if self.version < READY:
            paths["ready"] = missing
        if self.version < SESSIONS:
            paths |= {"begin_weight_update": missing, "end_weight_update": missing}
        return Peer(sglang(**paths))

    def noting(self, name: str) -> Any:
        async def handle(payload: Any) -> Any:
            self.uploads.append((name, payload))
            return {"success": True}

        return handle


def client(peer: Peer, **settings: Any) -> SGLangEngine:
    config = replace(SGLangConfig(health_s=0.05, server_wait_s=0.0), **settings)
    return SGLangEngine.attach(peer.url, model=MODEL, config=config, tokenizer=ByteTokenizer())


async def say(engine: Engine) -> None:
    done = await engine.generate([1, 2], session="s", max_tokens=3, sampling=Sampling(), seed=5)
    assert len(done.token_ids) == 3


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("version", VERSIONS)
async def test_an_adapter_is_uploaded_in_the_form_of_each_version(version: str, tp: int) -> None:
    served = Served(version, tp)
    async with served.peer() as peer, client(peer) as engine:
        await say(engine)
        await engine.load_adapter(ADAPTER, version=1)
        await say(engine)
        assert engine.counts.lost_servers == 0
    [(_, body)] = [upload for upload in served.uploads if upload[0] == "load_lora_adapter_from_tensors"]
    one = body["serialized_tensors"] if version < SPLIT else body["serialized_named_tensors"][0]
    assert pickle.loads(base64.b64decode(one)).keys() == {"a"}
    assert ("serialized_named_tensors" in body) == (version >= SPLIT)
    assert body.get("serialized_named_tensors", [one]) == [one] * (1 if version < SPLIT else tp)


@pytest.mark.parametrize("version", VERSIONS)
async def test_weights_are_pushed_in_a_session_if_the_version_has_sessions(version: str) -> None:
    served = Served(version)
    with Trainer(MODEL, TrainConfig(device="cpu")) as trainer:
        adapter = trainer.adapter()
    async with served.peer() as peer, client(peer, adapters="merged") as engine:
        await engine.load_adapter(adapter, version=1)
        await say(engine)
    names = [name for name, _ in served.uploads]
    session = version >= SESSIONS
    assert ("begin_weight_update" in names, "end_weight_update" in names) == (session, session)
    assert "update_weights_from_tensor" in names


@pytest.mark.parametrize(
    ("said", "read"), [("0.5.17", (0, 5, 17)), ("0.5.10.post1", (0, 5, 10)), (None, ()), ("dev", ())]
)
def test_the_version_of_a_server_is_read(said: Any, read: tuple[int, ...]) -> None:
    info = {"max_req_input_len": 401, "model_path": "unknown", "version": said}
    assert server_facts(info, "http://server").version == read


async def test_a_server_without_ready_is_asked_to_sample() -> None:
    async with Served("0.5.16").peer() as peer, client(peer) as engine:
        await say(engine)
        assert peer.asked["/health_generate"] >= 1
