"""Signs that a run gets worse, each with its likely cause and a value to try.

All thresholds are here. A sign is read from means over `WINDOW` steps, and counts once it has stood for `HOLD` steps in
a row, so that the noise of single batches gives none.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""The metrics of the steps of a run, in order."""

WINDOW = 5
"""Number of steps in each mean."""
HOLD = 3
"""Number of consecutive steps for which a sign must stand."""
FALL = 0.4
"""Minimum fall of the reward, in standard deviations of the rewards in the best window."""
NOISE = 4.0
"""Minimum fall of the reward, in standard errors of the difference between two windows. The best of many windows
without a trend is rarely above the last one by more.
"""
COLLAPSED = 0.2
"""The entropy has collapsed below this share of that of the first window, unless the reward rose."""
GREW = 2.0
"""The entropy has grown above this multiple of that of the first window, unless the reward rose."""
SOLVED = 0.5
"""If at least this share of the tasks is solved by all of their rollouts, a low entropy is no sign."""
RISE, LEAST_MISMATCH = 3.0, 0.01
"""The mismatch has grown above `RISE` times that of the first window, and above `LEAST_MISMATCH` nats."""
CUT = 0.3
"""Minimum share of turns that a token limit cut off."""
FEW_CUT = 0.1
"""If a smaller share of the turns was cut off in the first window, the policy has begun to write longer turns.
Otherwise, the limit is too low.
"""
SLOWER = 5.0
"""The learning rate to try is the run's, divided by this."""


def signs(rows: Rows, hold: int = HOLD, resumed: int = 0) -> dict[str, str]:
    """Return a sentence for each sign that stands now, by the sign's name: what changed, why, and what to try.

    Args:
        rows: The metrics of all steps so far.
        hold: Number of consecutive steps for which a sign must have stood.
        resumed: Number of steps before the run was resumed, which may have had another learning rate.
    """
    found = {
        "reward": (fell, _reward),
        "entropy": (lost_entropy, _entropy),
        "noise": (gained_entropy, _noise),
        "mismatch": (drifted, _mismatch),
        "cut": (is_cut, _cut),
    }
    said, lower = {}, slower(rows, resumed)
    for name, (stands, sentence) in found.items():
        if all(stands(rows[: max(0, len(rows) - back)]) for back in range(hold)):
            said[name] = sentence(rows, lower)
    return said


def collapsed(rows: Rows) -> bool:
    """Return whether the policy has got worse in the last window: its reward fell, or its entropy was lost."""
    return fell(rows) or lost_entropy(rows)


def fell(rows: Rows) -> bool:
    """Return whether the reward of the last window is clearly below that of the best window before it.

    It is False for a run with a teacher or a curriculum, whose reward may fall for other reasons.
    """
    if rows and any(name == "teacher/divergence" or name.startswith("curriculum/") for name in rows[-1]):
        return False
    found = _best_and_last(rows)
    return found is not None and found[0] - found[1] > _margin(rows)


def lost_entropy(rows: Rows) -> bool:
    """Return whether the entropy has collapsed although the reward did not rise."""
    first, last = _ends(rows, "train/entropy")
    solved = _ends(rows, "groups/solved_by_all")[1] or 0.0
    return first is not None and last <= COLLAPSED * first > 0 and solved < SOLVED and not _rose(rows)


def gained_entropy(rows: Rows) -> bool:
    """Return whether the entropy has grown although the reward did not rise."""
    first, last = _ends(rows, "train/entropy")
    return first is not None and last >= GREW * first > 0 and not _rose(rows)


def drifted(rows: Rows) -> bool:
    """Return whether the mismatch between the engine's and the trainer's log-probabilities has grown."""
    first, last = _ends(rows, "mismatch/mean")
    return first is not None and last > max(RISE * first, LEAST_MISMATCH)


def is_cut(rows: Rows) -> bool:
    """Return whether many turns of the last window were cut off by a token limit."""
    share = _cut_shares(rows)[1]
    return share is not None and share >= CUT


def slower(rows: Rows, resumed: int = 0) -> str:
    """Return the learning rate to try, as the end of a sentence; "" if no step has one.

    The steps before the run was resumed, `resumed` of them, are left out, because they may have had another rate.
    """
    rates = [rate for row in rows[resumed:] if (rate := row.get("train/lr"))]
    return f" (--train.lr {max(rates) / SLOWER:.0e})".replace("e-0", "e-") if rates else ""


