"""Evaluation on a Ray cluster: the results of one process, even if a worker is lost, and what can't be sent there."""

import asyncio
import pickle
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.cli.main import main as command
from agentgym.cluster.evaluation import elsewhere, opened
from agentgym.cluster.joining import portable_env
from agentgym.engines import SGLangEngine
from agentgym.environments.mixture import Member, mix
from agentgym.environments.parameters import configured
from agentgym.errors import AgentGymError
from agentgym.evals.evaluation import Evaluation
from agentgym.store.reader import RolloutStore
from tests.cluster.conftest import ROOT, TwoNodes
from tests.cluster.eval_env import Judged, Slow
from tests.engines.sglang.test_shared import ADAPTER, Held, client, say


def ids(evaluation: Evaluation) -> dict[str, list[int]]:
    return {r.rollout_id: [i for s in r.segments for i in s.token_ids.tolist()] for r in evaluation.rollouts}


def same(one: Evaluation, other: Evaluation) -> bool:
    return ids(one) == ids(other) and one.rewards == other.rewards


# Names that are valid in other processes


def test_workers_find_envs_by_file_gallery_name_or_mixture_members() -> None:
    nim = ag.find_env("nim")
    assert portable_env(Slow) == f"{ROOT}/tests/cluster/eval_env.py:Slow"
    assert portable_env(configured(nim, {})) == "nim"
    mixture = mix({"Slow": Member(Slow, 2.0), "Judged": Member(Judged, 1.0)})
    assert portable_env(mixture) == {portable_env(Slow): 2.0, portable_env(Judged): 1.0}
    with pytest.raises(
        ValueError, match=r"^env: on Ray, the members of a mixture must be named after .*; rename quick"
    ):
        portable_env(mix({"quick": Member(Slow, 1.0), "Judged": Member(Judged, 1.0)}))


def test_an_env_defined_in_a_function_is_refused_with_the_fix() -> None:
    class Here(Slow):
        pass

    with pytest.raises(
        ValueError, match=r"^env: .*Here is defined inside a function .*move it to the top level of a module"
    ):
        portable_env(Here)


async def test_an_open_engine_and_open_sandboxes_are_refused_before_anything_starts() -> None:
    async with ag.TransformersEngine("tiny") as engine:
        with pytest.raises(ValueError, match=r"^model: on Ray, each worker .* but this TransformersEngine"):
            await ag.evaluate(Slow, engine, n=1, ray="auto")
        with pytest.raises(ValueError, match=r"^models\['judge'\]: on Ray, each worker opens"):
            await ag.evaluate(Judged, "tiny", n=1, ray="auto", models={"judge": engine})
    with pytest.raises(ValueError, match=r"^workers: only an evaluation on Ray has workers"):
        await ag.evaluate(Slow, "tiny", n=1, workers=2)


async def test_a_server_engine_is_reopened_elsewhere_at_the_same_policy() -> None:
    held = Held()
    async with held.peer() as peer, client(peer) as here:
        before = pickle.loads(pickle.dumps(elsewhere(here, "model")))
        await here.load_adapter(ADAPTER, version=3)
        after = pickle.loads(pickle.dumps(elsewhere(here, "model")))
        versions = [await version_of(given) for given in (before, after)]
    assert versions == [0, 3]
    assert held.sampled[0] is None
    assert held.sampled[1] is not None


async def version_of(given: Any) -> int:
    """Return the policy version that a client reports if it is opened as another process would open it."""
    async with opened(given) as there:
        assert isinstance(there, SGLangEngine)
        return (await say(there)).versions[0].version


