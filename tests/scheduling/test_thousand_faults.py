"""A thousand rollouts with every kind of fault (vectors T15): all lengths match and every count adds up."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, raw, say
from agentgym.environments.env import Split
from agentgym.errors import EngineError, SandboxError
from agentgym.samples import build_samples
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool
from agentgym.sandboxes.protocol import ExecResult, HostFunction
from agentgym.scheduling import run_groups
from agentgym.scheduling.run_groups import Groups
from agentgym.types.completion import Completion
from agentgym.types.messages import Message
from agentgym.types.rollout import Rollout

FAULTS = (
    "none",
    "no_logprobs",
    "nan_logprob",
    "abort_in_mid_turn",
    "engine_raises",
    "too_many_ids",
    "fails_at_first",
    "fails_late",
    "output_past_the_context",
    "budget_0",
    "sandbox_dies",
    "sandbox_dies_in_a_kid",
    "tool_raises",
    "malformed_call",
    "env_raises",
)
SCORED = {"none", "fails_at_first", "output_past_the_context", "budget_0", "tool_raises", "malformed_call"}
GROUPS, EACH = 125, 8


def fault_of(rollout_id: str) -> str:
    return random.Random(rollout_id).choice(FAULTS)


class Dying(FakeSandbox):
    """A sandbox that dies when told to, even by a branch."""

    async def python(
        self,
        code: str,
        *,
        timeout_s: float = 10.0,
        functions: Mapping[str, HostFunction] | None = None,
        fresh: bool = False,
        output_limit: int = 0,
    ) -> ExecResult:
        if code == "die":
            raise SandboxError("the sandbox died")
        return ExecResult(status="ok", exit_code=0, stdout=code, stderr="")


class Desk(ag.ToolEnv[ag.Task]):
    """An env with tools, sub-agents, forks, a small context and compaction at once."""

    sandbox_spec: ClassVar[Any] = ag.AnySandbox()
    limits = ag.Limits(turns=8, context_tokens=2400, turn_tokens=400, tokens=1200, retries=1)
    context = ag.Compact(at=0.7)

    @classmethod
    def tasks(cls, split: Split) -> list[ag.Task]:
        prompt = (Message(role="user", content="Go."),)
        return [ag.Task(id=f"t{n}", prompt=prompt) for n in range(GROUPS)]

    @ag.tool
    async def python(self, code: str) -> str:
        """Run code."""
        return (await self.sandbox.python(code)).text(limit=100_000) * (1000 if code == "flood" else 1)

    @ag.tool
    async def ask(self) -> str:
        """Ask a sub-agent."""
        async with self.fork("subagent", [Message(role="user", content="?")], tools=["python"], turns=2) as agent:
            return await agent.run()

    @ag.tool
    async def split(self) -> str:
        """Fork, with a branch of the sandbox."""
        async with self.fork(
            "fork", [Message(role="tool", content="on", name="split")], sandbox=True, turns=1
        ) as agent:
            return await agent.run()

    @ag.tool
    async def fail(self) -> str:
        """Raise."""
        raise RuntimeError("oops")

    async def step(self, action: Message) -> ag.StepResult:
        if action["content"] == "break":
            raise RuntimeError("the env broke")
        return await super().step(action)

    @ag.reward
    def length(self) -> float:
        return float(len(self.answer or ""))


SCRIPTS: dict[str, list[Reply]] = {
    "output_past_the_context": [call("python", code="1"), call("python", code="flood"), say("never")],
    "budget_0": [call("python", code="x" * 250)] * 9,
    "sandbox_dies": [call("python", code="1"), call("python", code="die")],
    "sandbox_dies_in_a_kid": [call("ask"), call("python", code="die")],
    "tool_raises": [call("fail"), say("done")],
    "malformed_call": [raw("<tool_call>\n{oops\n</tool_call>"), say("done")],
    "env_raises": [call("python", code="1"), say("break")],
}
USUAL: list[Reply] = [call("python", code="1"), call("ask"), say("kid"), call("split"), say("branch"), say("done")]


class Faulty(Scripted):
    """An engine that plays each rollout's script and its fault."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked: Counter[str] = Counter()
        self.given: Counter[str] = Counter()
        """Ids returned in full, by rollout; those of a first attempt that failed are subtracted."""

    def _next(self, token_ids: Sequence[int], session: str) -> Reply:
        rollout_id = session.rpartition("/")[0]
        self.replies = SCRIPTS.get(fault_of(rollout_id), USUAL)
        return super()._next(token_ids, session)

    async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
        rollout_id = given["session"].rpartition("/")[0]
        fault = fault_of(rollout_id)
        self.asked[rollout_id] += 1
        nth = self.asked[rollout_id]
        if (fault == "fails_at_first" and nth == 1) or (fault in ("engine_raises", "fails_late") and nth == 3):
            raise EngineError("a dead server")
        whole = await super().generate(token_ids, **given)
        if nth == 2 and fault in BROKEN:
            broken: Completion = BROKEN[fault](whole)
            return broken
        self.given[rollout_id] += len(whole.token_ids)
        return whole


def completion(whole: Completion, **changed: Any) -> Completion:
    usual: dict[str, Any] = {"token_ids": whole.token_ids, "logprobs": whole.logprobs, "finish_reason": "stop"}
    return Completion(**(usual | changed))


BROKEN: dict[str, Any] = {
    "no_logprobs": lambda whole: completion(whole, logprobs=np.zeros(0)),
    "nan_logprob": lambda whole: completion(whole, logprobs=np.full(len(whole.token_ids), np.nan)),
    "abort_in_mid_turn": lambda whole: completion(
        whole, token_ids=whole.token_ids[:3], logprobs=whole.logprobs[:3], finish_reason="abort"
    ),
    "too_many_ids": lambda whole: completion(whole, token_ids=np.ones(999), logprobs=np.zeros(999)),
}


