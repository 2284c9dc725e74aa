"""Converts rollouts to training samples, with an advantage for each token. It needs only NumPy.

A rollout counts once in its group's baseline (`agentgym.advantages.group`), no matter how many segments or samples it
becomes. A role with a separate reward has a separate baseline, in which each rollout also counts once. The order of
the samples has no meaning: a rollout's samples are found by its id.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args, overload

import numpy as np

from agentgym.advantages.gae import GAEConfig, at_starts, gae_of, turn_order
from agentgym.advantages.group import Estimator
from agentgym.advantages.levels import LEVELS, CreditLevel, placed_tokens
from agentgym.config_fields import require_instance
from agentgym.engines.messages import NO_POLICY
from agentgym.types.arrays import Floats
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from agentgym.types.sample import Sample, SampleKey

__all__ = ["CreditLevel", "SampleBatch", "build_samples", "demonstrations", "teacher_samples", "value_samples"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleBatch(Sequence[Sample]):
    """The samples that one step trains on, and counts of everything that was left out."""

    samples: tuple[Sample, ...]
    groups: int
    """Number of input groups."""
    groups_without_signal: int
    """Number of groups that were left out because all of their advantages are 0, for example with equal rewards."""
    rollouts: int
    """Number of input rollouts."""
    rollouts_failed: int
    """Number of rollouts with reward None, which are in no baseline and have no samples."""
    rollouts_trained: int
    """Number of rollouts with at least one sample in this batch."""
    trained_tokens: int
    """Number of tokens whose loss mask is true."""
    untrained_tokens: int
    """Number of tokens that were sampled in scored rollouts but are never trained. They are the tokens of other
    models, of segments with `train=False`, and of failed branches. Unless the advantages are estimated from
    branches, they also include the tokens of all branches.
    """
    places: Mapping[tuple[str, int], str] = field(default_factory=dict)
    """Ids of the groups by their position in the task order (`Group.place`). A trainer uses the positions to recognize
    and reject groups that it has already trained on.
    """
    returns: Mapping[SampleKey, Floats] = field(default_factory=dict)
    """The critic's targets: for each sample, the return from each of its turns on. The keys are `SampleKey`: the
    sample's rollout id, segment and step. Empty without a critic.
    """

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | Sequence[Sample]:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.samples)

    def metrics(self) -> dict[str, float]:
        """Return the counts of tokens, samples, rollouts and groups, by their names in the log."""
        tokens = sum(len(sample) for sample in self.samples)
        return {
            "samples/count": float(len(self.samples)),
            "samples/tokens": float(tokens),
            "samples/trained_tokens": float(self.trained_tokens),
            "samples/untrained_tokens": float(self.untrained_tokens),
            "samples/groups": float(self.groups),
            "samples/groups_without_signal": float(self.groups_without_signal),
            "samples/rollouts": float(self.rollouts),
            "samples/rollouts_failed": float(self.rollouts_failed),
            "samples/rollouts_trained": float(self.rollouts_trained),
        }


def build_samples(
    groups: Sequence[Group],
    *,
    advantage_estimator: Estimator = "dr_grpo",
    merge: bool = True,
    credit: CreditLevel = "outcome",
) -> SampleBatch:
    """Cut the rollouts of these groups into samples. Each sampled token is trained in exactly one sample.

    ::

        segment         P  P  a  a  e  a          P prompt, a sampled, e from the environment
        merge=True      P  P| a  a  e  a          one sample per segment, mask 1 1 0 1
        merge=False     P  P| a  a                one sample per turn, mask 1 1,
                        P  P  a  a  e| a          its prompt is everything before the turn, mask 1

    The gradient is the same either way. With merge=True, each token is computed only once. The arrays are views of
    the segments' arrays.

    A segment of a role gets the advantage of that role's reward, compared with the same role's rewards in the group.
    Segments that aren't trained (`Segment.trained`) make no samples, but their tokens are counted. Failed rollouts
    and groups without a signal (see `agentgym.advantages.group`) are left out and counted. Two groups with the same
    id share a baseline.

    Args:
        groups: The groups to train on.
        advantage_estimator: The estimator of `agentgym.advantages.group`.
        merge: Whether to make one sample per segment, instead of one per turn.
        credit: "outcome" gives every sampled token the advantage of its rollout. "turn" gives each turn a separate
            advantage, from the rewards of the environment's steps from that turn on (`turn_advantages`). "branches"
            gives the turns between two states with branches one advantage, estimated from the results of the branches
            (`agentgym.advantages.estimates`), and also makes samples from the branches. The other levels make no
            samples from branches.

    Raises:
        ValueError: If a rollout id appears twice, if a rollout has no token ids, if `credit` is unknown or needs a
            critic, or if it is "branches" but no rollout was run with `branching`.
    """
    if credit not in get_args(CreditLevel):
        raise ValueError(f"credit: expected one of {', '.join(get_args(CreditLevel))}, got {credit!r}")
    if credit not in LEVELS:
        raise ValueError("credit: value needs a critic; use value_samples(groups, trainer.values)")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    _refuse_repeated_ids(rollouts)
    _refuse_without_ids(rollouts)
    levels, of_tokens = LEVELS[credit]
    by_id = levels(rollouts, advantage_estimator)
    branches = credit == "branches"
    with_signal = {rollout.group_id for rollout in rollouts if any(by_id.get(rollout.rollout_id, {}).values())}
    samples = tuple(
        sample
        for rollout in rollouts
        if rollout.rollout_id in by_id and rollout.group_id in with_signal
        for sample in _cut(rollout, partial(of_tokens, by_id[rollout.rollout_id]), merged=merge, branches=branches)
    )
    return _batch(groups, rollouts, samples, with_signal, branches=branches)


def teacher_samples(
    groups: Sequence[Group], advantages: Mapping[tuple[str, int], Floats], *, merge: bool = True
) -> SampleBatch:
    """Cut the rollouts of these groups into samples, with a given advantage for each token.

    The samples are the same as those of `build_samples`. Every scored rollout is trained, regardless of its reward. A
    group has a signal if any of its advantages isn't 0.

    Args:
        groups: The groups to train on.
        advantages: The advantages of a segment's tokens, by rollout id and segment index, as `teacher_advantages`
            returns them.
        merge: Whether to make one sample per segment, instead of one per turn.

    Raises:
        ValueError: If a segment doesn't have one advantage per token, in which case the message names the segment; if a
            rollout id appears twice; or if a rollout has no token ids.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    _refuse_repeated_ids(rollouts)
    _refuse_without_ids(rollouts)
    of_rollout = {
        rollout.rollout_id: {s.index: _of_segment(rollout, s, advantages) for s in _trained(rollout)}
        for rollout in rollouts
        if rollout.reward is not None
    }
    with_signal = {
        rollout.group_id
        for rollout in rollouts
        if any(values.any() for values in of_rollout.get(rollout.rollout_id, {}).values())
    }
    samples = tuple(
        sample
        for rollout in rollouts
        if rollout.rollout_id in of_rollout and rollout.group_id in with_signal
        for sample in _cut(rollout, partial(_within, of_rollout[rollout.rollout_id]), merged=merge)
    )
    return _batch(groups, rollouts, samples, with_signal)


