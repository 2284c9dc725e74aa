"""Tests of frozen_lake, walked by scripts."""

import pytest

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, say
from agentgym.environments import GameTask
from agentgym.scheduling import run_groups
from agentgym.testing import check_env
from envs.frozen_lake.env import FrozenLake, make_grid

TASK = GameTask(id="lake", prompt=FrozenLake.rules, seed=11)


def walk(*steps: str) -> list[Reply]:
    return [call("move", action=step) for step in steps]


async def test_frozen_lake_keeps_the_contract_of_an_env() -> None:
    await check_env(FrozenLake, TASK, oracle=FrozenLake.oracle(TASK))


@pytest.mark.parametrize(("size", "holes"), [(2, 0.0), (4, 0.2), (8, 0.4)])
async def test_a_shortest_path_reaches_the_goal_in_every_grid(size: int, holes: float) -> None:
    env = FrozenLake.configured(size=size, holes=holes)
    for task in env.tasks("test")[:5]:
        played = await ag.rollout(env, task, Scripted(env.oracle(task)))
        assert (played.reward, played.stop_reason) == (1.0, "over"), played


async def test_a_hole_ends_the_walk_without_a_reward() -> None:
    seed = next(seed for seed in range(99) if make_grid(seed, 4, 0.2)[0][1] == "H")
    task = GameTask(id=seed, prompt="?", seed=seed)
    played = await ag.rollout(FrozenLake, task, Scripted(walk("right")))
    assert (played.reward, played.stop_reason) == (0.0, "over")
    assert "You fell into a hole." in str(played)


async def test_the_edge_blocks_a_step_and_an_unknown_step_gets_the_legal_ones() -> None:
    played = await ag.rollout(FrozenLake, TASK, Scripted([*walk("up", "north"), say("?")]))
    assert "error: illegal move: the edge is up of you; step elsewhere" in str(played)
    assert "error: illegal move: 'north' is not one of left, down, right, up" in str(played)
    assert (played.metrics["illegal_moves"], played.reward) == (2.0, 0.0)


async def test_slippery_ice_slips_the_same_way_each_time() -> None:
    env, steps = FrozenLake.configured(slippery=0.9, holes=0.0), Scripted([*walk(*["right", "down"] * 3), say("?")])
    first, again = [await ag.rollout(env, TASK, steps) for _ in range(2)]
    assert first.text().split("metrics")[0] == again.text().split("metrics")[0]
    dry = await ag.rollout(FrozenLake.configured(holes=0.0), TASK, steps)
    assert dry.transcript()[0].messages != first.transcript()[0].messages


async def test_each_attempt_of_an_evaluation_slips_differently_on_the_same_lake() -> None:
    env, steps = FrozenLake.configured(slippery=0.9, holes=0.0), Scripted([*walk(*["right", "down"] * 3), say("?")])
    played = (await ag.evaluate(env, steps, tasks=[TASK], k=6)).rollouts
    ways = [str(rollout.transcript()[0].messages) for rollout in played]
    assert len(set(ways)) > 4
    together = (await run_groups(env, [TASK], steps, n=6)).rollouts
    assert len({str(rollout.transcript()[0].messages) for rollout in together}) == 1
