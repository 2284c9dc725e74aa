"""The proof that an engine samples from the policy that is trained: both score one probe, before and after a sync.

What is compared are changes. The rounding of an engine of lower precision is nearly the same before and after a sync,
so it drops out of the change, while an update that was lost does not::

    change     d = trainer(new) - trainer(old)        f = engine(new) - engine(old)
    arrived    <f, d> / <d, d>                        1: all of it, 0: nothing, 0.5: about a half
    noise      s = sqrt(2) x root mean square of engine - trainer, at version 0 or at the old version if it is larger

An update can be told from none, or from a part of it, where the length of d is at least 20 s: `arrived` is then known
to 0.05. Over a probe of 256 ids that is an update of 1.3 s in the root mean square.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from agentgym.errors import EngineError
from agentgym.types.arrays import Floats

Doubles: TypeAlias = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]

_POWER = 20.0
"""Length of an update, in standard deviations of one id's noise, from which on it can be told."""
_LEAST, _MOST = 0.75, 1.25
"""The share of an update that an engine shows to which it arrived; five standard deviations from 1 at the least."""
_REST = 0.25
"""Largest part of an update, as a length, that may be missing from the engine's change beside the noise."""
_NOISE = 4.0
"""Gap in an untellable update, against that of version 0, above which the engine samples from something else."""
_ROUNDING = 1e-5
"""Least noise of an id in nats: that of float32."""
_OTHER_MODEL = 0.2
"""Mean gap in nats at version 0 above which the engine's model is not the trainer's, however it is rounded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """Holds the log-probabilities (nats) of the probe's ids by trainer and engine, under one policy."""

    trainer: Floats
    engine: Floats

    @property
    def gap(self) -> Doubles:
        """Engine minus trainer, for each id."""
        return _change(self.engine, self.trainer)

    @property
    def noise(self) -> float:
        """Root mean square of the gap, in nats; at least that of float32."""
        return max(_rms(self.gap), _ROUNDING)


class Verdict(NamedTuple):
    """What a sync's scores say."""

    gap_max: float
    gap_mean: float
    """Largest and mean size of the gap between engine and trainer, in nats."""
    arrived: float
    """Share of the update that the engine shows; nan where the update is too small to tell."""

    @property
    def proven(self) -> bool:
        """Whether the update was large enough to tell that it arrived."""
        return bool(np.isfinite(self.arrived))


def refuse_other_model(start: Scored, *, tolerance: float, exact: bool) -> None:
    """Raise EngineError where engine and trainer differ before the first sync by more than rounding explains.

    With `exact` both compute in float32, and no gap may be above `tolerance`.
    """
    gap = np.abs(start.gap)
    limit, worst = (tolerance, gap.max()) if exact else (max(tolerance, _OTHER_MODEL), gap.mean())
    if not worst <= limit:  # also where it is nan
        raise EngineError(
            f"sync: before the first adapter the engine's log-probabilities are {_off(gap)} (at most {limit:g} "
            f"{'for any id' if exact else 'in the mean'}): its model is not the trainer's, or it was given an adapter"
        )


def judge(start: Scored, old: Scored, new: Scored, *, version: int, tolerance: float) -> Verdict:
    """Return what the scores of a sync say; EngineError where the engine does not sample from the new policy.

    `start` was scored at version 0, `old` under the policy that was last proven to have arrived. Where the gap at
    version 0 is within `tolerance`, as in float32, it must stay there.
    """
    gap = np.abs(new.gap)
    if not np.isfinite(gap).all():
        raise _refusal(version, gap, "which is no number")
    exact = bool(np.abs(start.gap).max() <= tolerance)
    if exact and gap.max() > tolerance:
        raise _refusal(version, gap, f"with a tolerance of {tolerance:g}")
    noise = max(start.noise, old.noise)
    change, seen = _change(new.trainer, old.trainer), _change(new.engine, old.engine)
    length = float(np.linalg.norm(change))
    if length < _POWER * np.sqrt(2) * noise:
        if _rms(gap) > _NOISE * noise:
            raise _refusal(version, gap, f"and were {noise:.2g} off before, while the update is smaller")
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
    return f"up to {gap.max():.2g} nats off the trainer's, {gap.mean():.2g} in the mean"


def _change(new: Floats, old: Floats) -> Doubles:
    return np.asarray(new, np.float64) - np.asarray(old, np.float64)


def _rms(values: Doubles) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
