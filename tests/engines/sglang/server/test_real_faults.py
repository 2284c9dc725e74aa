"""Check T15 on the real server: faults in the engine, the tools and the sandboxes over 100 rollouts."""

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.sglang.engine import SGLangConfig, SGLangEngine
from agentgym.engines.sglang.http import JsonClient
from agentgym.errors import SandboxError
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool
from agentgym.scheduling import run_groups
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Group, StopReason
from envs.chase.env import Chase, ChaseCompaction
from tests.engines.sglang.peer import HangUp, Peer

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

WARM = Sampling(temperature=0.7, max_tokens=40)
GET = ("/ready", "/server_info", "/health_generate")
POST = ("/abort_request",)


class Relay:
    """Forwards requests to a real server and breaks and counts some responses of /generate."""

    def __init__(self, url: str) -> None:
        self.client = JsonClient(url)
        self.draw = random.Random(0)
        self.faults: Counter[str] = Counter()
        self.unlucky = True

    def peer(self) -> Peer:
        paths: dict[str, Any] = {path: partial(self.get, path) for path in GET}
        paths |= {path: partial(self.post, path) for path in POST}
        return Peer(paths | {"/generate": self.generate})

    async def get(self, path: str, _: Any) -> Any:
        return tuple(await self.client.get(path))

    async def post(self, path: str, payload: Any) -> Any:
        return tuple(await self.client.post(path, payload))

    async def generate(self, payload: Any) -> Any:
        kinds = ["no_logprobs", "short", "hang_up", "unavailable", "abort"]
        fault = self.draw.choices(["none", *kinds], [40, 1, 1, 3, 3, 1])[0] if self.unlucky else "none"
        if fault == "unavailable":
            self.faults[fault] += 1
            return 503, {"error": {"message": "draining"}}
        if fault == "abort":
            # Return a partial response, as after an abort by another user of the server.
            payload["sampling_params"]["max_new_tokens"] = 1
        status, body = await self.client.post("/generate", payload)
        assert status == 200, body
        self.faults[fault] += 1
        if fault == "hang_up":
            raise HangUp
        if fault == "no_logprobs":
            del body["meta_info"]["output_token_logprobs"]
        if fault == "short":
            body["meta_info"]["output_token_logprobs"].pop()
        if fault == "abort":
            body["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
        return body


class Unlucky(ChaseCompaction):
    """An env whose tool sometimes returns too much text and whose sandbox sometimes dies."""

    limits = ag.Limits(turns=6, seconds=600, context_tokens=180)
    deaths = 0
    unlucky = True

    @ag.tool(timeout_s=20)
    async def python(self, code: str) -> str:
        """Run Python code; get(key) looks a key up."""
        chance = random.Random(f"{self.task.id}{code}{type(self).deaths}").random() if self.unlucky else 1.0
        if chance < 0.05:
            type(self).deaths += 1
            raise SandboxError("the sandbox died")
        if chance < 0.2:
            return "see " * 500
        result = await self.sandbox.python(code, functions={"get": self._get})
        return result.text(limit=200)


@asynccontextmanager
async def over(relay: Relay) -> AsyncIterator[tuple[SGLangEngine, list[Peer]]]:
    """Yield an engine with two paths to one server, and the two peers."""
    config = SGLangConfig(slots=16)
    with closing(relay.client):
        async with (
            relay.peer() as one,
            relay.peer() as two,
            SGLangEngine.attach(one.url, two.url, config=config) as engine,
        ):
            yield engine, [one, two]


def assert_lengths(groups: list[Group]) -> int:
    """Assert that each segment's three lists agree and each sampled id is in one turn; return the number of turns."""
    turns = 0
    for rollout in (r for group in groups for r in group.rollouts):
        for segment in rollout.segments:
            assert len(segment.token_ids) == len(segment.sampled) == len(segment.logprobs)
            assert segment.sampled.sum() == sum(turn.stop - turn.start for turn in segment.turns)
            assert (segment.logprobs[segment.sampled] <= 0).all()
            turns += len(segment.turns)
    return turns


async def test_lengths_agree_and_counts_add_up_over_100_rollouts_with_faults(url: str) -> None:
    relay = Relay(url)
    tasks = list(Chase.tasks("train")[:25])
    sandboxes = FakeSandboxPool(FakeSandbox)
    async with over(relay) as (engine, peers):
        groups = await run_groups(Unlucky, tasks, engine, n=4, concurrency=16, sandboxes=sandboxes, sampling=WARM)
        turns = assert_lengths(list(groups))
        rollouts, metrics, counts = groups.rollouts, groups.metrics(), engine.counts
        assert metrics["rollouts/started"] == 100 == metrics["rollouts/finished"] + metrics["rollouts/failed"]
        assert all((r.reward is None) == (r.stop_reason == StopReason.ERROR) for r in rollouts)
        why = Counter(_kind(r.error) for r in rollouts if r.error is not None)
        assert metrics["rollouts/failed"] == why.total()
        assert why["lies"] == relay.faults["no_logprobs"] + relay.faults["short"] > 0
        assert why["aborted"] == relay.faults["abort"] > 0
        assert why["sandbox"] == Unlucky.deaths > 0
        assert why["other"] == 0
        assert metrics["stop/context"] > 0
        # Every turn was answered in full or failed its rollout; every request reached the relay once.
        assert counts.turns == turns + why["lies"] + why["aborted"] + why["unserved"]
        assert counts.requests == counts.turns + counts.retried - why["unserved"]
        assert counts.requests == sum(peer.asked["/generate"] for peer in peers) == relay.faults.total()
        assert counts.retried == relay.faults["hang_up"] + relay.faults["unavailable"] > 0
        assert (counts.lost_servers, sandboxes.leased, len(engine._turns)) == (0, [], 0)
        assert engine._fleet.router.sessions().total() == 0
        # A rollout that is run again starts from nothing.
        relay.unlucky = Unlucky.unlucky = False
        failed = {r.group_id for r in rollouts if r.reward is None}
        again = await run_groups(
            Unlucky,
            [t for t in tasks if t.id in failed],
            engine,
            n=4,
            concurrency=16,
            sandboxes=sandboxes,
            sampling=WARM,
        )
        assert_lengths(list(again))
        assert all(r.reward is not None for r in again.rollouts)


def _kind(error: str) -> str:
    marks = {
        "lies": "log-probabilities are not those of the",
        "aborted": "aborted the turn",
        "sandbox": "the sandbox died",
        "unserved": "no server is left",
    }
    return next((kind for kind, mark in marks.items() if mark in error), "other")
