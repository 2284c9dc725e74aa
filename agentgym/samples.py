"""The seam between rollouts and training: group baselines, and rollouts cut into samples. Numpy only.

A rollout counts once in its group's baseline, whatever number of segments or samples it became, and
travels by its id: the order of rows means nothing here.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from agentgym.types import Floats, Group, Ints, Rollout, Sample, Segment, Turn

Estimator: TypeAlias = Literal["grpo", "dr_grpo", "rloo"]
Ids: TypeAlias = Sequence[str] | Sequence[int] | NDArray[Any]

EPSILON = 1e-6
"""Added to a group's standard deviation, in units of reward."""


def advantages(
    rewards: Sequence[float | None] | NDArray[Any],
    rollouts: Ids,
    groups: Ids,
    *,
    estimator: Estimator = "grpo",
) -> NDArray[np.float64]:
    """One advantage per row; a rollout counts once in its group's baseline, however many rows it has.

    Rows are samples in any order: their rollout's reward, rollout id and group id, ids being str or int. With
    mean and s (unbiased standard deviation) over the n scored rollouts of the group::

        grpo     (reward - mean) / (s + 1e-6)           arXiv 2402.03300
        dr_grpo   reward - mean                         Dr. GRPO, arXiv 2503.20783
        rloo      reward - mean of the n-1 others       arXiv 2402.14740

    A group of one gets 0. A reward of None (or NaN) is no score: outside the baseline, and NaN is its answer.
    Raises ValueError, naming the rollout and its rows, for siblings with unequal rewards or groups.
    """
    reward = np.asarray(rewards, np.float64)
    rollout, n_rollouts = _codes("rollout", rollouts)
    group, n_groups = _codes("group", groups)
    if not len(reward) == len(rollout) == len(group):
        raise ValueError(f"rows: {len(reward)} rewards, {len(rollout)} rollout ids, {len(group)} group ids")
    if np.isinf(reward).any():
        raise ValueError(f"reward: not finite in row {int(np.isinf(reward).argmax())}")
    reward_of = _once("rewards", reward, rollout, n_rollouts, rollouts)
    group_of = _once("groups", group, rollout, n_rollouts, rollouts)
    present = np.zeros(n_rollouts, np.bool_)
    present[rollout] = True
    scored = np.flatnonzero(present & ~np.isnan(reward_of))
    out = np.full(n_rollouts, np.nan)
    out[scored] = _centred(reward_of[scored], group_of[scored], n_groups, estimator)
    return out[rollout]


def _centred(reward: NDArray[np.float64], group: Ints, n_groups: int, estimator: Estimator) -> NDArray[np.float64]:
    """Advantage of each of these rollouts, one row per rollout."""
    count = np.bincount(group, minlength=n_groups)
    mean = np.bincount(group, reward, n_groups) / np.maximum(count, 1)
    centred = reward - mean[group]
    others = np.maximum(count - 1, 1)
    if estimator == "dr_grpo":
        return centred
    if estimator == "rloo":
        return np.asarray(centred * (count / others)[group])
    if estimator == "grpo":
        deviation = np.sqrt(np.bincount(group, centred * centred, n_groups) / others)
        return np.asarray(centred / (deviation + EPSILON)[group])
    raise ValueError(f"estimator: {estimator!r} is none of grpo, dr_grpo, rloo")


def _codes(what: str, ids: Ids) -> tuple[Ints, int]:
    """Small whole numbers standing for the ids, and how many such numbers there may be."""
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iu":
        if not len(ids):
            return np.zeros(0, np.int64), 0
        low, high = int(ids.min()), int(ids.max())
        if high - low <= 4 * len(ids) + 1024:  # dense enough to count in a table: no sort
            return np.subtract(ids, low, dtype=np.int64), high - low + 1
        names, codes = np.unique(ids, return_inverse=True)
        return codes, len(names)
    table: dict[Any, int] = {}
    codes = np.fromiter((table.setdefault(i, len(table)) for i in ids), np.int64, len(ids))
    for name in table:
        if isinstance(name, bool) or not isinstance(name, str | int | np.integer):
            row = int((codes == table[name]).argmax())
            raise ValueError(f"{what} id: {name!r} in row {row}; every row needs a str or an int")
    return codes, len(table)


