"""A rollout's time in pieces: placed where they happened, or laid out one after another and labeled as such."""

from dataclasses import replace
from pathlib import Path

import pytest

from agentgym.types.rollout import Rollout
from agentgym.view.timeline import timeline
from tests.store.test_store import rollout
from tests.view.made_runs import talk


def told(played: Rollout) -> list[tuple[str, int | None, float, float]]:
    return [(piece["what"], piece["turn"], piece["from_s"], piece["to_s"]) for piece in timeline(played)[0]]


def test_pieces_are_placed_where_they_happened() -> None:
    played = replace(rollout(segments=(talk("said"),)), metrics={"seconds": 3.5})
    assert timeline(played)[1] is True
    assert told(played) == [
        ("open", None, 0.0, 0.5),
        ("wait", 0, 0.5, 0.625),
        ("generate", 0, 0.625, 1.5),
        ("tool", 0, 1.5, 1.75),
        ("generate", 1, 2.0, 2.5),
        ("score", None, 2.5, 3.5),
    ]


def test_without_times_turns_are_laid_out_one_after_another_and_labeled() -> None:
    played = replace(rollout(), metrics={"seconds": 2.0})
    assert timeline(played)[1] is False
    assert told(played) == [
        ("generate", 0, 0.0, 0.25),
        ("tool", 0, 0.25, 0.75),
        ("generate", 1, 0.75, 1.0),
        ("tool", 1, 1.0, 1.5),
        ("score", None, 1.5, 2.0),
    ]


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_a_rollout_without_turns_has_no_pieces(seconds: float, tmp_path: Path) -> None:
    played = replace(rollout(reward=None, segments=()), metrics={"seconds": seconds})
    assert timeline(played) == ([], False)
