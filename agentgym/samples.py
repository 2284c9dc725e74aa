"""The seam between rollouts and training: rollouts cut into samples, with what each token is worth. Numpy only.

A rollout counts once in its group's baseline (`credit.py`), whatever number of segments or samples it became, and
travels by its id: the order of rows means nothing here.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal, TypeAlias, overload

import numpy as np

from agentgym.advantages import Estimator, advantages, turn_advantages
from agentgym.types import Floats, Group, Rollout, Sample, Segment, Turn

__all__ = ["AdvantageLevel", "Estimator", "SampleBatch", "advantages", "build_samples", "merge", "turn_advantages"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleBatch(Sequence[Sample]):
    """What a step trains on, and an account of what it does not: nothing leaves uncounted."""

    rows: tuple[Sample, ...]
    groups: int
    """Groups that came in."""
    groups_without_signal: int
    """Of those, the ones dropped because all of their advantages are 0: their scores are equal."""
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


AdvantageLevel: TypeAlias = Literal["outcome", "turn"]


def build_samples(
    groups: Sequence[Group],
    *,
    advantage: Estimator = "dr_grpo",
    merge: bool = True,
    advantage_level: AdvantageLevel = "outcome",
) -> SampleBatch:
    """The samples of these groups, each sampled token in exactly one; arrays are views of the segments'.

    One sample per turn: the prompt is everything in the segment before the turn. With `merge`, one sample
    per segment, whose environment tokens between turns have mask 0: same loss, and each token computed once.
    Failed rollouts and groups without a signal (see `credit.py`) are left out and counted. Two groups of one id
    share a baseline. Raises ValueError for a rollout id that appears twice.

    With `advantage_level` "outcome" every token of a rollout has the rollout's advantage. With "turn" each turn has
    that of what came after it (`turn_advantages`), where the env's steps give rewards of their own; a group then has a
    signal where what came after any turn differs, although the totals may be equal.
    """
    if advantage_level not in ("outcome", "turn"):
        raise ValueError(f"advantage_level: {advantage_level!r} is none of outcome, turn")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    twice = [name for name, n in Counter(rollout.rollout_id for rollout in rollouts).items() if n > 1]
    if twice:
        raise ValueError(f"rollout {twice[0]!r}: appears {Counter(r.rollout_id for r in rollouts)[twice[0]]} times")
    advantage_values = _by_turn(rollouts, advantage) if advantage_level == "turn" else _by_outcome(rollouts, advantage)
    signal = {rollout.group_id for rollout in rollouts if _moves(advantage_values.get(rollout.rollout_id, 0.0))}
    rows = tuple(
        row
        for rollout in rollouts
        if rollout.rollout_id in advantage_values and rollout.group_id in signal
        for row in _cut(rollout, advantage_values[rollout.rollout_id], merged=merge)
    )
    return SampleBatch(
        rows=rows,
        groups=len(groups),
        groups_without_signal=sum(group.group_id not in signal for group in groups),
        rollouts=len(rollouts),
        rollouts_failed=sum(rollout.reward is None for rollout in rollouts),
        rollouts_trained=len({row.rollout_id for row in rows}),
        trained_tokens=sum(int(row.loss_mask.sum()) for row in rows),
    )


def demonstrations(rollouts: Sequence[Rollout], *, context_weight: float = 0.0) -> list[Sample]:
    """What to imitate in these rollouts, one sample per segment, for a trainer whose loss is "sft".

    ::

        ids       P  P  a  a  e  a  e     P prompt, a sampled, e what the env said
        weight    .  w  1  1  w  1        w context_weight; what follows the last sampled token is cut

    The weights stand in `advantages`; with w = 0 the mask is that of the sampled tokens. Rewards are not looked at:
    which rollouts are worth imitating is for the caller to say.
    """
    if not 0 <= context_weight <= 1:
        raise ValueError(f"context_weight: must be in 0..1, got {context_weight}")
    made = [_imitated(rollout, segment, context_weight) for rollout in rollouts for segment in rollout.segments]
    return [row for row in made if row is not None]


def _imitated(rollout: Rollout, segment: Segment, context_weight: float) -> Sample | None:
    """None for a segment in which nothing was sampled."""
    if not segment.turns:
        return None
    start = 1 if context_weight else segment.turns[0].start
    sampled = segment.sampled[start : segment.turns[-1].stop]
    return Sample(
        group_id=rollout.group_id,
        rollout_id=rollout.rollout_id,
        segment=segment.index,
        step=0,
        prompt_ids=segment.token_ids[:start],
        response_ids=segment.token_ids[start : segment.turns[-1].stop],
        loss_mask=np.ones_like(sampled) if context_weight else sampled,
        logprobs=np.zeros(len(sampled), np.float32),
        advantages=np.where(sampled, np.float32(1), np.float32(context_weight)),
        weight=float(sampled.sum() / rollout.sampled_tokens),
        policy_version=0,
        is_last=segment is rollout.segments[-1],
    )


Advantage: TypeAlias = float | dict[int, float]
"""The advantage of a rollout, or of each of its turns by number."""


def _by_outcome(rollouts: Sequence[Rollout], estimator: Estimator) -> dict[str, Advantage]:
    """The advantage of each scored rollout, by its id."""
    values = advantages(
        [rollout.reward for rollout in rollouts],
        [rollout.rollout_id for rollout in rollouts],
        [rollout.group_id for rollout in rollouts],
        estimator=estimator,
    )
    return {
        rollout.rollout_id: value
        for rollout, value in zip(rollouts, values.tolist(), strict=True)
        if rollout.reward is not None
    }


def _moves(advantage_values: Advantage) -> bool:
    """Whether an advantage of this rollout is not 0."""
    return any(advantage_values.values()) if isinstance(advantage_values, dict) else bool(advantage_values)


def _by_turn(rollouts: Sequence[Rollout], estimator: Estimator) -> dict[str, Advantage]:
    """The advantages of each scored rollout's turns, by its id."""
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    advantage_values: dict[str, Advantage] = {}
    for rollout, values in zip(scored, turn_advantages(scored, estimator=estimator), strict=True):
        numbers = sorted(turn.number for segment in rollout.segments for turn in segment.turns)
        if len(set(numbers)) < len(numbers):
            raise ValueError(f'rollout {rollout.rollout_id!r}: two turns have one number; "turn" needs them apart')
        advantage_values[rollout.rollout_id] = dict(zip(numbers, values.tolist(), strict=True))
    return advantage_values


