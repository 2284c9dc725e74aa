"""An env, an engine and a scorer that wait and compute little; other processes import them from here by name."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import agentgym as ag
from agentgym.chat.tokenizer import chat_tokenizer
from agentgym.train.kept_logprobs import ScoredSample
from agentgym.types.completion import Completion, Sampling, Version
from agentgym.types.sample import Sample
from benchmarks.driver.dialogs import added
from benchmarks.driver.instant import Instant, replies
from benchmarks.harness import load_workloads

DIALOGS = 16
"""Number of dialogs; tasks use them in turn."""
TASKS = 1_000_000
WORDS = 48
"""Words in each of a dialog's 8 turns: about 2,000 sampled tokens per rollout with the tokenizer of "tiny"."""


class Waits(ag.ToolEnv[ag.Task]):
    """An env with a tool that sleeps as long as one of `waits_s`, drawn by task and arguments.

    Half of the rollouts succeed.
    """

    waits_s = ag.Parameter("0.25", doc="seconds of a tool call to draw from, with commas between them")
    limits = ag.Limits(seconds=3600, context_tokens=1 << 15)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[ag.Task]:
        asked = "Add the numbers, two at a time, and answer with what they come to."
        return ag.Procedural(lambda number: ag.Task(id=str(number), prompt=asked), range(TASKS))

    async def setup(self) -> None:
        """Start with a sum of 0."""
        self.total = 0

    @ag.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.total += a + b
        drawn = random.Random(f"{self.task.id} {a} {b}")
        await asyncio.sleep(float(drawn.choice(self.waits_s.split(","))))
        return added(a, b)

    @ag.reward
    def solved(self) -> float:
        """Whether the sum of all numbers is even, and the last message is the dialog's answer."""
        return float(self.total % 2 == 0 and (self.answer or "").endswith("answer 42"))


class Ready(Instant):
    """An engine that has every response ready; rollouts of a task run different dialogs."""

    model_name = "ready"
    dtype = "float32"

    def __init__(self, model: Any) -> None:
        dialogs = {str(number): replies(load_workloads(None), number, words=WORDS) for number in range(DIALOGS)}
        super().__init__(chat_tokenizer("tiny"), dialogs)

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        turn = self.played.get(session, 0)
        self.played[session] = turn + 1
        task, number, *_ = session.split("/")
        dialog = str((int(task) + int(number)) % DIALOGS)
        return Completion(
            token_ids=self.ids[dialog][turn],
            logprobs=self.logprobs[dialog][turn],
            finish_reason="stop",
            versions=(Version(0, self.version),),
        )


class Scorer:
    """A training process that trains nothing: it returns the samples' own log-probabilities."""

    def step_and_logprobs(self, samples: Sequence[Sample]) -> tuple[dict[str, float], dict[Any, Any]]:
        """Return what a trainer's step returns."""
        scored = {(s.rollout_id, s.segment, s.step): ScoredSample(s.logprobs[s.loss_mask], False) for s in samples}
        return {"train/loss": 0.0}, scored
