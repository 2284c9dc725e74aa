"""The gate in front of an engine holds turns while it is shut, and counts the outcome of each."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentgym.engines.messages import MessageCompletion, Usage
from agentgym.engines.scripted import Scripted, say
from agentgym.errors import EngineError
from agentgym.machine.time_limits import TimeLimit
from agentgym.scheduling.accounting import LifecycleCounts
from agentgym.scheduling.gate import EngineGate, MessageGate, RolloutUsage, current_usage, gate_of
from agentgym.types.completion import Completion, Sampling
from agentgym.types.messages import Message
from tests.support.virtual_time import run_in_virtual_time

FAILS, BREAKS_OFF = 1, 2
"""The seeds of requests that fail."""


class Slow(Scripted):
    """An engine that answers after two seconds."""

    def __init__(self) -> None:
        super().__init__([say("1")] * 9, model_name="slow", context_tokens=99)
        self.released = list[str]()

    async def generate(self, token_ids: Sequence[int], *, seed: int, **given: Any) -> Completion:
        await asyncio.sleep(2.0)
        if seed == FAILS:
            raise EngineError("gone")
        done = await super().generate(token_ids, seed=seed, **given)
        return replace(done, finish_reason="abort") if seed == BREAKS_OFF else done

    async def release(self, session: str) -> None:
        self.released.append(session)


class Talks(Slow):
    """The same, for requests with messages."""

    async def generate_message(self, messages: Any, tools: Any, **given: Any) -> MessageCompletion:
        tokens = len((await self.generate([], **given)).token_ids)
        return MessageCompletion(message=say("1"), finish_reason="stop", usage=Usage(completion_tokens=tokens))


both = pytest.mark.parametrize("kind", [Slow, Talks])


def opened(engine: Slow) -> tuple[EngineGate, RolloutUsage]:
    """Return an open gate and the usage of the rollout that sends requests from here on."""
    gate = gate_of(engine)
    gate.open()
    current_usage.set(usage := RolloutUsage())
    return gate, usage


async def ask(gate: EngineGate, seed: int = 0) -> int:
    """Request a turn and return its number of tokens."""
    how: dict[str, Any] = {"session": "t/0/0", "max_tokens": 99, "sampling": Sampling(), "seed": seed}
    if isinstance(gate, MessageGate):
        return (await gate.generate_message([Message(role="user", content="?")], [], **how)).usage.completion_tokens
    return len((await gate.generate([1], **how)).token_ids)


@both
def test_each_request_is_counted_by_its_outcome_and_as_carried_while_in_flight(kind: type[Slow]) -> None:
    async def play() -> None:
        gate, usage = opened(kind())
        tokens = await ask(gate)
        for _ in range(2):
            with pytest.raises(EngineError, match="gone"):
                await ask(gate, FAILS)
        goes_on, lost = asyncio.create_task(ask(gate)), asyncio.create_task(ask(gate))
        await asyncio.sleep(1.0)
        lost.cancel()
        await asyncio.wait([lost])
        assert (usage.running, usage.tokens) == (1, tokens)
        assert gate.counts_if_stopped() == {"started": 5, "finished": 1, "failed": 2, "dropped": 2}
        assert gate.counts() == LifecycleCounts(started=5, finished=1, failed=2, dropped=1, carried=1)
        assert gate.counts_if_stopped() == {"resumed": 1, "dropped": 1}
        tokens += await goes_on
        assert gate.counts() == LifecycleCounts(resumed=1, finished=1)
        assert (usage.running, usage.tokens) == (0, tokens)

    run_in_virtual_time(play())


def test_an_answer_that_the_engine_aborted_counts_as_failed() -> None:
    async def play() -> None:
        gate, _ = opened(Slow())
        await ask(gate, BREAKS_OFF)
        assert gate.counts() == LifecycleCounts(started=1, failed=1)

    run_in_virtual_time(play())


def test_a_gate_continues_from_the_counts_of_another() -> None:
    assert gate_of(Slow(), {"started": 3, "finished": 1}).counts() == LifecycleCounts(started=3, finished=1, carried=2)


@both
def test_requests_of_a_dropped_rollout_are_counted_once_and_it_sends_no_more(kind: type[Slow]) -> None:
    async def play() -> None:
        gate, usage = opened(kind())
        asking = [asyncio.create_task(ask(gate)) for _ in range(2)]
        await asyncio.sleep(1.0)
        gate.drop(usage)
        assert usage.stopped == 1.0
        assert gate.counts() == LifecycleCounts(started=2, dropped=2)
        await asyncio.gather(*asking)
        with pytest.raises(EngineError, match="the rollout was dropped"):
            await ask(gate)
        assert gate.counts() == LifecycleCounts()

    run_in_virtual_time(play())


@both
def test_time_at_the_shut_gate_counts_toward_no_running_time_and_no_limit(kind: type[Slow]) -> None:
    async def play() -> None:
        gate, usage = opened(kind())
        await asyncio.sleep(5.0)
        assert usage.seconds == 0
        usage.began = asyncio.get_running_loop().time()
        gate.shut()
        asking = asyncio.create_task(TimeLimit(3.0).bound(ask(gate)))
        await asyncio.sleep(100.0)
        gate.open()
        gate.shut()  # before the turn has passed the gate
        await asyncio.sleep(50.0)
        assert gate.counts() == LifecycleCounts()
        gate.open()
        await asking
        assert (usage.held.seconds, usage.seconds) == (150.0, 2.0)
        usage.stopped = asyncio.get_running_loop().time()
        await asyncio.sleep(10.0)
        assert usage.seconds == 2.0

    run_in_virtual_time(play())


@both
def test_a_rollout_that_is_dropped_at_the_shut_gate_never_sends_a_request(kind: type[Slow]) -> None:
    async def play() -> None:
        gate, usage = opened(kind())
        gate.shut()
        asking = asyncio.create_task(ask(gate))
        await asyncio.sleep(1.0)
        gate.drop(usage)
        gate.open()
        with pytest.raises(EngineError, match="the rollout was dropped"):
            await asking
        assert gate.counts() == LifecycleCounts()

    run_in_virtual_time(play())


@both
def test_a_rollouts_version_is_that_of_the_policy_at_its_first_request(kind: type[Slow]) -> None:
    async def play() -> None:
        gate, usage = opened(kind())
        for version in (3, 4):
            await gate.load_adapter(None, version=version)
            await ask(gate)
        assert (gate.version, usage.oldest) == (4, 3)

    run_in_virtual_time(play())


async def test_other_attributes_are_the_engines_own() -> None:
    engine = Slow()
    gate = gate_of(engine)
    assert gate.tokenizer is engine.tokenizer
    assert (gate.context_tokens, gate.model_name, gate.version) == (99, "slow", 0)
    await gate.release("t/0/0")
    assert engine.released == ["t/0/0"]
    scored = await gate.score([1, 2, 3], sampling=Sampling())
    assert scored.tolist() == (await engine.score([1, 2, 3], sampling=Sampling())).tolist()
