"""What a run has learned of the turns behind which branches pay, and the plan for its next rollouts."""

from collections.abc import Mapping, Sequence

import numpy as np

from agentgym.advantages.group import states_of
from agentgym.advantages.turn_noise import COLUMNS, DECAY, Part, Rows, added, measured, planned
from agentgym.types.branching import Branching
from agentgym.types.rollout import Rollout, Segment

NOTHING: Rows = np.zeros((0, COLUMNS))


class LearnedTurns:
    """Keeps what earlier batches taught of each env of a run, and gives the branching of a rollout that begins now.

    It changes between two batches only, so that the order in which rollouts end changes nothing. Without
    `after="learned_turn"` it gives the settings as they are, and learns nothing.
    """

    def __init__(self, branching: Branching | None, known: Mapping[str, Sequence[Sequence[float]]]) -> None:
        self._branching = branching
        self.learns = branching is not None and branching.after == "learned_turn"
        """Whether anything is learned."""
        # Of an env whose rollouts have all failed there are no rows, and no rows have no width of their own.
        tables = {env: np.array(rows, np.float64).reshape(-1, COLUMNS) for env, rows in known.items()}
        self._known: dict[str, Rows] = tables if self.learns else {}
        self._plans = dict[str, Branching]()

    def branching(self, env: str) -> Branching | None:
        """Return the settings for a rollout of this env that begins now, with their plan."""
        if self._branching is None or not self.learns:
            return self._branching
        if env not in self._plans:
            self._plans[env] = planned(self._branching, self._known.get(env, NOTHING))
        return self._plans[env]

    def learn(self, seen: Mapping[str, Rows]) -> None:
        """Take in what the rollouts of a batch said, by env; what was known counts for less from now on."""
        if self.learns:
            old = {env: rows * DECAY for env, rows in self._known.items()}
            self._known = joined_rows(old, seen)
            self._plans.clear()

    def state(self) -> dict[str, list[list[float]]]:
        """Return what is known as plain JSON values."""
        return {env: rows.tolist() for env, rows in self._known.items()}


def joined_rows(one: Mapping[str, Rows], other: Mapping[str, Rows]) -> dict[str, Rows]:
    """Return the sums of what was seen of each env."""
    return {env: added(one.get(env, NOTHING), other.get(env, NOTHING)) for env in sorted({*one, *other})}


def seen_in(rollouts: Sequence[Rollout]) -> Rows:
    """Return what the scored rollouts of one group say of their turns; nothing, where one has no other beside it.

    Nor do they say anything where their rewards are so large that the squares are no numbers.
    """
    whole = NOTHING
    with np.errstate(over="ignore", invalid="ignore"):
        for rollout in rollouts if len(rollouts) > 1 else ():
            whole = added(whole, _seen(rollout, [other for other in rollouts if other is not rollout]))
    return whole if np.isfinite(whole).all() else NOTHING


def _seen(rollout: Rollout, others: Sequence[Rollout]) -> Rows:
    own = [segment for segment in rollout.segments if segment.branch is None]
    count = 1 + max((turn.number for segment in own for turn in segment.turns), default=-1)
    tokens, is_state = np.zeros(count), np.zeros(count, bool)
    conversation, summaries = _conversation(own), _summaries(own)
    for segment in own:
        for turn in segment.turns:
            tokens[turn.number] += 0 if segment.model else turn.stop - turn.start
            is_state[turn.number] = segment.index in conversation and turn.number not in summaries
    roles = sorted({segment.role for segment in own if segment.trained and segment.turns})
    return measured(tokens, is_state, [_part(rollout, others, own, role, count) for role in roles])


def _conversation(own: Sequence[Segment]) -> set[int]:
    """Return the segments of the rollout's own conversation, in which it may have branches."""
    found = set[int]()
    for segment in own:
        if segment.kind == "root" or (segment.kind in ("compaction", "rerender") and segment.parent in found):
            found.add(segment.index)
    return found


def _summaries(own: Sequence[Segment]) -> set[int]:
    """Return the numbers of the turns that are summaries, behind an answer: there the env is not in a state."""
    turns = {segment.index: segment.turns for segment in own}
    return {turns[s.parent][-1].number for s in own if s.kind == "compaction" and s.parent is not None}


def _part(rollout: Rollout, others: Sequence[Rollout], own: Sequence[Segment], role: str, count: int) -> Part:
    """Return what the turns of a role have to do with the noise of a rollout of so many turns."""
    weights = np.zeros(count)
    for segment in own:
        if segment.trained and segment.role == role:
            sums = np.concatenate([[0.0], ((1 - np.exp(segment.logprobs.astype(np.float64))) ** 2).cumsum()])
            for turn in segment.turns:
                weights[turn.number] += sums[turn.stop] - sums[turn.start]
    reward = rollout.reward_of(role) or 0.0
    theirs = [value for other in others if (value := other.reward_of(role)) is not None]
    variances = {
        state.turn: float(np.var([*state.returns, reward], ddof=1))
        for state in states_of(rollout, role)
        if state.turn < count
    }
    return Part(weights, reward - float(np.mean(theirs)) if theirs else 0.0, variances)