def _cut(rollout: Rollout, advantage: Advantage, *, merged: bool) -> Iterator[Sample]:
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
            advantages=_advantage_values(segment, turns, advantage),
            weight=sum(turn.stop - turn.start for turn in turns) / total,
            policy_version=min(version.version for turn in turns for version in turn.versions),
            is_last=i == last,
        )


def _spans(turns: tuple[Turn, ...], *, merged: bool) -> Iterator[tuple[int, tuple[Turn, ...]]]:
    if merged and turns:
        yield 0, turns
    elif turns:
        yield from ((step, (turn,)) for step, turn in enumerate(turns))


def _advantage_values(segment: Segment, turns: tuple[Turn, ...], advantage: Advantage) -> Floats:
    """The advantage on the sampled tokens, 0 on the others."""
    start, stop = turns[0].start, turns[-1].stop
    if isinstance(advantage, dict):
        advantage_values = np.zeros(stop - start, np.float32)
        for turn in turns:
            advantage_values[turn.start - start : turn.stop - start] = advantage[turn.number]
        return advantage_values
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
    logprobs, advantage_values = np.zeros(length, np.float32), np.zeros(length, np.float32)
    for row in run:
        at = slice(len(row.prompt_ids) - start, len(row) - start)
        mask[at] = row.loss_mask
        logprobs[at] = np.where(row.loss_mask, row.logprobs, 0)
        advantage_values[at] = np.where(row.loss_mask, row.advantages, 0)
    return Sample(
        group_id=first.group_id,
        rollout_id=first.rollout_id,
        segment=first.segment,
        step=first.step,
        prompt_ids=first.prompt_ids,
        response_ids=np.concatenate([last.prompt_ids[start:], last.response_ids]),
        loss_mask=mask,
        logprobs=logprobs,
        advantages=advantage_values,
        weight=sum(row.weight for row in run),
        policy_version=min(row.policy_version for row in run),
        is_last=any(row.is_last for row in run),
    )
