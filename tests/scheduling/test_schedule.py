"""A schedule is a config: invalid values are refused by field name."""

from typing import Any

import pytest

import agentgym as ag
from agentgym.scheduling import Schedule


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"group_size": 0}, "group_size: must be at least 1, got 0"),
        ({"group_size": 2.5}, "group_size: must be a valid integer, got 2.5"),
        ({"group_size": 2, "prompts_per_step": "8"}, "prompts_per_step: must be a valid integer, got '8'"),
        ({"group_size": 2, "concurrency": 0}, "concurrency: must be at least 1, got 0"),
        ({"group_size": 2, "max_staleness": -1}, "max_staleness: must be at least 0, got -1"),
        ({"group_size": 2, "seed": -1}, "seed: must be at least 0, got -1"),
        ({"group_size": 2, "branching": 3}, "branching: must be an instance of BranchingConfig"),
        ({"n": 2}, "Schedule: there is no field 'n'; did you mean 'group_size'?"),
        ({"group_size": 2, "prompts": 8}, "Schedule: there is no field 'prompts'; did you mean 'prompts_per_step'?"),
        ({}, "Schedule: required but missing: group_size"),
    ],
)
def test_an_invalid_schedule_is_refused_by_its_field(given: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        Schedule(**given)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../a"])
def test_a_recipe_name_cannot_lead_out_of_the_runs_folder(name: str) -> None:
    with pytest.raises(ValueError, match=r"^recipe: expected a folder name within runs/, without '/', got "):
        ag.RunConfig(recipe=name, env="nim", model="m")
