"""The step samples of a workload as samples from Python lists, and as the rollouts that a driver returns."""

from collections.abc import Iterator
from itertools import groupby
from struct import pack
from typing import Any

import numpy as np

from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from agentgym.types.sample import Sample
from benchmarks.layout.step_lists import Stretch, joined, stretches


def make_samples(batch: Any, *, merge: bool = False) -> list[Sample]:
    """Return the workload's rows as samples made from Python lists, with `merge` one sample per stretch of rows.

    The reward stands in for the advantage. Lists are joined first, and each number is converted once: the ids of a
    stretch's samples are views of one array.
    """
    trained = np.array([mask.count(1) for mask in batch.loss_masks])
    share = (trained / np.bincount(batch.traj, trained)[batch.traj]).tolist()
    cut = _whole if merge else _by_turn
    return [sample for stretch in stretches(batch) for sample in cut(batch, stretch, share)]


def _by_turn(batch: Any, stretch: Stretch, share: list[float]) -> Iterator[Sample]:
    ids = _vector("q", stretch.ids)
    for row, start in zip(stretch.rows, stretch.starts, strict=True):
        stop = start + len(batch.responses[row])
        columns = batch.loss_masks[row], batch.logprobs[row], batch.rewards[row]
        yield _sample(stretch, row, ids[:start], ids[start:stop], columns, share[row])


def _whole(batch: Any, stretch: Stretch, share: list[float]) -> Iterator[Sample]:
    ids = _vector("q", stretch.ids)
    start = stretch.starts[0]
    columns = tuple(joined(batch, stretch, column) for column in (batch.loss_masks, batch.logprobs, batch.rewards))
    weight = sum(share[row] for row in stretch.rows)
    yield _sample(stretch, stretch.rows[0], ids[:start], ids[start:], columns, weight)


def _sample(stretch: Stretch, row: int, prompt: Any, response: Any, columns: Any, weight: float) -> Sample:
    mask, logprobs, rewards = columns
    return Sample(
        group_id=str(stretch.group),
        rollout_id=str(stretch.rollout),
        segment=stretch.segment,
        step=row,
        prompt_ids=prompt,
        response_ids=response,
        loss_mask=np.frombuffer(bytes(mask), np.bool_),
        logprobs=_vector("f", logprobs),
        advantages=_vector("f", rewards),
        weight=weight,
    )


def _vector(code: str, numbers: list[Any]) -> Any:
    """Return an array of these numbers; `pack` reads a list in two thirds of numpy's time."""
    return np.frombuffer(pack(f"{len(numbers)}{code}", *numbers), code)


def make_groups(batch: Any) -> list[Group]:
    """Return the workload as groups of rollouts, as a run has them.

    Rewards differ a little, so that no group is left out.
    """
    rollouts = []
    for number, parts in groupby(stretches(batch), lambda stretch: stretch.rollout):
        mine = list(parts)
        reward = sum(sum(batch.rewards[row]) for stretch in mine for row in stretch.rows)
        rollouts.append(
            Rollout(
                rollout_id=str(number),
                group_id=str(mine[0].group),
                segments=tuple(_segment(batch, i, stretch) for i, stretch in enumerate(mine)),
                reward=reward + number / 1000,
                stop_reason="done",
            )
        )
    by_group = groupby(rollouts, lambda rollout: rollout.group_id)
    return [Group(group_id=name, rollouts=tuple(members)) for name, members in by_group]


def _segment(batch: Any, index: int, stretch: Stretch) -> Segment:
    """Return a segment whose turns are the trained ids, which come first in each row's response."""
    size, prompt = len(stretch.ids), stretch.starts[0]
    sampled, logprobs = np.zeros(size, np.bool_), np.zeros(size, np.float32)
    sampled[prompt:] = joined(batch, stretch, batch.loss_masks)
    logprobs[prompt:] = joined(batch, stretch, batch.logprobs)
    turns = tuple(
        Turn(
            start=start,
            stop=start + sum(batch.loss_masks[row]),
            finish_reason="stop",
            versions=(Version(0, 0),),
            message={"role": "assistant", "content": ""},
            number=row,
        )
        for row, start in zip(stretch.rows, stretch.starts, strict=True)
    )
    return Segment(
        index=index,
        parent=None if index == 0 else index - 1,
        kind="root" if index == 0 else "compaction",
        token_ids=np.array(stretch.ids, np.int64),
        sampled=sampled,
        logprobs=np.where(sampled, logprobs, np.float32(0)),
        turns=turns,
    )
