"""The result of one generation by an engine, and the settings of its sampling."""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike

from agentgym.config_fields import NotNegative, PartBelow1, Positive, Share, Stops, config
from agentgym.types.arrays import Floats, Ints, require_ids, require_rising, vector

FinishReason: TypeAlias = Literal["stop", "stop_text", "length", "abort"]
"""Why a turn ended: its stop token, which is the last id; a text from `Sampling.stop`; a limit; or an abort."""
_REASONS = get_args(FinishReason)


class Version(NamedTuple):
    """The policy version that sampled the tokens from index `start` on."""

    start: int
    version: int


_FIRST = (Version(0, 0),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, init=False)
class Completion:
    """An engine's response: sampled ids with one finite log-probability each.

    Ids are integers from 0 to 2^31 - 1. A stop token is the last id. Only an aborted turn may have no ids.

    Raises:
        ValueError: If a field is invalid; the message names the field.
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
            raise ValueError(
                f"logprobs: got {len(scores)} for {len(ids)} token_ids; without log-probabilities, return an abort "
                "without ids"
            )
        # A sum is finite only if all its terms are; summing float32 values in float64 can't overflow.
        if not math.isfinite(np.add.reduce(scores, dtype=np.float64)):
            raise ValueError("logprobs: must all be finite")
        if not len(ids) and finish_reason != "abort":
            raise ValueError("token_ids: empty, but the finish_reason is not an abort")
        if finish_reason not in _REASONS:
            raise ValueError(f"finish_reason: must be one of {', '.join(_REASONS)}, got {finish_reason!r}")
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
    """Return pairs of a start and a version as Versions; raise ValueError unless the starts increase from 0."""
    try:
        spans = tuple([Version(*span) for span in versions])
    except TypeError:
        raise ValueError(f"versions: must be pairs of a start and a version, got {versions!r}") from None
    require_rising("versions", [span.start for span in spans])
    return spans


@config(frozen=True, slots=True, kw_only=True)
class Sampling:
    """An engine's sampling settings; log-probabilities are those of the full distribution at this temperature.

    `top_p`, `top_k` and `min_p` each restrict sampling to part of the full distribution and don't change
    log-probabilities. They are meant for evaluation, where no samples are used for training.
    """

    temperature: NotNegative = 1.0
    """The temperature; 0 selects the most likely token, with the log-probabilities of temperature 1."""
    max_tokens: Positive | None = None
    """Maximum number of ids per turn; None leaves this to the env's limits."""
    top_p: Share = 1.0
    """Sample from the smallest set of most likely ids whose total probability reaches this value; 1 uses all ids."""
    top_k: Positive | None = None
    """Sample from this many of the most likely ids; None uses all ids."""
    min_p: PartBelow1 = 0.0
    """Sample from ids whose probability is at least this fraction of the most likely id's; 0 uses all ids."""
    stop: Stops = ()
    """Texts that end a turn once it contains one of them, at most 16 of up to 256 characters. The turn keeps the
    text.
    """

    @property
    def whole(self) -> bool:
        """Whether ids are sampled from the full distribution, as training requires."""
        return self.top_p == 1 and self.top_k is None and self.min_p == 0