def test_an_endpoint_is_sent_unopened_and_a_folder_as_an_absolute_path(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = ag.Endpoint("http://there/v1", model="m", api_key_env="KEY")
    sent = pickle.loads(pickle.dumps(elsewhere(endpoint, "model")))
    assert (sent.url, sent.model, sent.api_key_env) == ("http://there/v1", "m", "KEY")
    monkeypatch.chdir(ROOT)
    assert elsewhere("recipes", "model") == ROOT / "recipes"
    assert elsewhere("tiny", "model") == "tiny"


async def test_an_address_without_a_cluster_is_refused_at_once_with_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(AgentGymError, match=rf"^ray: could not join a cluster at '127.0.0.1:{port}' .*refused.*HOST:"):
        await ag.evaluate("nim", "tiny", n=1, ray=f"127.0.0.1:{port}")


# On a cluster


@pytest.mark.ray
@pytest.mark.slow
async def test_two_workers_give_the_same_rollouts_and_rewards_as_one_process(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    async def evaluated(folder: str, **how: Any) -> Evaluation:
        env = configured(Judged, {"bonus": 0.25})
        return await ag.evaluate(
            env, "tiny", n=6, k=2, seed=3, models={"judge": "tiny"}, output_dir=tmp_path / folder, **how
        )

    alone = await evaluated("alone")
    on_ray = await evaluated("ray", ray=two_nodes.address, workers=2)
    assert same(alone, on_ray)
    assert {r.rewards["group_reward"] for r in on_ray.rollouts} == {0.25}
    assert asked(on_ray) == asked(alone)
    assert texts(tmp_path / "ray", on_ray) == texts(tmp_path / "alone", alone) != {}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.proof
async def test_an_evaluation_of_one_process_can_be_resumed_on_a_cluster(two_nodes: TwoNodes, tmp_path: Path) -> None:
    await ag.evaluate(Slow, "tiny", n=2, k=2, seed=3, output_dir=tmp_path)
    whole = await ag.evaluate(
        Slow, "tiny", n=4, k=2, seed=3, output_dir=tmp_path, resume=True, ray=two_nodes.address, workers=1
    )
    assert whole.resumed == 4
    assert same(whole, await ag.evaluate(Slow, "tiny", n=4, k=2, seed=3))


def asked(evaluation: Evaluation) -> list[dict[str, float]]:
    """Return each rollout's metrics of the env's model roles, without times."""
    return [
        {name: value for name, value in r.metrics.items() if name.startswith("model_") and "seconds" not in name}
        for r in evaluation.rollouts
    ]


def texts(folder: Path, evaluation: Evaluation) -> dict[int, bytes]:
    """Return the bytes of the sampled tokens, as the store holds them."""
    with RolloutStore(folder) as store:
        return store.token_bytes("", {i for sampled in ids(evaluation).values() for i in sampled})


@pytest.mark.ray
@pytest.mark.slow
async def test_rollouts_of_a_killed_worker_are_run_again(
    two_nodes: TwoNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def kill_one() -> bool:
        while not list(tmp_path.glob("began-*")):
            time.sleep(0.01)
        return two_nodes.kill("EvaluationWorker")

    env = configured(Slow, {"folder": str(tmp_path)})
    async with asyncio.TaskGroup() as doing:
        killed = doing.create_task(asyncio.to_thread(kill_one))
        evaluating = ag.evaluate(env, "tiny", n=6, k=2, seed=3, ray=two_nodes.address, workers=2, concurrency=4)
        on_ray = await doing.create_task(evaluating)
    assert killed.result()
    assert re.search(r"evaluation worker \d of \d has ended; replacing it", caplog.text)
    assert on_ray.failed == 0
    assert same(on_ray, await ag.evaluate(env, "tiny", n=6, k=2, seed=3))
    assert two_nodes.gone("EvaluationWorker")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.proof
def test_the_command_prints_the_same_on_a_cluster_as_without_one(
    two_nodes: TwoNodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["nim", "--model", "tiny", "--n", "4", "--max-tokens", "16"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "agentgym",
            "eval",
            *words,
            "--output-dir",
            str(tmp_path / "ray"),
            "--ray",
            two_nodes.address,
        ],
        cwd=ROOT,
        env=two_nodes.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert command(["eval", *words, "--output-dir", str(tmp_path / "alone")]) == 0
    alone = capsys.readouterr().out.replace(str(tmp_path / "alone"), str(tmp_path / "ray"))
    assert done.stdout == alone
    with RolloutStore(tmp_path / "ray") as store:
        assert len(list(store.find())) == 4
