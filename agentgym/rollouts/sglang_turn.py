"""One turn on its way: the requests it takes, and what they have sampled so far."""

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from agentgym.rollouts.sglang_prompt import Prompt
from agentgym.rollouts.sglang_server import Server
from agentgym.types import Completion, Sampling, Version


@dataclass(slots=True, eq=False)
class Piece:
    """One request in flight: a turn, or what is left of it."""

    rid: str
    server: Server
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False, kw_only=True)
class Turn:
    """One call of `generate`: a prompt, what was sampled behind it, and under which versions.

    ::

        ids       a a a a | b b b e        two requests: the weights changed after four ids
        versions  (0, 6)  | (4, 7)
    """

    prompt: Prompt
    session: str
    max_tokens: int
    sampling: Sampling
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    piece: Piece | None = None
    ending: Literal["keep", "drop"] | None = None
    """What an abort asked for."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set together with `ending`, for a turn that waits."""

    def end(self, how: Literal["keep", "drop"]) -> None:
        """Ask for nothing more; what was sampled is kept or dropped."""
        self.ending = how
        self.ended.set()

    @property
    def context(self) -> Prompt:
        """What the next request starts from."""
        return self.prompt.then(self.ids)

    @property
    def room(self) -> int:
        """How many more ids it may sample."""
        return self.max_tokens - len(self.ids)

    def take(self, piece: Completion) -> None:
        """Append what a request sampled; a version that goes on is not named twice."""
        for start, version in piece.versions if len(piece.token_ids) else ():
            if not self.versions or self.versions[-1].version != version:
                self.versions.append(Version(start + len(self.ids), version))
        self.ids += piece.token_ids.tolist()
        self.logprobs += piece.logprobs.tolist()

    def completion(self, finish_reason: Literal["stop", "length", "abort"], version: int) -> Completion:
        """All that was sampled, or nothing where it is to be dropped; `version` is that of an empty one."""
        if self.ending == "drop" or not self.ids:
            return empty(version)
        return Completion(
            token_ids=np.array(self.ids, np.int64),
            logprobs=np.array(self.logprobs, np.float32),
            finish_reason=finish_reason,
            versions=tuple(self.versions),
        )


def empty(version: int) -> Completion:
    """An abort before anything was sampled."""
    return Completion(
        token_ids=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        finish_reason="abort",
        versions=(Version(0, version),),
    )
