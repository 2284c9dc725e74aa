"""On-policy distillation: scores how likely a teacher finds each token that a student sampled.

A token's advantage is the teacher's log-probability minus the student's, both at the sampling temperature. The mean
advantage over the student's samples is -KL(student || teacher). The policy gradient therefore minimizes this divergence
along the student's own contexts (GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543).
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from agentgym.engines.base import Engine
from agentgym.types.arrays import Floats
from agentgym.types.completion import Sampling
from agentgym.types.rollout import Rollout, Segment

SegmentKey: TypeAlias = tuple[str, int]
"""A rollout's id and the index of one of its segments."""


async def teacher_advantages(
    rollouts: Sequence[Rollout],
    teacher: Engine,
    student: Engine,
    *,
    sampling: Sampling,
    concurrency: int = 64,
) -> dict[SegmentKey, Floats]:
    """Return an advantage for each token of each trained segment: the teacher's log-probability minus the student's.

    ::

        ids         P  P  a  a  e  a      P prompt, a sampled, e from the environment
        advantage   0  0  A  A  0  A      A = log p(teacher) - log p(student), in nats

    Args:
        rollouts: Rollouts that were sampled with `sampling`.
        teacher: The engine that scores the segments.
        student: The engine that sampled them. Only its tokenizer is used.
        sampling: Sampling parameters of the rollouts.
        concurrency: Maximum number of segments that are scored at the same time.

    Raises:
        ValueError: If the teacher's tokenizer decodes the ids to different text than the student's, if the teacher's
            context is too short, or if the teacher doesn't return one finite score for each id except the first.
    """
    places = asyncio.Semaphore(concurrency)

    async def scored(rollout: Rollout, segment: Segment) -> tuple[SegmentKey, Floats]:
        async with places:
            _refuse_other_words(rollout, segment, teacher, student)
            return (rollout.rollout_id, segment.index), await _advantages(segment, teacher, sampling)

    sampled = [(rollout, segment) for rollout in rollouts for segment in rollout.segments if _is_taught(segment)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scored(rollout, segment)) for rollout, segment in sampled]
    except ExceptionGroup as errors:  # Not `except*`: before 3.11.4, Python wraps exceptions raised inside one.
        raise errors.exceptions[0] from None
    return dict(task.result() for task in tasks)


async def _advantages(segment: Segment, teacher: Engine, sampling: Sampling) -> Floats:
    """Return the advantage of each token of one segment; 0 for tokens that weren't sampled."""
    ids = segment.token_ids.tolist()
    if len(ids) > teacher.context_tokens:
        raise ValueError(
            f"teacher: a segment has {len(ids)} tokens, but the teacher's context is {teacher.context_tokens}; set "
            "teacher_engine.context_tokens, or lower the env's limits.context_tokens"
        )
    # The first id has no score because nothing precedes it. It is never sampled.
    scores = np.concatenate([[0.0], np.asarray(await teacher.score(ids, sampling=sampling), np.float64)])
    if len(scores) != len(ids) or not np.isfinite(scores).all():
        raise ValueError(
            f"teacher: its engine returned {len(scores) - 1} scores for {len(ids)} ids, or scores that are not finite; "
            "it must return one finite log-probability for each id except the first"
        )
    return np.where(segment.sampled, scores - segment.logprobs, 0.0).astype(np.float32)


def _refuse_other_words(rollout: Rollout, segment: Segment, teacher: Engine, student: Engine) -> None:
    """Raise ValueError if the teacher's tokenizer decodes a segment's ids differently from the student's."""
    ids = segment.token_ids.tolist()
    if teacher.tokenizer.decode(ids) != student.tokenizer.decode(ids):
        raise ValueError(
            f"teacher: its tokenizer decodes the ids of rollout {rollout.rollout_id!r} to different text than the "
            "student's; use a teacher with the student's vocabulary"
        )


def _is_taught(segment: Segment) -> bool:
    return segment.trained and bool(segment.turns)


def divergence(rollouts: Sequence[Rollout], advantages: Mapping[SegmentKey, Floats]) -> float:
    """Return KL(student || teacher) in nats per token, estimated from the sampled tokens of rollouts with a reward.

    The result is NaN if there are no such tokens.
    """
    values = [
        advantages[rollout.rollout_id, segment.index][segment.sampled]
        for rollout in rollouts
        if rollout.reward is not None
        for segment in rollout.segments
        if _is_taught(segment)
    ]
    return -float(np.concatenate(values).mean()) if values else float("nan")