def _once(what: str, values: NDArray[Any], rollout: Ints, size: int, ids: Ids) -> NDArray[Any]:
    """The one value of each rollout; ValueError where its rows disagree."""
    table = np.zeros(size, values.dtype)
    table[rollout] = values
    differ = table[rollout] != values
    if differ.any():
        differ &= ~(np.isnan(table[rollout]) & np.isnan(values))
    if differ.any():
        rows = np.flatnonzero(rollout == rollout[differ.argmax()])
        raise ValueError(
            f"rollout {ids[rows[0]]!r}: unequal {what} {values[rows].tolist()} in its rows {rows.tolist()}; "
            "a rollout has one reward and one group"
        )
    return table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleBatch(Sequence[Sample]):
    """What a step trains on, and an account of what it does not: nothing leaves uncounted."""

    rows: tuple[Sample, ...]
    groups: int
    """Groups that came in."""
    groups_without_signal: int
    """Of those, the ones dropped because no two of their scores differ."""
    rollouts: int
    """Rollouts that came in."""
    rollouts_failed: int
    """Of those, the ones with reward None: outside baseline and loss."""
    rollouts_trained: int
    """Of those, the ones with a sample among the rows."""
    trained_tokens: int

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.rows)

    def metrics(self) -> dict[str, float]:
        """The counts under names for a log, in tokens, samples, rollouts and groups."""
        tokens = sum(len(row) for row in self.rows)
        return {
            "samples/count": float(len(self.rows)),
            "samples/tokens": float(tokens),
            "samples/trained_tokens": float(self.trained_tokens),
            "samples/groups": float(self.groups),
            "samples/groups_without_signal": float(self.groups_without_signal),
            "samples/rollouts": float(self.rollouts),
            "samples/rollouts_failed": float(self.rollouts_failed),
            "samples/rollouts_trained": float(self.rollouts_trained),
        }


def turn_advantages(rollouts: Sequence[Rollout], *, estimator: Estimator = "dr_grpo") -> list[Floats]:
    """One advantage per turn of each scored rollout of a group: what came after it, less what that is on average.

    With O the outcome of rollout j, r its turns' rewards in the order of their numbers, and n rollouts::

        G_j(t) = O_j + r_j(t) + r_j(t+1) + ...          G_j(t) = O_j behind its last turn
        A_i(t) = G_i(t) - (G_1(t) + ... + G_n(t)) / n

    Every rollout counts in the mean of every turn, those that had ended by then with their outcome: a mean over the
    rollouts that reached turn t would depend on who chose to go on, and pay for going on. What rollout i itself adds
    to the mean only scales its advantage by (n-1)/n, at every turn alike, so the gradient keeps its direction; rloo
    takes that factor back, and grpo divides by the deviation of the rollouts' whole rewards. Without turn rewards
    these are the group's usual advantages.
    """
    turns = [sorted((t for s in r.segments for t in s.turns), key=lambda turn: turn.number) for r in rollouts]
    if any(rollout.reward is None for rollout in rollouts):
        raise ValueError("rollouts: one without a reward has no return")
    width = max(map(len, turns), default=0)
    returns = np.zeros((len(rollouts), width + 1))
    for row, rollout, played in zip(returns, rollouts, turns, strict=True):
        given = np.array([turn.reward for turn in played])
        row[: len(played)] = given[::-1].cumsum()[::-1]
        row += (rollout.reward or 0.0) - given.sum()
    centred = (returns - returns.mean(0)) * _scale(np.array([r.reward for r in rollouts], np.float64), estimator)
    return [np.asarray(row[: len(played)], np.float32) for row, played in zip(centred, turns, strict=True)]


