"""How the embedded engine samples: from a truncated distribution if told to, and up to a stop text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentgym as ag
from agentgym.engines.transformers.model import Part
from agentgym.types.completion import Completion, Sampling
from tests.engines.transformers.test_engine import CONTEXT, assert_plain, batcher_over, build

MODEL = Path(__file__).parents[3] / "recipes" / "checkpoints" / "chase"
PROBS = (0.4, 0.3, 0.2, 0.1)


class Fixed(torch.nn.Module):
    """An output layer with the same distribution for every hidden state."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor(PROBS).log().expand(len(hidden), -1)


def drawn(part: dict[str, Any]) -> set[int]:
    """Return all ids that can be sampled: one for each of a thousand uniforms."""
    policy = batcher_over(build(head_dim=8)).policy
    policy._head = Fixed()
    how = Sampling(**part)
    rows = 1000
    uniform = ((np.arange(rows) + 0.5) / rows).astype(np.float32)
    bounds = Part(
        np.full(rows, how.top_p, np.float32),
        np.full(rows, how.top_k or CONTEXT, np.int64),
        np.full(rows, how.min_p, np.float32),
    )
    ids, logprobs = policy.draw(torch.zeros(rows, 4), np.ones(rows, np.float32), uniform, bounds)
    np.testing.assert_allclose(logprobs, np.log(np.array(PROBS, np.float32))[ids], atol=1e-5)
    counts = np.bincount(ids, minlength=len(PROBS)) / rows
    kept = np.array(PROBS) * (counts > 0)
    np.testing.assert_allclose(counts, kept / kept.sum(), atol=0.01)
    return set(ids.tolist())


@pytest.mark.parametrize(
    ("part", "ids"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.75}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.45}, {0, 1, 2}),
        ({"min_p": 0.45, "top_p": 0.5}, {0, 1}),
        ({"top_k": 3, "min_p": 0.7}, {0, 1}),
    ],
)
def test_a_truncated_distribution_is_sampled_in_proportion_with_logprobs_of_the_whole(
    part: dict[str, Any], ids: set[int]
) -> None:
    assert drawn(part) == ids


async def said(engine: ag.TransformersEngine, how: Sampling, ids: Sequence[int], session: str) -> Completion:
    return await engine.generate(ids, session=session, max_tokens=40, sampling=how, seed=3)


async def test_rows_with_other_sampling_settings_change_no_other_row() -> None:
    async with ag.TransformersEngine(MODEL, ag.TransformersConfig(slots=1)) as engine:
        ids = engine.tokenizer.encode("Start at key 31.")
        alone = await said(engine, Sampling(temperature=0.7), ids, "a")
        top = await said(engine, Sampling(temperature=0.7, top_k=1), ids, "b")
        greedy = await said(engine, Sampling(temperature=0), ids, "c")
        again = await said(engine, Sampling(temperature=0.7), ids, "d")
        assert top.token_ids.tolist() == greedy.token_ids.tolist()
        assert again.token_ids.tolist() == alone.token_ids.tolist()
        scored = await engine.score([*ids, *top.token_ids.tolist()], sampling=Sampling(temperature=0.7))
        np.testing.assert_allclose(top.logprobs, scored[len(ids) - 1 :], atol=1e-4)


async def test_a_turn_ends_with_its_stop_text() -> None:
    async with ag.TransformersEngine(MODEL, ag.TransformersConfig(slots=2)) as engine:
        read = engine.tokenizer.decode
        ids = engine.tokenizer.encode("Start at key 31.")
        whole = await said(engine, Sampling(temperature=0.7), ids, "whole")
        text = read(whole.token_ids.tolist())
        stop = text[4:7]
        cut = await said(engine, Sampling(temperature=0.7, stop=("never", stop)), ids, "cut")
        assert cut.finish_reason == "stop_text"
        assert whole.token_ids.tolist()[: len(cut.token_ids)] == cut.token_ids.tolist()
        assert stop in read(cut.token_ids.tolist())
        assert stop not in read(cut.token_ids.tolist()[:-1])
        assert_plain(engine._batcher.policy.model, ids, cut)  # type: ignore[union-attr]


async def test_a_special_token_named_as_stop_text_is_a_stop_token() -> None:
    async with ag.TransformersEngine(MODEL, ag.TransformersConfig(slots=1)) as engine:
        engine._batcher._stop_ids = np.zeros(0, np.int64)  # type: ignore[union-attr]
        tokenizer: Any = engine.tokenizer
        ids = tokenizer.encode("<|im_start|>user\nStart at key 31.<|im_end|>\n<|im_start|>assistant\n")
        done = await said(engine, Sampling(temperature=0, stop=("<|im_end|>",)), ids, "s")
        assert done.finish_reason == "stop"
        assert done.token_ids[-1] == tokenizer.special_token_ids["<|im_end|>"]