def value_samples(
    groups: Sequence[Group],
    values_of: Callable[[Sequence[Sample]], Mapping[SampleKey, Floats]],
    how: GAEConfig = GAEConfig(),  # noqa: B008  frozen
) -> SampleBatch:
    """Cut the rollouts of these groups into samples with advantages from GAE, one sample per segment.

    All scored rollouts are trained, because each has its own baseline.

    Args:
        groups: The groups to train on.
        values_of: A function that takes samples, and returns the value of the state before each token that their loss
            masks select. It is called once. Pass `Trainer.values`, so that the trainer's next step trains its critic on
            the batch's `returns`.
        how: The settings of GAE.

    Raises:
        ValueError: If a rollout's turns don't follow one another (`turn_order`), or if a value is missing. The
            message then names the rollout. Also if a rollout id appears twice, if a rollout has no token ids, or if
            `values_of` isn't callable or `how` isn't a `GAEConfig`.
    """
    if not callable(values_of):
        raise ValueError(f"values_of: expected a function, such as trainer.values, got {values_of!r}")
    require_instance("how", how, GAEConfig)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    _refuse_repeated_ids(rollouts)
    _refuse_without_ids(rollouts)
    orders = {rollout.rollout_id: turn_order(rollout) for rollout in rollouts if rollout.reward is not None}
    scored = [rollout for rollout in rollouts if orders.get(rollout.rollout_id)]
    asked = [at_starts(sample, rollout) for rollout in scored for sample in _cut(rollout, _no_tokens, merged=True)]
    found = values_of(asked) if asked else {}
    samples, returns = list[Sample](), dict[SampleKey, Floats]()
    for rollout in scored:
        given, to_come = gae_of(rollout, orders[rollout.rollout_id], found, how)
        samples += _cut(rollout, partial(placed_tokens, given), merged=True)
        returns |= to_come
    batch = _batch(groups, rollouts, tuple(samples), {rollout.group_id for rollout in scored})
    return replace(batch, returns=returns)