def _reward(rows: Rows, lower: str) -> str:
    found = _best_and_last(rows)
    assert found is not None
    best, last = found
    first, now = _ends(rows, "train/entropy")
    entropy = "" if first is None else f", and the entropy went from {first:.2g} to {now:.2g} nats"
    return (
        f"The reward fell: {best:.2f} in the best {WINDOW} steps, {last:.2f} in the last {WINDOW}{entropy}. The "
        f"likely cause is the learning rate; use a lower train.lr{lower}, from the start or from the best "
        "checkpoint."
    )


def _entropy(rows: Rows, lower: str) -> str:
    first, last = _ends(rows, "train/entropy")
    return (
        f"The policy's entropy collapsed from {first:.2g} to {last:.2g} nats, and the reward did not rise: it samples "
        f"almost the same text for each task. The likely cause is the learning rate; use a lower "
        f"train.lr{lower}."
    )


def _noise(rows: Rows, lower: str) -> str:
    first, last = _ends(rows, "train/entropy")
    return (
        f"The policy's entropy grew from {first:.2g} to {last:.2g} nats, and the reward did not rise. The likely cause "
        f"is the learning rate; use a lower train.lr{lower}, and a train.temperature of 1 if it is higher."
    )


def _mismatch(rows: Rows, lower: str) -> str:
    first, last = _ends(rows, "mismatch/mean")
    return (
        f"The engine's and the trainer's log-probabilities drift apart: {last:.2g} nats per token in the last {WINDOW} "
        f"steps, {first:.2g} in the first. Compute both in the same data type (engine.dtype, train.dtype); use a lower "
        f"train.lr{lower} or max_staleness, or set train.importance_sampling."
    )


def _cut(rows: Rows, lower: str) -> str:
    before, share = _cut_shares(rows)
    assert share is not None
    said = f"{share:.0%} of the turns in the last {WINDOW} steps were cut off by a token limit"
    longest = _values(rows[-WINDOW:], "length/turn_max")
    many = f" (--max-turn-tokens {2 * max(longest):.0f})" if longest else ""
    limit = f"raise max_turn_tokens{many}, the env's limits.turn_tokens, or the context_tokens of env and engine"
    if before is not None and before < FEW_CUT:
        return f"{said}, and {before:.0%} in the first: the policy writes longer turns than it did; use a lower " + (
            f"train.lr{lower}, or, if the longer turns earn more, {limit}."
        )
    return f"{said}; {limit}."


def _best_and_last(rows: Rows) -> tuple[float, float] | None:
    """Return the mean reward of the best window that ends before the last one, and of the last window."""
    rewards = _values(rows, "reward")
    if len(rewards) < 2 * WINDOW:
        return None
    windows = [fmean(rewards[at : at + WINDOW]) for at in range(len(rewards) - 2 * WINDOW + 1)]
    return max(windows), fmean(rewards[-WINDOW:])


def _margin(rows: Rows) -> float:
    """Return the difference between two windows' rewards that noise doesn't explain and that matters."""
    rewards = _values(rows, "reward")
    deviations = _values(rows, "reward/std")
    spread = max(deviations, default=0.0)
    steps = fmean([(later - earlier) ** 2 for earlier, later in pairwise(rewards)]) / 2 if len(rewards) > 1 else 0.0
    return max(FALL * spread, NOISE * math.sqrt(2 * steps / WINDOW))


def _rose(rows: Rows) -> bool:
    """Return whether the reward of the last window is above that of the first one by more than half the margin."""
    first, last = _ends(rows, "reward")
    return first is not None and last - first > _margin(rows) / 2


def _cut_shares(rows: Rows) -> tuple[float | None, float | None]:
    """Return the share of turns that were cut off, in the first and in the last window."""
    turns = [row for row in rows if row.get("rollout/turns")]
    shares = [{"share": (row.get("rollout/cut_turns") or 0.0) / row["rollout/turns"]} for row in turns]
    if len(shares) < WINDOW:
        return None, None
    first = fmean(row["share"] for row in shares[:WINDOW])
    return first, fmean(row["share"] for row in shares[-WINDOW:])


def _ends(rows: Rows, name: str) -> tuple[float | None, Any]:
    """Return a metric's mean over the first and over the last window, or None twice if the two would overlap."""
    values = _values(rows, name)
    if len(values) < 2 * WINDOW:
        return None, None
    return fmean(values[:WINDOW]), fmean(values[-WINDOW:])


def _values(rows: Rows, name: str) -> list[float]:
    """Return the finite values of a metric in the steps that have it."""
    found = [row.get(name) for row in rows]
    return [value for value in found if value is not None and math.isfinite(value)]