def check(rollout: Rollout, engine: Faulty) -> None:
    for segment in rollout.segments:
        n = len(segment.token_ids)
        assert n == len(segment.sampled) == len(segment.logprobs) <= 2400
        assert int(segment.sampled.sum()) == sum(turn.stop - turn.start for turn in segment.turns)
        assert (segment.logprobs[segment.sampled] == -0.5).all()
        assert not segment.logprobs[~segment.sampled].any()
    fault = fault_of(rollout.rollout_id)
    assert (rollout.reward is not None) == (fault in SCORED), (fault, rollout.stop_reason, rollout.error)
    assert (rollout.stop_reason == "error") == (rollout.error is not None)
    assert rollout.sampled_tokens == engine.given[rollout.rollout_id] <= 1200
    assert rollout.metrics.get("retries", 0) == (fault == "fails_at_first")
    assert rollout.metrics["turns"] <= 8


async def test_a_thousand_rollouts_with_faults_lose_no_token_and_no_count(no_leaks: None) -> None:
    engine, sandboxes = Faulty(), FakeSandboxPool(Dying)
    seen: list[Rollout] = []
    groups: Groups = await run_groups(
        Desk, Desk.tasks("train"), engine, n=EACH, sandboxes=sandboxes, concurrency=64, on_rollout=seen.append
    )
    rollouts = groups.rollouts
    assert len(rollouts) == len(seen) == GROUPS * EACH == 1000
    assert {fault_of(r.rollout_id) for r in rollouts} == set(FAULTS)
    for rollout in rollouts:
        check(rollout, engine)
    numbers = groups.metrics()
    assert numbers["rollouts/started"] == numbers["rollouts/finished"] + numbers["rollouts/failed"] == 1000
    assert numbers["rollouts/finished"] == sum(fault_of(r.rollout_id) in SCORED for r in rollouts)
    assert sum(value for name, value in numbers.items() if name.startswith("stop/")) == 1.0
    assert (engine._played, engine._sessions, sandboxes.leased) == ({}, {}, [])
    assert len(sandboxes.made) == 1000 + sum(fault_of(r.rollout_id) == "fails_at_first" for r in rollouts)


async def test_a_thousand_faulty_rollouts_train_every_sampled_token_once() -> None:
    engine = Faulty()
    groups = await run_groups(Desk, Desk.tasks("train"), engine, n=EACH, sandboxes=FakeSandboxPool(Dying))
    for merged in (False, True):
        batch = build_samples(groups, merge=merged)
        assert batch.rollouts == 1000
        assert batch.rollouts_failed == sum(r.reward is None for r in groups.rollouts)
        with_signal = [g for g in groups if len({r.reward for r in g.scored}) > 1]
        assert batch.groups == GROUPS == len(with_signal) + batch.groups_without_signal
        assert batch.trained_tokens == sum(r.sampled_tokens for g in with_signal for r in g.scored)
        trained = {row.rollout_id for row in batch}
        assert not trained & {r.rollout_id for r in groups.rollouts if r.reward is None}
        assert sum(row.weight for row in batch) - len(trained) < 1e-6


async def test_branches_with_faults_do_not_change_their_rollouts_and_lose_no_token(no_leaks: None) -> None:
    tasks = Desk.tasks("train")[:30]
    plain = await run_groups(Desk, tasks, Faulty(), n=4, sandboxes=FakeSandboxPool(Dying))
    engine, sandboxes = Faulty(), FakeSandboxPool(Dying)
    groups = await run_groups(
        Desk, tasks, engine, n=4, sandboxes=sandboxes, branching=ag.BranchingConfig(per_state=2, every=2)
    )
    of_branches = Counter[str]()
    for rollout, without in zip(groups.rollouts, plain.rollouts, strict=True):
        own = [segment for segment in rollout.segments if segment.branch is None]
        assert [s.token_ids.tolist() for s in own] == [s.token_ids.tolist() for s in without.segments]
        assert (rollout.reward, rollout.stop_reason) == (without.reward, without.stop_reason)
        for segment in rollout.segments:
            assert len(segment.token_ids) == len(segment.sampled) == len(segment.logprobs) <= 2400
        sampled = sum(int(s.sampled.sum()) for s in rollout.segments if s.branch is not None)
        given = sum(count for name, count in engine.given.items() if name.startswith(f"{rollout.rollout_id}/"))
        assert sampled == given == rollout.metrics["branch_tokens"]
        for place, branch in enumerate(rollout.branches):
            name = f"{rollout.rollout_id}/{branch.turn}+{place % 2}"
            of_branches[fault_of(name)] += 1
            assert (branch.stop_reason == "error") == (branch.reward is None) == (branch.failure is not None)
            before = sum(t.stop - t.start for s in own for t in s.turns if t.number < branch.turn)
            assert before + branch.metrics["tokens"] <= 1200
    assert set(of_branches) == set(FAULTS)
    assert (engine._played, engine._sessions, sandboxes.leased) == ({}, {}, [])
    for merged in (False, True):
        batch = build_samples(groups, merge=merged, credit="branches")
        with_signal = {row.group_id for row in batch}
        scored = [r for r in groups.rollouts if r.reward is not None and r.group_id in with_signal]
        failed = {(r.rollout_id, place) for r in scored for place, b in enumerate(r.branches) if b.reward is None}
        assert batch.trained_tokens == sum(
            int(s.sampled.sum()) for r in scored for s in r.segments if (r.rollout_id, s.branch) not in failed
        )
        weights = Counter[str]()
        for row in batch:
            weights[row.rollout_id] += row.weight  # type: ignore[assignment]
        assert all(abs(weight - 1) < 1e-6 for weight in weights.values())
