"""Signs that a rollout was rewarded for the wrong thing, or that its numbers are wrong.

They are cheap to compute, so every rollout is checked for them. A sign is a reason to read the rollout, but proves
nothing. The writer finds the signs that depend on one group. The reader finds those that need the training step or the
other rollouts of the run.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from agentgym.store.tool_counts import ToolCounts, call_counts, calls_in
from agentgym.types.rollout import Group, Rollout
from agentgym.types.transcript import call_text

SIGNS: Mapping[str, str] = {
    "no-tool-call": "scored above the mean of its group although no call reached a tool, while calls of others did",
    "tool-fails": "has the highest reward of its group, although more than half of its calls of one tool failed",
    "malformed-call": "has the highest reward of its group, although one of its tool calls was malformed",
    "repeats": "wrote the same turn three times or more",
    "logprob-gap": "a trainer log-probability differs from the engine's by more than 1 nat",
    "reward-far": "its reward is far from those of all other rollouts in its phase",
}
"""Description of each sign, by its name."""
SAME_TURNS = 3
"""How many turns with the same text count as a repetition."""
LARGE_GAP = 1.0
"""Threshold in nats of the sign "logprob-gap".

In a healthy run, the engine's and the trainer's log-probabilities differ by far less, in bfloat16 too.
"""
FEWEST = 8
"""How many scored rollouts a phase needs before a reward can count as far from all others."""
FAR = 3.0
"""A reward is far if its distance to the nearest other reward is more than this many times the range of all others."""


_ENDS = f"""
SELECT number, reward FROM rollouts WHERE phase = ? AND reward IS NOT NULL ORDER BY reward {{way}} LIMIT {FEWEST}
"""
"""SQL for the rollouts of a phase with the lowest or highest rewards."""
_PHASES_WITH_ENOUGH = f"""
WITH RECURSIVE phases(phase) AS (
    SELECT min(phase) FROM rollouts
    UNION ALL
    SELECT (SELECT min(phase) FROM rollouts WHERE phase > phases.phase) FROM phases WHERE phases.phase IS NOT NULL
)
SELECT phase FROM phases WHERE EXISTS (
    SELECT 1 FROM rollouts
    WHERE rollouts.phase = phases.phase AND reward IS NOT NULL LIMIT 1 OFFSET {FEWEST - 1}
)
"""
"""SQL for the phases that have at least FEWEST scored rollouts."""


def signs_of_group(group: Group) -> dict[str, tuple[str, ...]]:
    """Return the signs of each rollout of a group, by rollout id.

    Rollouts without a sign are left out, and failed rollouts never have one.
    """
    rewards = [rollout.reward for rollout in group.scored if rollout.reward is not None]
    if not rewards:
        return {}
    tools = {rollout.rollout_id: ToolCounts.of([rollout]) for rollout in group.scored}
    mean, best = sum(rewards) / len(rewards), max(rewards)
    others_call = any(map(_used_a_tool, group.scored))
    found: dict[str, tuple[str, ...]] = {}
    for rollout in group.scored:
        reward = rollout.reward or 0.0
        counts = tools[rollout.rollout_id]
        full = reward == best and reward > 0
        signs = {
            "no-tool-call": reward > mean and others_call and not _used_a_tool(rollout),
            "tool-fails": full and bool(counts.failing()),
            "malformed-call": full and rollout.metrics.get("malformed_calls", 0) > 0,
            "repeats": _repeats(rollout),
        }
        if any(signs.values()):
            found[rollout.rollout_id] = tuple(name for name, there in signs.items() if there)
    return found


def signs_of(number: int, signs: str | None, gap: float | None, far: set[int]) -> tuple[str, ...]:
    """Return the names of all signs of a rollout.

    Args:
        number: The rollout's number.
        signs: The names of the signs that the writer found, separated by spaces; they come first in the result.
        gap: The largest difference between the engine's and the trainer's log-probabilities, in nats, if known.
        far: The numbers of the rollouts whose reward is far from all others (`far_rewards`).
    """
    found = (signs or "").split()
    if gap is not None and gap > LARGE_GAP:
        found.append("logprob-gap")
    if number in far:
        found.append("reward-far")
    return tuple(found)


def is_far(reward: float, nearest: float, farthest: float) -> bool:
    """Return whether `reward` is far from all other rewards.

    The others all lie on one side of `reward`: `nearest` is the one next to it, and `farthest` is the one at the other
    end. If all others are equal, there is no range to compare with. Then a distance of more than ten times their
    absolute value, and of more than 10, is far.
    """
    spread = abs(farthest - nearest)
    return abs(reward - nearest) > (FAR * spread if spread else 10 * max(1.0, abs(nearest)))


def far_rewards(query: Callable[..., list[Any]], phase: str | None) -> set[int]:
    """Return the numbers of the rollouts whose reward is far from all others of their phase.

    Only a phase's lowest and highest rewards can be far, and an index finds them. The time therefore depends on the
    number of phases, not on the number of rollouts.

    Args:
        query: Returns the rows of an SQL statement, given its values; all statements must read the same snapshot.
        phase: The only phase to look at; None means all.
    """
    found: set[int] = set()
    for (name,) in query(_PHASES_WITH_ENOUGH) if phase is None else [(phase,)]:
        low, high = (query(_ENDS.format(way=way), name) for way in ("", "DESC"))
        if len(low) == len(high) == FEWEST:
            ends = ((low, high[0][1]), (high, low[0][1]))
            found |= {end[0][0] for end, other in ends if is_far(end[0][1], end[1][1], other)}
    return found


def _used_a_tool(rollout: Rollout) -> bool:
    """Return whether a call reached a tool or, if the env doesn't count these calls, whether there was any call."""
    return rollout.metrics.get("tool_calls", call_counts(rollout)[0]) > 0


def _repeats(rollout: Rollout) -> bool:
    """Return whether at least three turns have the same text, tool calls included."""
    if sum(len(segment.turns) for segment in rollout.segments) < SAME_TURNS:
        return False
    turns = Counter(
        (str(message.get("content") or ""), *map(call_text, calls_in(message))) for message in rollout.messages
    )
    return any(count >= SAME_TURNS for turn, count in turns.items() if any(turn))
