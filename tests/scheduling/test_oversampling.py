"""Oversampling settings: invalid ones are refused by name."""

from typing import Any

import pytest

from agentgym.engines.scripted import Scripted
from agentgym.scheduling.oversampling import OversampleConfig, share_of
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from tests.scheduling.scheduled import Say, cut, tasks


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("extra_groups", {"stop": "target", "extra_groups": -1}),
        ("replace", {"replace": -1}),
        ("stop", {"stop": "soon"}),
        ("stop", {"stop": "target"}),
        ("extra_groups", {"extra_groups": 2}),
        ("extra_rollouts", {"extra_rollouts": 2}),
        ("carry", {"carry": 1}),
    ],
)
def test_invalid_oversampling_settings_are_refused_by_name(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        OversampleConfig(**settings)


@pytest.mark.parametrize(
    ("field", "settings", "staleness"),
    [
        ("extra_groups", cut(extra_groups=1), 1),
        ("carry", cut(extra_rollouts=1, carry=1), 1),
        ("stop", OversampleConfig(stop="deadline"), 1),
        ("max_staleness", OversampleConfig(), -1),
        ("replace", OversampleConfig(replace=1), 0),
    ],
)
def test_settings_that_do_not_fit_the_run_are_refused_by_name(field: str, settings: Any, staleness: int) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        Scheduler(Say, tasks(), Scripted([]), Schedule(group_size=1, oversample=settings, max_staleness=staleness))


def test_shares_are_rounded_before_they_are_cut() -> None:
    assert [share_of(10, 1 - 0.2), share_of(128, 1 - 0.2)] == [8, 102]
    assert [share_of(10, 1 - 0.9), share_of(1000, 1 - 0.9)] == [1, 100]
