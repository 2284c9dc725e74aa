"""Two real servers under torchrun, merged weights, released memory, and a server that is restarted."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentgym.engines.sglang.engine import SGLangEngine
from agentgym.train.trainer import TrainConfig, Trainer
from agentgym.types.completion import Sampling
from agentgym.weight_sync.sync import WeightSync
from tests.engines.sglang.server.conftest import MODEL, ROOT, real_config
from tests.weight_sync.test_proof import batch

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WARM, GREEDY = Sampling(temperature=0.7), Sampling(temperature=0.0)
IDS = [20] * 12 + list(range(30, 60))

SHARING = """
import asyncio, json, sys
from dataclasses import replace
from pathlib import Path
import agentgym as ag
from agentgym.run.open_collector import open_engine
from agentgym.train.trainer import Trainer
from agentgym.types.completion import Sampling
from agentgym.weight_sync.sync import WeightSync
from tests.engines.sglang.server.conftest import MODEL, real_config
from tests.weight_sync.test_proof import batch

async def main(out):
    config = replace(real_config(), servers=2, adapters="tensors")
    train = ag.TrainConfig(device="cpu", temperature=0.7, loss="cispo", warmup_steps=0)
    run = ag.RunConfig(recipe="r", env="chase", model=MODEL, engine=config, train=train)
    async with Trainer(MODEL, train) as trainer, open_engine(run, trainer, lambda said: None) as engine:
        sync = WeightSync(trainer, engine, list(range(20, 80)), Sampling(temperature=0.7))
        rows, names = [], []
        for version in (1, 2, 3):
            await trainer.step(batch(version))
            rows.append(await sync(version))
            done = await engine.generate([20] * 12, session="s", max_tokens=4, sampling=Sampling(), seed=trainer.rank)
            rows[-1]["version"] = done.versions[0].version
            names.append(engine._fleet.policy.lora)
            await trainer.gather([None])
            models = [(await server.client.get("/v1/models")).body["data"] for server in engine._fleet.servers]
            rows[-1]["adapters"] = [sorted(m["id"] for m in one if m["id"].startswith("agentgym-")) for one in models]
            await trainer.gather([None])
        Path(out, f"rank{trainer.rank}").write_text(json.dumps({"rows": rows, "names": names, "urls": engine.urls}))
        await trainer.gather([None])

asyncio.run(main(sys.argv[1]))
"""


def test_two_servers_of_one_rank_hold_one_adapter_per_version(tmp_path: Path) -> None:
    real_config()
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1))
    assert len(first["urls"]) == 2
    assert (first["names"], first["urls"]) == (second["names"], second["urls"])
    for version, row in enumerate(first["rows"], 1):
        assert row["version"] == version
        assert row["sync/logprob_gap"] < 1e-3
        assert row["sync/arrived"] == pytest.approx(1, abs=0.05)
        for held in row["adapters"]:  # the current one, and until the next push also the previous one
            assert first["names"][version - 1] in held
            assert set(held) <= set(first["names"][max(0, version - 2) : version])


async def test_merged_weights_released_memory_and_a_restart_on_a_real_server() -> None:
    """Use one server for everything, since it takes a minute to start.

    The CPU build has no memory saver, so nothing is freed.
    """
    config = replace(real_config(), adapters="merged", restarts=1, bucket_mb=1, health_s=60.0)
    train = TrainConfig(temperature=0.7, device="cpu", loss="cispo", warmup_steps=0)
    async with Trainer(MODEL, train) as trainer, SGLangEngine.launch(MODEL, config) as engine:
        sync = WeightSync(trainer, engine, IDS, WARM)
        for version in (1, 2):
            await trainer.step(batch(version))
            metrics = await sync(version)
            assert metrics["sync/logprob_gap"] < 1e-3
            assert metrics["sync/arrived"] == pytest.approx(1, abs=0.05)
        long = asyncio.create_task(engine.generate(IDS, session="a", max_tokens=300, sampling=GREEDY, seed=1))
        await engine.generate(IDS, session="clock", max_tokens=8, sampling=GREEDY, seed=1)
        await trainer.step(batch(3))
        await sync(3)
        done = await long  # a request that the push interrupted continues from its tokens
        assert {v.version for v in done.versions} <= {2, 3}
        assert done.finish_reason in ("length", "stop")
        # As with `colocate`, whose flags the CPU build refuses because it lacks torch_memory_saver.
        engine._config = replace(engine._config, colocate="drop")
        before = await engine.score(IDS, sampling=WARM)
        await engine.drain()
        await engine.release_memory()
        await engine.resume_memory()
        await engine.reopen()
        np.testing.assert_allclose(await engine.score(IDS, sampling=WARM), before, atol=1e-5)
        await engine.load_adapter(None, version=4)
        full = TrainConfig(method="full", lr=5e-4, temperature=0.7, device="cpu", loss="cispo", warmup_steps=0)
        with Trainer(MODEL, full) as whole:  # every weight of the server is replaced, including embedding and norms
            proof = WeightSync(whole, engine, IDS, WARM)
            await proof.begin()
            for version in (5, 6):
                await whole.step(batch(version))
                metrics = await proof(version)
                assert metrics["sync/logprob_gap"] < 1e-3
                assert metrics["sync/arrived"] == pytest.approx(1, abs=0.05)
        before = await engine.score(IDS, sampling=WARM)
        (server,) = engine._fleet.servers
        assert server.process is not None
        assert server.process.pid is not None
        os.killpg(server.process.pid, signal.SIGKILL)
        engine._fleet.lose(server)
        while not server.process.ended:  # noqa: ASYNC110  its supervisor notices that in a moment
            await asyncio.sleep(0.01)
        await engine._fleet._revive(server)  # as its watch does one check later
        assert (engine.counts.restarts, server.alive) == (1, True)
        np.testing.assert_allclose(await engine.score(IDS, sampling=WARM), before, atol=1e-4)
