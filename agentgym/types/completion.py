"""An engine's answer: what was sampled, with which probabilities, and under which policy."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from agentgym.config_fields import NotNegative, PartBelow1, Positive, Share, Stops, config
from agentgym.types.arrays import Floats, Ints, require_ids, require_rising, vector

FinishReason: TypeAlias = Literal["stop", "stop_text", "length", "abort"]
"""The end of a turn: its stop token, which is the last id; a text of `Sampling.stop`; a limit; or an abort."""
_REASONS = get_args(FinishReason)


class Version(NamedTuple):
    """The policy version under which the tokens from `start` on were sampled."""

    start: int
    version: int


_FIRST = (Version(0, 0),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, init=False)
class Completion:
    """An engine's answer: sampled ids with one finite log-probability each, a stop token last; empty only on abort.

    An id is 0 to 2^31 - 1. Raises ValueError that names the field which is not so.
    """

    token_ids: Ints
    logprobs: Floats
    finish_reason: FinishReason
    versions: tuple[Version, ...] = _FIRST

    def __init__(
        self, *, token_ids: ArrayLike, logprobs: ArrayLike, finish_reason: FinishReason, versions: Any = _FIRST
    ) -> None:
        ids, scores = vector("token_ids", token_ids, np.int64), vector("logprobs", logprobs, np.float32)
        if len(ids) != len(scores):
            raise ValueError(f"logprobs: {len(scores)} for {len(ids)} token_ids; without any, answer with an abort")
        # A sum is finite only if all its terms are; that of float32 in float64 has no other way to be infinite.
        if not math.isfinite(np.add.reduce(scores, dtype=np.float64)):
            raise ValueError("logprobs: every one must be finite")
        if not len(ids) and finish_reason != "abort":
            raise ValueError("token_ids: empty without an abort")
        if finish_reason not in _REASONS:
            raise ValueError(f"finish_reason: {finish_reason!r} is none of {', '.join(_REASONS)}")
        require_ids("token_ids", ids)
        if type(versions) is not tuple or len(versions) != 1 or type(versions[0]) is not Version or versions[0].start:
            versions = _spans(versions)
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "logprobs", scores)
        object.__setattr__(self, "finish_reason", finish_reason)
        object.__setattr__(self, "versions", versions)

    def __repr__(self) -> str:
        versions = ", ".join(str(v.version) for v in self.versions)
        return f"<Completion: {len(self.token_ids)} ids, {self.finish_reason}, policy version {versions}>"


def _spans(versions: Any) -> tuple[Version, ...]:
    """Return rows of a start and a version, such as a list of pairs, as Versions whose starts rise from 0."""
    try:
        spans = tuple([Version(*span) for span in versions])
    except TypeError:
        raise ValueError(f"versions: must be rows of a start and a version, got {versions!r}") from None
    require_rising("versions", [span.start for span in spans])
    return spans


@config(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of an engine's sampling; log-probabilities are those of the whole distribution at this temperature.

    `top_p`, `top_k` and `min_p` leave a part of that distribution to draw from, each judged on the whole of it, and
    change no log-probability: they are for evaluation, where nothing is trained on what was drawn.
    """

    temperature: NotNegative = 1.0
    """The temperature; 0 takes the likeliest token, with the log-probabilities of temperature 1."""
    max_tokens: Positive | None = None
    """The most ids of one turn; None leaves this to the env's limits."""
    top_p: Share = 1.0
    """Draw from the fewest likeliest ids that have this probability together; 1 is all of them."""
    top_k: Positive | None = None
    """Draw from this many likeliest ids; None is all of them."""
    min_p: PartBelow1 = 0.0
    """Draw from the ids that are at least this many times as likely as the likeliest; 0 is all of them."""
    stop: Stops = ()
    """Texts that end a turn if it has sampled one of them: at most 16, of 256 characters. The turn keeps the text."""

    @property
    def whole(self) -> bool:
        """Whether ids are drawn from the whole distribution, as training needs it."""
        return self.top_p == 1 and self.top_k is None and self.min_p == 0
