"""Checks that an engine samples from the trained policy. Engine and trainer score the same ids before and after a sync.

These ids are the probe. The check compares the change of the engine's scores with the change of the trainer's scores.
A low-precision engine's rounding is nearly the same before and after a sync, so it cancels out in the change. A
missing update doesn't::

    change     d = trainer(new) - trainer(old)        f = engine(new) - engine(old)
    arrived    <f, d> / <d, d>                        1: all of it, 0: nothing, 0.5: about a half
    noise      s = sqrt(2) x root mean square of engine - trainer

Here, old is the last version that was verified to have arrived. The root mean square is that of version 0 or of old,
whichever is larger.

Suppose that the length of d (its Euclidean norm over the ids) is at least 20 s. Then a whole update can be
distinguished from no update and from a part of one, and `arrived` is known to within 0.05. For a probe of 256 ids, d
of this length has a root mean square of 1.3 s.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from agentgym.errors import EngineError
from agentgym.types.arrays import Floats

Doubles: TypeAlias = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

_POWER = 20.0
"""Smallest length (Euclidean norm) of an update that can be verified, as a multiple of s, which is the standard
deviation of the noise in the change of one id's score.
"""
_LEAST, _MOST = 0.75, 1.25
"""Range, including both bounds, of `arrived` in which an update counts as fully arrived. Both bounds are at least five
standard deviations from 1.
"""
_REST = 0.25
"""Allowed difference between the engine's and the trainer's change, as a fraction of the trainer's change, each as a
root mean square. The noise is allowed in addition.
"""
_NOISE = 4.0
"""Limit on the gap between engine and trainer after an update that is too small to verify, as a multiple of the noise
(`Scored.noise`) at version 0 or at the old version, whichever is larger. The gap is a root mean square. If it exceeds
the limit, the engine isn't using the trainer's policy.
"""
_ROUNDING = 1e-5
"""Lower bound, in nats, on the noise of one id: that of float32."""
_OTHER_MODEL = 0.2
"""Mean gap, in nats, between engine and trainer at version 0, above which the engine must have another model. No
rounding causes such a gap.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """Log-probabilities (nats) of the probe's ids under one policy, from the trainer and from the engine."""

    trainer: Floats
    engine: Floats

    @property
    def gap(self) -> Doubles:
        """The engine's log-probability minus the trainer's, for each id."""
        return _change(self.engine, self.trainer)

    @property
    def noise(self) -> float:
        """Root mean square of the gap, in nats, or the noise of float32 if that is larger."""
        return max(_rms(self.gap), _ROUNDING)


class Verdict(NamedTuple):
    """The outcome of a check: how far engine and trainer differ, and how much of the update arrived."""

    gap_max: float
    gap_mean: float
    """Largest and mean absolute gap between engine and trainer, in nats."""
    arrived: float
    """Fraction of the update that is visible in the engine's scores; NaN if the update is too small to verify."""

    @property
    def proven(self) -> bool:
        """Whether the update was large enough to verify that it arrived."""
        return bool(np.isfinite(self.arrived))


def refuse_other_model(start: Scored, *, tolerance: float, exact: bool) -> None:
    """Raise EngineError if engine and trainer differ before the first sync by more than rounding can explain.

    If `exact`, both compute in float32, and no id's gap may exceed `tolerance`. Otherwise, only the mean gap is
    limited.
    """
    gap = np.abs(start.gap)
    limit, worst = (tolerance, gap.max()) if exact else (max(tolerance, _OTHER_MODEL), gap.mean())
    if not worst <= limit:  # also true if it is NaN
        raise EngineError(
            f"sync: before the first sync the engine's log-probabilities are {_off(gap)} (allowed: {limit:g} "
            f"{'for any id' if exact else 'on average'}): its model is not the trainer's, or it has loaded an adapter"
        )


def judge(start: Scored, old: Scored, new: Scored, *, version: int, tolerance: float) -> Verdict:
    """Check that the scores after a sync are those of the new policy, and return the verdict.

    Args:
        start: Scores at version 0. If their gap is within `tolerance`, as with a float32 engine, all later gaps must
            be within it.
        old: Scores under the last policy that was verified to have arrived.
        new: Scores after the sync.
        version: The synced version, for messages.
        tolerance: Largest allowed gap, in nats, of an engine that computes in float32.

    Raises:
        EngineError: If the engine doesn't sample from the new policy.
    """
    gap = np.abs(new.gap)
    if not np.isfinite(gap).all():
        raise _refusal(version, gap, "which is not a finite number")
    exact = bool(np.abs(start.gap).max() <= tolerance)
    if exact and gap.max() > tolerance:
        raise _refusal(version, gap, f"with a tolerance of {tolerance:g}")
    noise = max(start.noise, old.noise)
    change, seen = _change(new.trainer, old.trainer), _change(new.engine, old.engine)
    length = float(np.linalg.norm(change))
    if length < _POWER * np.sqrt(2) * noise:
        if _rms(gap) > _NOISE * noise:
            raise _refusal(version, gap, f"compared to {noise:.2g} before, and the update is too small to explain that")
        return Verdict(float(gap.max()), float(gap.mean()), float("nan"))
    arrived = float(seen @ change) / length**2
    missing = _rms(seen - change)
    allowed = float(np.hypot(_REST * _rms(change), 2 * np.sqrt(2) * noise))
    if not _LEAST <= arrived <= _MOST or missing > allowed:
        raise _refusal(version, gap, f"and show {arrived:.2f} of the update (1 is all of it, 0 is the old policy)")
    return Verdict(float(gap.max()), float(gap.mean()), arrived)


def _refusal(version: int, gap: Doubles, why: str) -> EngineError:
    return EngineError(
        f"sync: after loading version {version} the engine's log-probabilities are {_off(gap)}, {why}: the engine does "
        "not sample from the policy that is trained"
    )


def _off(gap: Doubles) -> str:
    return f"up to {gap.max():.2g} nats off the trainer's, {gap.mean():.2g} on average"


def _change(new: Floats, old: Floats) -> Doubles:
    return np.asarray(new, np.float64) - np.asarray(old, np.float64)


def _rms(values: Doubles) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