def _scale(reward: NDArray[np.float64], estimator: Estimator) -> float:
    """What an estimator multiplies a centred reward of a group by."""
    n = len(reward)
    if estimator == "dr_grpo" or n < 2:
        return 1.0
    if estimator == "rloo":
        return n / (n - 1)
    if estimator == "grpo":
        return float(1 / (reward.std(ddof=1) + EPSILON))
    raise ValueError(f"estimator: {estimator!r} is none of grpo, dr_grpo, rloo")


Credit: TypeAlias = Literal["outcome", "turns"]


def samples(
    groups: Sequence[Group], *, advantage: Estimator = "dr_grpo", merge: bool = True, credit: Credit = "outcome"
) -> SampleBatch:
    """The samples of these groups, each sampled token in exactly one; arrays are views of the segments'.

    One sample per turn: the prompt is everything in the segment before the turn. With `merge`, one sample
    per segment, whose environment tokens between turns have mask 0: same loss, and each token computed once.
    Failed rollouts and groups whose scores are all equal are left out and counted. Two groups of one id
    share a baseline. Raises ValueError for a rollout id that appears twice.

    With `credit` "outcome" every token of a rollout has the rollout's advantage; with "turns" each turn has that of
    what came after it (`turn_advantages`), where the env's steps give rewards of their own.
    """
    if credit not in ("outcome", "turns"):
        raise ValueError(f"credit: {credit!r} is none of outcome, turns")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    twice = [name for name, n in Counter(rollout.rollout_id for rollout in rollouts).items() if n > 1]
    if twice:
        raise ValueError(f"rollout {twice[0]!r}: appears {Counter(r.rollout_id for r in rollouts)[twice[0]]} times")
    worth = advantages(
        [rollout.reward for rollout in rollouts],
        [rollout.rollout_id for rollout in rollouts],
        [rollout.group_id for rollout in rollouts],
        estimator=advantage,
    )
    scores: dict[str, set[float]] = {group.group_id: set() for group in groups}
    for rollout in rollouts:
        if rollout.reward is not None:
            scores[rollout.group_id].add(rollout.reward)
    by_turn = _by_turn(rollouts, advantage) if credit == "turns" else {}
    rows = tuple(
        row
        for rollout, value in zip(rollouts, worth.tolist(), strict=True)
        if rollout.reward is not None and len(scores[rollout.group_id]) > 1
        for row in _cut(rollout, by_turn.get(rollout.rollout_id, value), merged=merge)
    )
    return SampleBatch(
        rows=rows,
        groups=len(groups),
        groups_without_signal=sum(len(scores[group.group_id]) < 2 for group in groups),
        rollouts=len(rollouts),
        rollouts_failed=sum(rollout.reward is None for rollout in rollouts),
        rollouts_trained=len({row.rollout_id for row in rows}),
        trained_tokens=sum(int(row.loss_mask.sum()) for row in rows),
    )


Worth: TypeAlias = float | dict[int, float]
"""The advantage of a rollout, or of each of its turns by number."""


