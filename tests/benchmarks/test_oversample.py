"""The scheduler with long-tailed latencies, in virtual time, compared with a simulation of its policy."""

import pytest

from agentgym.scheduling.oversampling import OversampleConfig
from benchmarks.harness import load_workloads
from benchmarks.oversample import ENDLESS, Policy, measure, stuck_rows, tail_rows

POLICIES = {
    "all": Policy(groups=24),
    "all, in groups": Policy(groups=6, size=4),
    "target": Policy(groups=24, settings=OversampleConfig(stop="target", extra_groups=6)),
    "extra rollouts": Policy(groups=6, size=4, settings=OversampleConfig(stop="target", extra_rollouts=2)),
    "deadline": Policy(groups=30, settings=OversampleConfig(stop="deadline")),
    "carried": Policy(groups=24, settings=OversampleConfig(stop="target", extra_groups=6, carry=ENDLESS)),
    "carried groups": Policy(groups=6, size=4, settings=OversampleConfig(stop="target", extra_groups=6, carry=ENDLESS)),
}


@pytest.mark.parametrize("places", [10, ENDLESS])
@pytest.mark.parametrize("name", POLICIES)
def test_the_scheduler_agrees_with_a_simulation_of_its_policy(name: str, places: int) -> None:
    rows = tail_rows(load_workloads(None), seed=1)[:400]
    figures = measure("it", rows, POLICIES[name], batches=4, places=places)
    assert figures["it_off_simulation"] < 1e-9
    assert figures["it_s"] > 0
    if POLICIES[name].settings.carry:
        assert figures["it_rollouts_lost"] == 0


def test_groups_are_complete_even_if_some_rollouts_hang() -> None:
    policy = Policy(groups=16, size=8, settings=OversampleConfig(stop="target", extra_groups=16))
    figures = measure("it", stuck_rows(0), policy, batches=1, places=ENDLESS)
    assert figures["it_whole_groups"] == 16
    assert figures["it_s"] < 0.2
