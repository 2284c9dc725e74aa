"""A tiny random model and random rollouts of every shape: turns, context between them, several segments."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch

from agentgym.types.completion import Version
from agentgym.types.rollout import Group, Rollout, Segment, SegmentKind, Turn

VOCAB = 48


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a random two-layer Qwen3."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            initializer_range=0.2,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def make_segment(
    rng: np.random.Generator, index: int, turns: Sequence[tuple[int, int]], *, tail: int = 0, version: int = 0
) -> Segment:
    """Return a segment of (context tokens, sampled tokens) pairs."""
    spans, at = [], 0
    for context, sampled in turns:
        spans.append((at + context, at + context + sampled))
        at += context + sampled
    n = at + tail
    mask = np.zeros(n, np.bool_)
    for start, stop in spans:
        mask[start:stop] = True
    return Segment(
        index=index,
        parent=None if index == 0 else index - 1,
        kind="root" if index == 0 else "compaction",
        token_ids=rng.integers(2, VOCAB, n),
        sampled=mask,
        logprobs=np.where(mask, rng.normal(-3.8, 0.2, n), 0),
        turns=tuple(_turn(start, stop, version + i) for i, (start, stop) in enumerate(spans)),
    )


def _turn(start: int, stop: int, version: int = 0) -> Turn:
    return Turn(
        start=start,
        stop=stop,
        finish_reason="stop",
        versions=(Version(0, version),),
        message={"role": "assistant", "content": ""},
    )


def make_groups(seed: int = 0, *, groups: int = 3, size: int = 3) -> list[Group]:
    """Return groups of rollouts with one to three segments of one to three turns, with widely varying lengths."""
    rng = np.random.default_rng(seed)

    def one(group: int, i: int) -> Rollout:
        segments = [
            make_segment(
                rng,
                index,
                [(int(rng.integers(1, 9)), int(rng.integers(1, 7))) for _ in range(rng.integers(1, 4))],
                tail=int(rng.integers(0, 4)),
            )
            for index in range(rng.integers(1, 4))
        ]
        return Rollout(
            rollout_id=f"g{group}/r{i}",
            group_id=f"g{group}",
            segments=tuple(segments),
            reward=float(i) + float(rng.integers(0, 2)),
            stop_reason="done",
        )

    return [Group(group_id=f"g{g}", rollouts=tuple(one(g, i) for i in range(size))) for g in range(groups)]


@pytest.fixture(scope="session")
def groups_of() -> Callable[..., list[Group]]:
    return make_groups


Choose: TypeAlias = Callable[[int, int], int]
"""Draws an integer between two bounds, both included."""
Said: TypeAlias = list[tuple[list[int], list[int]]]
"""Turns as pairs of context ids and sampled ids."""


def grow_groups(choose: Choose, *, groups: int = 2, size: int = 3) -> list[Group]:
    """Return groups whose samples share tokens as real ones do.

    The rollouts of a group share a prompt and the turns of a segment a prefix; two rollouts sample the same first
    turns, forks copy the content of their parent, and compactions start again after the prompt.
    """

    def some(low: int, high: int) -> list[int]:
        return [choose(2, 5) for _ in range(choose(low, high))]

    def turns(before: Said) -> Said:
        return [*before, *((some(1, 3), some(1, 4)) for _ in range(choose(1, 3)))]

    def rollout(group: int, i: int, prompt: list[int], said: Said) -> Rollout:
        root = _lay(0, "root", prompt, said)
        segments = [root]
        if choose(0, 1):
            taken = root.token_ids[: root.turns[choose(0, len(root.turns) - 1)].stop].tolist()
            segments.append(_lay(len(segments), "fork", taken, turns([])))
        if choose(0, 1):
            segments.append(_lay(len(segments), "compaction", prompt + some(1, 3), turns([])))
        return Rollout(
            rollout_id=f"g{group}/r{i}",
            group_id=f"g{group}",
            segments=tuple(segments),
            reward=i + choose(0, 3) / 4,
            stop_reason="done",
        )

    made = []
    for g in range(groups):
        prompt = some(1, 6)
        said: Said = []
        rollouts = []
        for i in range(size):
            said = turns(said[: choose(0, len(said))])
            rollouts.append(rollout(g, i, prompt, said))
        made.append(Group(group_id=f"g{g}", rollouts=tuple(rollouts)))
    return made


def _lay(index: int, kind: SegmentKind, taken: list[int], said: Said) -> Segment:
    """Return a segment of the tokens in `taken`, which another segment sampled, followed by turns."""
    ids, spans = list(taken), []
    for context, sampled in said:
        ids += context
        spans.append((len(ids), len(ids) + len(sampled)))
        ids += sampled
    mask = np.zeros(len(ids), np.bool_)
    for start, stop in spans:
        mask[start:stop] = True
    return Segment(
        index=index,
        parent=None if index == 0 else 0,
        kind=kind,
        token_ids=np.array(ids),
        sampled=mask,
        logprobs=np.where(mask, -3 - np.arange(len(ids)) % 7 / 4, 0),
        turns=tuple(_turn(start, stop) for start, stop in spans),
    )


@pytest.fixture(scope="session")
def grown() -> Callable[..., list[Group]]:
    """Return `grow_groups` with numbers from a seed or from a drawing function."""

    def grow(source: int | Choose, **sizes: int) -> list[Group]:
        if isinstance(source, int):
            rng = np.random.default_rng(source)
            return grow_groups(lambda low, high: int(rng.integers(low, high + 1)), **sizes)
        return grow_groups(source, **sizes)

    return grow
