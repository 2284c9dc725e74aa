"""A teacher's scores compared with the student's own, token by token."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.base import Engine
from agentgym.engines.teacher import divergence, teacher_advantages
from agentgym.testing import ByteTokenizer
from tests.test_samples import rollout, segment

PARTS = (("context", [65, 66]), ("turn", [67, 68]), ("context", [69]), ("turn", [70]))


class Shifted(ByteTokenizer):
    """A tokenizer that decodes each id as the next letter."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode([i + 1 for i in token_ids])


class Teacher:
    """A teacher whose score of an id is `scale` times the id; it records each request's sampling."""

    def __init__(self, tokenizer: Any = None, context_tokens: int = 100, scale: float = -0.01) -> None:
        self.tokenizer, self.context_tokens, self.scale = tokenizer or ByteTokenizer(), context_tokens, scale
        self.asked: list[ag.Sampling] = []

    async def score(self, token_ids: Sequence[int], *, sampling: ag.Sampling) -> list[float]:
        self.asked.append(sampling)
        return [self.scale * i for i in token_ids[1:]]


def engine(teacher: Teacher) -> Engine:
    return cast("Engine", teacher)


async def test_an_advantage_is_teacher_minus_student_logprob_at_the_sampling_temperature() -> None:
    played, teacher = rollout("a", 0.0, segment(0, *PARTS), segment(1, *PARTS)), Teacher()
    sampling = ag.Sampling(temperature=0.7)
    found = await teacher_advantages([played], engine(teacher), engine(Teacher()), sampling=sampling)
    student = -0.1  # times the id, in these tests' segments
    wanted = [(-0.01 - student) * i * sampled for i, sampled in zip(range(65, 71), (0, 0, 1, 1, 0, 1), strict=True)]
    assert set(found) == {("a", 0), ("a", 1)}
    for values in found.values():
        np.testing.assert_allclose(values, wanted, rtol=1e-5)
    assert teacher.asked == [sampling, sampling]
    assert divergence([played], found) == pytest.approx(-sum(wanted) / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("teacher", "said"),
    [
        (Teacher(Shifted()), "^teacher: its tokenizer decodes the ids of rollout 'a' to different text"),
        (
            Teacher(context_tokens=5),
            "^teacher: a segment has 6 tokens, but the teacher's context is 5; set teacher_engine",
        ),
        (
            Teacher(scale=float("nan")),
            "^teacher: its engine returned 5 scores for 6 ids, or scores that are not finite",
        ),
    ],
)
async def test_a_teacher_that_cannot_score_the_students_tokens_is_refused(teacher: Teacher, said: str) -> None:
    played = rollout("a", 0.0, segment(0, *PARTS))
    with pytest.raises(ValueError, match=said):
        await teacher_advantages([played], engine(teacher), engine(Teacher()), sampling=ag.Sampling())