def _no_tokens(segment: Segment) -> Floats:
    return np.zeros(len(segment.token_ids), np.float32)


def _trained(rollout: Rollout, *, branches: bool = False) -> list[Segment]:
    """Return the segments to cut into samples. With `branches`, these include the segments of scored branches."""
    kept = {None, *(i for i, branch in enumerate(rollout.branches) if branches and branch.reward is not None)}
    return [segment for segment in rollout.segments if segment.trained and segment.turns and segment.branch in kept]


def _of_segment(rollout: Rollout, segment: Segment, advantages: Mapping[tuple[str, int], Floats]) -> Floats:
    """Return the advantages of a segment's tokens.

    Raises:
        ValueError: If the advantages are missing, or if their number isn't the number of tokens.
    """
    values = advantages.get((rollout.rollout_id, segment.index))
    if values is None or len(values) != len(segment.token_ids):
        raise ValueError(
            f"advantages: rollout {rollout.rollout_id!r} has {len(segment.token_ids)} tokens in segment "
            f"{segment.index}, but {'no' if values is None else len(values)} advantages; pass one for each token"
        )
    return values


def _within(by_segment: Mapping[int, Floats], segment: Segment) -> Floats:
    """Return one advantage for each token of a segment: its own if the token was sampled, otherwise 0.

    `by_segment` contains the advantages of each segment's tokens, by segment index.
    """
    return np.where(segment.sampled, by_segment[segment.index], np.float32(0))


def _batch(
    groups: Sequence[Group],
    rollouts: Sequence[Rollout],
    samples: tuple[Sample, ...],
    with_signal: set[str],
    *,
    branches: bool = False,
) -> SampleBatch:
    """Return the samples as a batch, and count the groups, rollouts and tokens that they come from.

    `with_signal` contains the ids of the groups with a signal. `branches` says whether branches were cut into
    samples, too.
    """
    scored = [rollout for rollout in rollouts if rollout.reward is not None]
    return SampleBatch(
        samples=samples,
        groups=len(groups),
        groups_without_signal=sum(group.group_id not in with_signal for group in groups),
        rollouts=len(rollouts),
        rollouts_failed=sum(rollout.reward is None for rollout in rollouts),
        rollouts_trained=len({sample.rollout_id for sample in samples}),
        trained_tokens=sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples),
        places={group.place: group.group_id for group in groups if group.place is not None},
        untrained_tokens=sum(_tokens(r.segments) - _tokens(_trained(r, branches=branches)) for r in scored),
    )


def _tokens(segments: Sequence[Segment]) -> int:
    """Return the number of sampled tokens in these segments."""
    return sum(int(np.count_nonzero(segment.sampled)) for segment in segments)


