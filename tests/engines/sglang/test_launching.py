"""Launched servers: their GPUs, their environment, and recovery when one exits by itself."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgym.engines.scripted import ByteTokenizer
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.sglang.engine import SGLangEngine
from agentgym.engines.sglang.launching.placement import place_servers, visible_gpus
from agentgym.engines.sglang.launching.process import server_environment
from agentgym.errors import EngineError
from agentgym.train.distributed import gpus_here
from agentgym.types.completion import Completion, Sampling
from agentgym.types.weights import Adapter

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "recipes" / "checkpoints" / "chase"
FAKE = shlex.join([sys.executable, str(Path(__file__).with_name("fake_server.py"))])
ADAPTER = Adapter(config={"r": 1}, tensors={"a": torch.zeros(1)})
EIGHT = [str(number) for number in range(8)]


@pytest.mark.parametrize(
    ("settings", "trainers", "placed"),
    [
        ({}, [0], [("1",)]),
        ({"servers": 7}, [0], [(str(number),) for number in range(1, 8)]),
        ({"servers": 2, "tp": 2}, [0, 1, 2, 3], [("4", "5"), ("6", "7")]),
        ({"servers": 2, "tp": 2, "gpus": (3, 2, 7, 6)}, [0], [("3", "2"), ("7", "6")]),
        ({"servers": 1, "colocate": "keep"}, [0], [("0",)]),
        ({"servers": 8, "colocate": "drop"}, list(range(8)), [(name,) for name in EIGHT]),
        ({"servers": 2}, [], [("0",), ("1",)]),
    ],
)
def test_servers_get_their_own_gpus(settings: Any, trainers: list[int], placed: list[tuple[str, ...]]) -> None:
    assert place_servers(SGLangConfig(**settings), EIGHT, trainers=trainers) == placed


@pytest.mark.parametrize(
    ("settings", "trainers", "said"),
    [
        ({"servers": 8}, [0], r"servers, tp: 8 servers with tp=1 need 8 GPUs; .* sees 8 .* trainer uses 1 of them"),
        ({"servers": 2, "tp": 4}, [0, 1], "servers, tp: 2 servers with tp=4 need 8 GPUs"),
        ({"gpus": (8,)}, [0], r"gpus: \[8\] do not exist; this process sees 8"),
        ({"gpus": (0,)}, [0], r"gpus: \[0\] are used by the trainer.*colocate='keep'"),
        ({"gpus": (1, 2)}, [0], "gpus: 1 servers with tp=1 need 1 GPUs, but 2 are listed"),
    ],
)
def test_servers_that_do_not_fit_are_refused_by_the_names_of_the_settings(
    settings: Any, trainers: list[int], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        place_servers(SGLangConfig(**settings), EIGHT, trainers=trainers)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpus": (1, 1)}, r"^gpus: \[1, 1\] contains a GPU twice"),
        ({"gpus": (1,), "urls": ("http://a",)}, "^gpus: only for launched servers"),
        ({"colocate": "keep", "urls": ("http://a",)}, "^colocate: only for launched servers"),
        ({"arguments": "--tp 2"}, "^arguments: --tp is not allowed; set tp"),
        ({"arguments": "--dp-size=2"}, "^arguments: --dp-size .*launch more servers instead"),
        ({"arguments": "--base-gpu-id 4"}, "^arguments: --base-gpu-id .*set gpus"),
    ],
)
def test_contradictory_placement_settings_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SGLangConfig(**settings)


def test_visible_gpus_are_those_that_cuda_visible_devices_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, GPU-ab,6")
    assert visible_gpus() == ["4", "GPU-ab", "6"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    assert place_servers(SGLangConfig(servers=2), [], trainers=[]) == [(), ()]


def test_trainers_get_the_first_gpus_one_per_process_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [gpus_here(device) for device in ("cpu", "auto", "cuda", "cuda:3")] == [(), (0,), (0,), (3,)]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert gpus_here("auto") == (0, 1, 2, 3)


def test_a_server_gets_no_torchrun_variables_and_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    told += " TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT"
    for name in told.split():
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment = server_environment(["2", "3"])
    assert not set(told.split()) & set(environment)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["NCCL_DEBUG"]) == ("2,3", "INFO")


async def say(engine: SGLangEngine, session: str = "s") -> Completion:
    return await engine.generate([1, 2], session=session, max_tokens=3, sampling=Sampling(), seed=5)


async def test_a_launched_server_that_dies_is_restarted_with_the_current_policy() -> None:
    config = SGLangConfig(command=FAKE, health_s=0.5, restarts=2)
    async with SGLangEngine.launch(MODEL, config, tokenizer=ByteTokenizer()) as engine:
        await engine.load_adapter(ADAPTER, version=3)
        for restarts in (1, 2):
            with suppress(ConnectionError):
                await engine._fleet.servers[0].client.post("/die", {})
            done = await say(engine)  # the server refuses an adapter that isn't loaded
            assert done.versions[0].version == 3
            assert (engine.counts.restarts, engine.counts.revived_servers) == (restarts, restarts)
        with suppress(ConnectionError):
            await engine._fleet.servers[0].client.post("/die", {})
        with pytest.raises(EngineError, match=r"no server is left of the configured ones: .* ended: "):
            await say(engine)


OWNERS = """
import asyncio, json, os, sys
from dataclasses import dataclass
from pathlib import Path
import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer
from agentgym.run.open_collector import open_engine
from agentgym.train.trainer import Trainer

