"""Advantages from branches: one for each stretch of a rollout between two states, and one for each branch."""

from bisect import bisect_right
from collections.abc import Sequence

from agentgym.advantages.estimates import Estimates, estimate, share
from agentgym.advantages.group import LEAST_DIFFERENCE, Estimator, branches_differ, states_of
from agentgym.types.rollout import Rollout, Segment, Turn


def branch_advantages(
    rollouts: Sequence[Rollout], *, estimator: Estimator = "dr_grpo", role: str = ""
) -> list[dict[tuple[int, int], float]]:
    """Return the advantages of each rollout's trained turns, branches included, by segment index and `Turn.number`.

    Each is an advantage of `agentgym.advantages.estimates`, multiplied by the turn's weight (`share`). For the turns
    before the first state, the baseline is the mean of the group's other rollouts. The advantages are plain
    differences, not divided by an estimator's unit (see `agentgym.advantages.group`). So dr_grpo and rloo give the
    same advantages here.

    Args:
        rollouts: Scored rollouts of any number of groups.
        estimator: dr_grpo or rloo.
        role: Role whose rewards are used, "" for the rollout's own reward. All rollouts must have this reward. A
            branch without it is ignored.

    Raises:
        ValueError: If `estimator` is any other estimator, because that would divide by a unit.
    """
    if estimator not in ("dr_grpo", "rloo"):
        raise ValueError(
            f"advantage_estimator: {estimator!r} divides by a unit, but the advantages of branches are plain "
            "differences; use dr_grpo"
        )
    members: dict[str, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        members.setdefault(rollout.group_id, []).append(i)
    found: dict[int, dict[tuple[int, int], float]] = {}
    for rows in members.values():
        of_group = [rollouts[i] for i in rows]
        rewards = [rollout.reward_of(role) or 0.0 for rollout in of_group]
        signal = max(rewards) - min(rewards) >= LEAST_DIFFERENCE or branches_differ(of_group, role)
        for place, i in enumerate(rows):
            others = rewards[:place] + rewards[place + 1 :]
            estimates = estimate(rewards[place], others, states_of(rollouts[i], role))
            given = _by_turn(rollouts[i], role, estimates)
            found[i] = given if signal else dict.fromkeys(given, 0.0)
    return [found[i] for i in range(len(rollouts))]


def _by_turn(rollout: Rollout, role: str, estimates: Estimates) -> dict[tuple[int, int], float]:
    """Return the advantage of each of the role's trained turns, by segment index and number of the turn.

    `estimates` contains the rollout's advantages, which don't include the weights (`share`) yet.
    """
    of_branch: dict[int, float] = {}
    queues = {turn: list(values) for turn, values in zip(estimates.starts[1:], estimates.branches, strict=True)}
    for place, branch in enumerate(rollout.branches):
        if branch.reward_of(role) is not None:
            of_branch[place] = queues[branch.turn].pop(0)

    trained = {segment.branch for segment in rollout.segments if segment.trained and segment.branch in of_branch}
    begin = [branch.turn for place, branch in enumerate(rollout.branches) if place in trained]

    def worth(segment: Segment, turn: Turn) -> float:
        stretch = bisect_right(estimates.starts, turn.number) - 1
        value = estimates.stretches[stretch] if segment.branch is None else of_branch[segment.branch]
        return value * share(turn.number, begin)

    kept = {None, *of_branch}
    segments = [s for s in rollout.segments if s.trained and s.role == role and s.branch in kept]
    return {(segment.index, turn.number): worth(segment, turn) for segment in segments for turn in segment.turns}
