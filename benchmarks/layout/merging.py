"""Joins samples of single turns into samples of segments, for workloads that have no rollouts."""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from agentgym.types.sample import Sample


def merge(samples: Sequence[Sample]) -> list[Sample]:
    """Join the samples of a segment's turns while each prompt extends the prompt and response before it.

    ::

        step 0   P  a  a                  step 1's prompt is P a a e e: it extends step 0
        step 1   P  a  a  e  e  a
        merged   P  a  a  e  e  a         mask 1 1 0 0 1, logprob and advantage 0 where mask is 0

    Neighbors are found by rollout, segment and step, whatever the order of the samples. If a prompt doesn't extend
    what came before it, a new sample starts; no trained token is lost or trained twice.
    """
    segments: dict[tuple[str, int], list[Sample]] = {}
    for sample in samples:
        segments.setdefault((sample.rollout_id, sample.segment), []).append(sample)
    return list(chain.from_iterable(_merged(steps) for steps in segments.values()))


def _merged(steps: list[Sample]) -> Iterator[Sample]:
    """Yield the merged samples of one segment."""
    steps = sorted(steps, key=lambda sample: sample.step)
    run = steps[:1]
    for before, sample in pairwise(steps):
        if not _extends(before, sample):
            yield _joined(run)
            run = []
        run.append(sample)
    yield _joined(run)


def _extends(before: Sample, sample: Sample) -> bool:
    """Return whether the prompt of `sample` begins with the prompt and response of `before`."""
    n = len(before.prompt_ids)
    return (
        len(sample.prompt_ids) >= len(before)
        and np.array_equal(sample.prompt_ids[:n], before.prompt_ids)
        and np.array_equal(sample.prompt_ids[n : len(before)], before.response_ids)
    )


def _joined(run: list[Sample]) -> Sample:
    """Return one sample made of steps that extend each other."""
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    start = len(first.prompt_ids)
    length = len(last) - start
    mask = np.zeros(length, np.bool_)
    logprobs, advantage_values = np.zeros(length, np.float32), np.zeros(length, np.float32)
    for sample in run:
        at = slice(len(sample.prompt_ids) - start, len(sample) - start)
        mask[at] = sample.loss_mask
        logprobs[at] = np.where(sample.loss_mask, sample.logprobs, 0)
        advantage_values[at] = np.where(sample.loss_mask, sample.advantages, 0)
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
        weight=sum(sample.weight for sample in run),
    )