async def main():
    engine = ag.SGLangConfig(command=sys.argv[2], servers=2)
    run = ag.RunConfig(recipe="r", env="chase", model=sys.argv[1], engine=engine)
    async with Trainer(run.model, ag.TrainConfig(device="cpu")) as trainer:
        async with open_engine(run, trainer, lambda said: None) as engine:
            pushed = None
            if trainer.rank == 0:
                pushed = await engine.push(trainer_adapter, version=1)
            pushed = (await trainer.gather([pushed]))[0]
            await engine.pull(pushed)
            done = await engine.generate([5, 6], session="s", max_tokens=2, sampling=ag.Sampling(), seed=0)
            said = {"urls": engine.urls, "version": done.versions[0].version, "name": pushed.lora}
            Path(sys.argv[3], f"rank{trainer.rank}").write_text(json.dumps(said))
            await trainer.gather([None])

import torch
from agentgym.types.weights import Adapter
trainer_adapter = Adapter(config={"r": 1}, tensors={"a": torch.zeros(1)})
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["launched", "broken"])
def test_under_torchrun_one_rank_launches_the_servers_and_the_other_attaches(tmp_path: Path, fails: bool) -> None:
    script = tmp_path / "owners.py"
    script.write_text(OWNERS)
    record = tmp_path / "environments"
    command = shlex.join([sys.executable, "-c", "print('no GPU here'); raise SystemExit(3)"]) if fails else FAKE
    environment = os.environ | {"PYTHONPATH": str(ROOT), "AGENTGYM_FAKE_ENVIRONMENT": str(record)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(script), str(MODEL), command, str(tmp_path)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if fails:
        assert done.returncode != 0
        assert "the first process could not launch the servers: EngineError: " in done.stderr
        assert "no GPU here" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert (len(first["urls"]), first["version"]) == (2, 1)
    servers = [json.loads(line) for line in record.read_text().splitlines()]
    assert len(servers) == 2
    assert not any(name.startswith("TORCHELASTIC") or name == "RANK" for server in servers for name in server)


async def test_two_servers_of_one_engine_have_different_ports() -> None:
    config = SGLangConfig(command=FAKE, servers=2)
    async with SGLangEngine.launch(MODEL, config, tokenizer=ByteTokenizer()) as engine:
        assert len(set(engine.urls)) == 2
        assert engine.context_tokens == 400  # the server's own limit, since none is set
        await asyncio.gather(*(say(engine, f"{i}") for i in range(8)))
