"""An engine whose ids no tokenizer would produce, a rollout's API on a local port, and checks of both."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import agentgym as ag
from agentgym.agent_api.api import AgentApi
from agentgym.agent_api.http_connection import HttpConnection
from agentgym.agent_api.requests import AgentRequest
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import EngineError
from agentgym.rollouts.prompted import PromptedPolicy
from agentgym.rollouts.rollout_state import RolloutState
from agentgym.samples import build_samples
from agentgym.types.completion import Completion, Sampling, Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout

KEY = "key-of-the-rollout"
LOOK = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
}


class Drawing(Scripted):
    """Draws words and tool calls by the seed; half of its ids are ones that the tokenizer would encode differently.

    It records each prompt with the ids drawn for it, and waits for `gate` before each response.
    """

    def __init__(self, *, calls: bool = True, context_tokens: int = 1 << 20) -> None:
        super().__init__([], context_tokens=context_tokens)
        self.calls = calls
        self.drawn: list[tuple[list[int], list[int]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        """Set when a pending request is cancelled."""
        self.breaks = False

    def reply(self, draw: random.Random) -> Message:
        """Return a randomly drawn reply."""
        words = " ".join(draw.choice(["ja", "nein", "vielleicht", "ä", "🙂"]) for _ in range(draw.randint(1, 6)))
        return call("look", at=words) if self.calls and draw.random() < 0.5 else say(words)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        prompt = list(token_ids)
        self.asked.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        if self.breaks:
            raise EngineError("the engine broke")
        draw = random.Random(seed)
        text = self._write(self.reply(draw))
        body = [i if draw.random() < 0.5 else i + 512 for i in self.tokenizer.encode(text)]
        ids = [*body, 257][:max_tokens]
        self.drawn.append((prompt, ids))
        return Completion(
            token_ids=np.array(ids),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            finish_reason="stop" if len(ids) == len(body) + 1 else "length",
            versions=(Version(0, 3),),
        )


@dataclass
class Played:
    """A rollout without an env, whose requests the test makes itself."""

    engine: Any
    limits: ag.Limits = field(default_factory=lambda: ag.Limits(turns=1000, context_tokens=1 << 16))
    rollout_id: str = "t/0"

    def __post_init__(self) -> None:
        self.state = RolloutState(
            name="T",
            rollout_id=self.rollout_id,
            engine=self.engine,
            engines={},
            sampling=Sampling(),
            seed=int.from_bytes(self.rollout_id.encode(), "big"),
            limits=self.limits,
            context=None,
        )
        self.policy = PromptedPolicy(self.state)

    async def say(self, *messages: Message, **asked: Any) -> Message:
        """Send these messages and return the reply."""
        return (await self.policy.answer(request(*messages, **asked))).message

    def rollout(self, reward: float = 1.0) -> Rollout:
        return Rollout(
            rollout_id=self.rollout_id,
            group_id="t",
            segments=tuple(segment.close() for segment in self.state.segments),
            reward=reward,
            stop_reason="done",
        )

    @property
    def shape(self) -> list[tuple[str, int | None, int]]:
        """The kind, parent and number of turns of each segment."""
        return [(segment.kind, segment.parent, len(segment.turns)) for segment in self.rollout().segments]


def request(*messages: Message, **asked: Any) -> AgentRequest:
    return AgentRequest(messages=list(messages), model="m", **asked)


@asynccontextmanager
async def serving(played: Played) -> AsyncIterator[str]:
    """Serve the rollout's API on a local port.

    Yields:
        The base URL.
    """
    api = AgentApi(played.policy, KEY, "T")
    connections: list[HttpConnection] = []

    def connection() -> HttpConnection:
        connections.append(HttpConnection(api.handle))
        return connections[-1]

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for made in connections:
            await made.close()


def check_exact(engine: Drawing, rollouts: Sequence[Rollout]) -> int:
    """Check that each turn has the prompt and ids of one draw, and that each draw is trained exactly once.

    Returns:
        The number of trained tokens.
    """
    turns = [(segment, turn) for rollout in rollouts for segment in rollout.segments for turn in segment.turns]
    held = [(s.token_ids[: t.start].tolist(), s.token_ids[t.start : t.stop].tolist()) for s, t in turns]
    assert sorted(held) == sorted(engine.drawn)
    for segment, turn in turns:
        assert segment.logprobs[turn.start : turn.stop].tolist() == [-1.0 - i for i in range(turn.stop - turn.start)]
    other = Rollout(rollout_id="other", group_id="t", segments=(), reward=0.0, stop_reason="done")
    batch = build_samples([Group(group_id="t", rollouts=(*rollouts, other))])
    assert batch.trained_tokens == sum(len(ids) for _, ids in engine.drawn)
    return batch.trained_tokens