def _refuse_without_ids(rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        turns = (turn for segment in _trained(rollout, branches=True) for turn in segment.turns)
        if any(turn.versions[0].version == NO_POLICY for turn in turns):
            raise ValueError(
                f"rollout {rollout.rollout_id!r} was sampled from an endpoint, which returns neither token ids nor "
                "log-probabilities; train on rollouts of an engine that does, such as ag.TransformersEngine or SGLang"
            )


def _refuse_repeated_ids(rollouts: Sequence[Rollout]) -> None:
    for name, count in Counter(rollout.rollout_id for rollout in rollouts).items():
        if count > 1:
            raise ValueError(f"rollout {name!r} appears {count} times; each rollout needs a unique id")


def demonstrations(rollouts: Sequence[Rollout], *, context_weight: float = 0.0) -> list[Sample]:
    """Turn rollouts into samples to imitate, one per segment, for a trainer with the loss "sft".

    ::

        ids       P  P  a  a  e  a  e     P prompt, a sampled, e from the environment
        weight    .  w  1  1  w  1        w is context_weight; everything after the last sampled token is left out

    Segments that aren't trained make no samples. The weights are stored in the samples' `advantages`. Rewards are
    ignored, so the caller must choose the rollouts to imitate.

    Args:
        rollouts: The rollouts to imitate.
        context_weight: Weight, in 0..1, of tokens that weren't sampled. With 0, only the sampled tokens are trained.

    Raises:
        ValueError: If `context_weight` is outside 0..1, or if a rollout has no token ids.
    """
    if not 0 <= context_weight <= 1:
        raise ValueError(f"context_weight: must be in 0..1, got {context_weight}")
    _refuse_without_ids(rollouts)
    return [_demonstration(rollout, segment, context_weight) for rollout in rollouts for segment in _trained(rollout)]


def _demonstration(rollout: Rollout, segment: Segment, context_weight: float) -> Sample:
    start, stop = 1 if context_weight else segment.turns[0].start, segment.turns[-1].stop
    sampled = segment.sampled[start:stop]
    return Sample(
        group_id=rollout.group_id,
        rollout_id=rollout.rollout_id,
        segment=segment.index,
        step=0,
        prompt_ids=segment.token_ids[:start],
        response_ids=segment.token_ids[start:stop],
        loss_mask=np.ones_like(sampled) if context_weight else sampled,
        logprobs=np.zeros(len(sampled), np.float32),
        advantages=np.where(sampled, np.float32(1), np.float32(context_weight)),
        weight=float(sampled.sum() / _tokens(_trained(rollout))),
    )


def _cut(
    rollout: Rollout,
    advantages_of: Callable[[Segment], Floats],
    *,
    merged: bool,
    branches: bool = False,
) -> Iterator[Sample]:
    """Yield the samples of one rollout, in the order of its segments and turns.

    Args:
        rollout: The rollout.
        advantages_of: Returns one advantage for each token of a segment. The advantages of tokens that weren't
            sampled are ignored.
        merged: Whether to make one sample per segment, instead of one per turn.
        branches: Whether to cut the segments of scored branches, too.
    """
    segments = _trained(rollout, branches=branches)
    total = _tokens(segments)
    for segment in segments:
        advantages = advantages_of(segment)
        for step, turns in _spans(segment.turns, merged=merged):
            start, stop = turns[0].start, turns[-1].stop
            sampled, values = segment.sampled[start:stop], advantages[start:stop]
            yield Sample(
                group_id=rollout.group_id,
                rollout_id=rollout.rollout_id,
                segment=segment.index,
                step=step,
                prompt_ids=segment.token_ids[:start],
                response_ids=segment.token_ids[start:stop],
                loss_mask=sampled,
                logprobs=segment.logprobs[start:stop],
                advantages=values if len(turns) == 1 else np.where(sampled, values, np.float32(0)),
                weight=sum([turn.stop - turn.start for turn in turns]) / total,
            )


def _spans(turns: tuple[Turn, ...], *, merged: bool) -> Iterator[tuple[int, tuple[Turn, ...]]]:
    """Divide a segment's turns into samples.

    Yields:
        For each sample, the index of its first turn in the segment, and its turns.
    """
    if merged:
        yield 0, turns
    else:
        yield from ((step, (turn,)) for step, turn in enumerate(turns))