def _by_turn(rollouts: Sequence[Rollout], estimator: Estimator) -> dict[str, Worth]:
    """The advantages of each scored rollout's turns, by its id."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            groups.setdefault(rollout.group_id, []).append(rollout)
    worth: dict[str, Worth] = {}
    for group in groups.values():
        for rollout, values in zip(group, turn_advantages(group, estimator=estimator), strict=True):
            numbers = sorted(turn.number for segment in rollout.segments for turn in segment.turns)
            if len(set(numbers)) < len(numbers):
                raise ValueError(
                    f"rollout {rollout.rollout_id!r}: two turns have one number; credit by turn needs them"
                )
            worth[rollout.rollout_id] = dict(zip(numbers, values.tolist(), strict=True))
    return worth


def _cut(rollout: Rollout, advantage: Worth, *, merged: bool) -> Iterator[Sample]:
    """The samples of one rollout, in the order of its segments and turns."""
    total = rollout.sampled_tokens
    spans = [
        (segment, step, turns) for segment in rollout.segments for step, turns in _spans(segment.turns, merged=merged)
    ]
    last = max(range(len(spans)), key=lambda i: (spans[i][2][-1].number, i), default=0)  # in time, not in place
    for i, (segment, step, turns) in enumerate(spans):
        start, stop = turns[0].start, turns[-1].stop
        yield Sample(
            group_id=rollout.group_id,
            rollout_id=rollout.rollout_id,
            segment=segment.index,
            step=step,
            prompt_ids=segment.token_ids[:start],
            response_ids=segment.token_ids[start:stop],
            loss_mask=segment.sampled[start:stop],
            logprobs=segment.logprobs[start:stop],
            advantages=_worth(segment, turns, advantage),
            weight=sum(turn.stop - turn.start for turn in turns) / total,
            policy_version=min(version.version for turn in turns for version in turn.versions),
            is_last=i == last,
        )


def _spans(turns: tuple[Turn, ...], *, merged: bool) -> Iterator[tuple[int, tuple[Turn, ...]]]:
    if merged and turns:
        yield 0, turns
    elif turns:
        yield from ((step, (turn,)) for step, turn in enumerate(turns))


def _worth(segment: Segment, turns: tuple[Turn, ...], advantage: Worth) -> Floats:
    """The advantage on the sampled tokens, 0 on the others."""
    start, stop = turns[0].start, turns[-1].stop
    if isinstance(advantage, dict):
        worth = np.zeros(stop - start, np.float32)
        for turn in turns:
            worth[turn.start - start : turn.stop - start] = advantage[turn.number]
        return worth
    sampled = segment.sampled[start:stop]
    if sampled.all():
        return np.broadcast_to(np.float32(advantage), sampled.shape)  # one float, however long the turn
    return np.where(sampled, np.float32(advantage), np.float32(0))


def merge(rows: Sequence[Sample]) -> list[Sample]:
    """Join the samples of a rollout's segment while each prompt extends the prompt and response before it.

    ::

        step 0   P  a  a                  step 1's prompt is P a a e e: it extends step 0
        step 1   P  a  a  e  e  a
        merged   P  a  a  e  e  a         mask 1 1 0 0 1, logprob and advantage 0 where mask is 0

    Neighbours are found by rollout, segment and step, not by row. Where a prompt does not extend what came
    before it, a new sample begins; no trained token is lost or trained twice.
    """
    places: dict[tuple[str, int], list[Sample]] = {}
    for row in rows:
        places.setdefault((row.rollout_id, row.segment), []).append(row)
    return list(chain.from_iterable(_merged(steps) for steps in places.values()))


def _merged(steps: list[Sample]) -> Iterator[Sample]:
    steps = sorted(steps, key=lambda row: row.step)
    run = steps[:1]
    for before, row in pairwise(steps):
        if not _extends(before, row):
            yield _joined(run)
            run = []
        run.append(row)
    yield _joined(run)


def _extends(before: Sample, row: Sample) -> bool:
    """Whether the prompt of `row` begins with the prompt and response of `before`."""
    n = len(before.prompt_ids)
    return (
        len(row.prompt_ids) >= len(before)
        and np.array_equal(row.prompt_ids[:n], before.prompt_ids)
        and np.array_equal(row.prompt_ids[n : len(before)], before.response_ids)
    )


def _joined(run: list[Sample]) -> Sample:
    """One sample of steps that extend each other."""
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    start = len(first.prompt_ids)
    length = len(last) - start
    mask = np.zeros(length, np.bool_)
    logprobs, worth = np.zeros(length, np.float32), np.zeros(length, np.float32)
    for row in run:
        at = slice(len(row.prompt_ids) - start, len(row) - start)
        mask[at] = row.loss_mask
        logprobs[at] = np.where(row.loss_mask, row.logprobs, 0)
        worth[at] = np.where(row.loss_mask, row.advantages, 0)
    return Sample(
        group_id=first.group_id,
        rollout_id=first.rollout_id,
        segment=first.segment,
        step=first.step,
        prompt_ids=first.prompt_ids,
        response_ids=np.concatenate([last.prompt_ids[start:], last.response_ids]),
        loss_mask=mask,
        logprobs=logprobs,
        advantages=worth,
        weight=sum(row.weight for row in run),
        policy_version=min(row.policy_version for row in run),
        is_last=any(row.is_last for row in run),
    )
