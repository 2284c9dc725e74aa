"""The order of tasks: divided among processes, and resumed on another number of them."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import agentgym as ag
from agentgym.environments.env import Split
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.sampler_state import InPlay
from agentgym.scheduling.task_sampler import SampledTask, Sharding, TaskSampler, batches


def task(number: int) -> ag.Task:
    return ag.Task(id=f"t{number}", prompt=(ag.Message(role="user", content="Say."),))


class Many(ag.ToolEnv[ag.Task]):
    """An env with a thousand tasks."""

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(task, range(1000))


def sampler(world: int, rank: int, by_id: bool = False, states: Any = (), seed: int = 3) -> TaskSampler[ag.Task]:
    made = TaskSampler.for_training(Many, Sharding(prompts=4, rank=rank, world=world, by_id=by_id), seed=seed)
    if states:
        made.load_state_dict([json.loads(json.dumps(state)) for state in states])
    return made


def draw(one: TaskSampler[ag.Task], count: int, *, unplayed: Any = ()) -> list[str]:
    """Return the ids of the next tasks; all of them run, except those at the `unplayed` positions."""
    drawn = [one.next() for _ in range(count)]
    for position, sampled in enumerate(drawn):
        assert sampled is not None
        if position not in unplayed:
            one.played(sampled.number)
    return [sampled.task.id for sampled in drawn if sampled is not None]


ORDER = draw(sampler(1, 0), 400)


def test_a_sampler_continues_from_anothers_state() -> None:
    first = sampler(1, 0)
    draw(first, 9)
    assert draw(sampler(1, 0, states=[first.state_dict()]), 20) == ORDER[9:29]


def test_drawn_tasks_that_did_not_run_come_first() -> None:
    first = sampler(1, 0)
    draw(first, 9, unplayed=(2, 7))
    again = sampler(1, 0, states=[first.state_dict()])
    assert draw(again, 4) == [ORDER[2], ORDER[7], ORDER[9], ORDER[10]]


def test_a_second_stop_before_they_are_drawn_forgets_none() -> None:
    first = sampler(1, 0)
    draw(first, 9, unplayed=(2, 5, 7))
    second = sampler(1, 0, states=[first.state_dict()])
    draw(second, 2, unplayed=(1,))
    third = sampler(1, 0, states=[second.state_dict()])
    assert draw(third, 3) == [ORDER[5], ORDER[7], ORDER[9]]


def test_each_id_belongs_to_one_of_three_processes() -> None:
    processes = [Sharding(prompts=3, rank=rank, world=3, by_id=True) for rank in range(3)]
    owners = [[process.rank for process in processes if process.owns_id(f"t{number}")] for number in range(99)]
    assert all(len(owner) == 1 for owner in owners)
    assert {rank for (rank,) in owners} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(20))
def test_a_task_that_runs_for_many_rounds_does_not_block_others(seed: int) -> None:
    class Few(ag.ToolEnv[ag.Task]):
        @classmethod
        def tasks(cls, split: Split) -> list[ag.Task]:
            return [ag.Task(id=f"t{number}", prompt="x") for number in range(4)]

    sampler = TaskSampler.for_training(Few, Sharding(prompts=2), seed=seed)
    stays = sampler.next()
    assert stays is not None
    found = Counter[str]()
    for _ in range(300):
        sampled = sampler.next({stays.task.id})
        assert sampled is not None
        found[sampled.task.id] += 1
        sampler.played(sampled.number)
    assert len(found) == 3
    assert max(found.values()) < 1.5 * min(found.values())
    assert len(sampler.state_dict()["unplayed"]) == 2  # the running one, and its repetition
    sampler.played(stays.number)
    again = sampler.next()
    assert again is not None
    assert again.task.id == stays.task.id


@given(
    worlds=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 25)), min_size=1, max_size=4),
    by_id=st.booleans(),
    dice=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_over_any_stops_on_any_number_of_processes_each_task_runs_once(
    worlds: list[tuple[int, int]], by_id: bool, dice: Any
) -> None:
    rollout: Counter[str] = Counter()
    states: list[dict[str, Any]] = []
    for world, most in [*worlds, (1, 0)]:
        samplers = [sampler(world, rank, by_id, states) for rank in range(world)]
        for one in samplers:
            count = dice.randint(0, most)
            unplayed = dice.sample(range(count), dice.randint(0, count))
            drawn = draw(one, count, unplayed=unplayed)
            rollout.update(name for position, name in enumerate(drawn) if position not in unplayed)
        states = [one.state_dict() for one in samplers]
    rest = draw(sampler(1, 0, by_id, states), 400 - rollout.total())
    assert rollout.total() == len(rollout)
    assert not rollout.keys() & set(rest)
    assert rollout.keys() | set(rest) == set(ORDER)


def two_states() -> list[dict[str, Any]]:
    """Return the states of two processes after three batches, with groups running."""
    left = [
        InPlay(started=1, resumed=2, tokens=10, requests={"started": 4, "dropped": 4}),
        InPlay(resumed=1, tokens=5, requests={"started": 1, "finished": 1}),
    ]
    made = []
    for rank in range(2):
        one = sampler(2, rank)
        for _ in range(3):
            draw(one, 2)
            one.batch_done()
        made.append(one.state_dict(left[rank]))
    return made


def test_the_first_process_takes_over_everything_that_was_running() -> None:
    first, second = (sampler(2, rank, states=two_states()) for rank in range(2))
    assert first.batches == second.batches == 3
    assert first.lost == InPlay(started=1, resumed=3, tokens=15, requests={"started": 5, "dropped": 4, "finished": 1})
    assert second.lost == InPlay()


def test_running_items_are_lost_only_once() -> None:
    first = sampler(1, 0, states=two_states())
    assert sampler(1, 0, states=[first.state_dict()]).lost == first.lost != InPlay()
    first.batch_done()
    assert sampler(1, 0, states=[first.state_dict()]).lost == InPlay()


def test_a_task_has_one_number_in_the_run_and_keeps_it_after_a_resume() -> None:
    first = sampler(2, 1)
    numbers = {one.task.id: one.number for one in (first.next() for _ in range(6)) if one}
    assert numbers == {ORDER[number]: number for number in (1, 3, 5, 7, 9, 11)}
    second = sampler(1, 0, states=[sampler(2, 0).state_dict(), first.state_dict()])
    again = [second.next() for _ in range(12)]
    assert [one.number for one in again if one] == list(range(12))


def test_a_task_whose_id_is_in_use_waits_and_is_not_lost_by_a_stop() -> None:
    one = TaskSampler(map(task, (0, 1, 0, 2)))
    assert draw(one, 2) == ["t0", "t1"]
    passed = one.next(taken={"t0"})
    assert passed is not None
    assert (passed.number, one.state_dict()["unplayed"]) == (3, [2, 3])
    waited = one.next()
    assert waited is not None
    assert (waited.number, waited.task.id, one.next()) == (2, "t0", None)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (r"sampler\.version: the state has version 1, but only 3", {"version": 1}),
        (r"sampler\.version: the state has version None", {"version": None}),
        (r"sampler\.drawn: ", {"drawn": -1}),
        (r"sampler\.drawn: ", {"drawn": 1.5}),
        (r"sampler\.by_id: ", {"by_id": 0}),
        (r"sampler\.places: ", {"places": []}),
        (r"sampler\.in_play\.tokens: ", {"in_play": {"tokens": "3"}}),
        (r"sampler\.in_play: counts", {"in_play": {"requests": {"started": 3, "finished": 1}}}),
        (r"sampler.*unplayed: must be ascending numbers below drawn \(6\)", {"unplayed": [6]}),
        (r"sampler.*unplayed: must be ascending", {"unplayed": [3, 1]}),
        (r"sampler.*rank: must be below world", {"rank": 4}),
        (r"sampler\.prompts: the state has 3, but this run has 4", {"prompts": 3}),
        (r"sampler\.by_id: the state has True, but this run has False", {"by_id": True}),
        (r"tasks: number 5 is 't\d+', but was 'x' in the resumed run", {"last_id": "x"}),
    ],
)
def test_an_invalid_state_is_refused_by_name(name: str, change: dict[str, Any]) -> None:
    first = sampler(1, 0)
    draw(first, 6)
    with pytest.raises(ValueError, match=rf"^{name}"):
        sampler(1, 0, states=[first.state_dict() | change])


def test_states_must_cover_all_processes_in_rank_order() -> None:
    states = two_states()
    for wrong in (states[:1], states[::-1], [*states, states[1]]):
        with pytest.raises(ValueError, match=r"^sampler: pass the states of all processes in the order of their ranks"):
            sampler(1, 0, states=wrong)


@pytest.mark.parametrize(
    ("states", "got"),
    [
        ([], "an empty list"),
        ([None], "NoneType at position 0"),
        (None, "NoneType"),
        ("[]", "str"),
        (sampler(1, 0).state_dict(), r"one dict; write \[state\]"),
        ([sampler(2, 0).state_dict(), [1]], "list at position 1"),
    ],
)
def test_an_invalid_list_of_states_is_refused_with_advice(states: Any, got: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^sampler: pass a list with the state_dict\(\) of each process.*; got {got}$"
    ):
        sampler(1, 0).load_state_dict(states)


def test_a_state_that_json_cannot_represent_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^sampler: the state was not returned by state_dict\(\)"):
        sampler(1, 0).load_state_dict([sampler(1, 0).state_dict() | {"last_id": object()}])


def test_another_order_of_tasks_or_too_few_of_them_is_refused() -> None:
    first = sampler(1, 0)
    draw(first, 6)
    with pytest.raises(ValueError, match=r"^tasks: number 5 is .* resume with the same env, prompts and seed"):
        sampler(1, 0, states=[first.state_dict()], seed=4)
    few = TaskSampler(map(task, range(3)))
    many = TaskSampler(map(task, range(9)))
    draw(many, 6)
    with pytest.raises(ValueError, match=r"^tasks: there are only 3, but the resumed run had drawn 6"):
        few.load_state_dict([many.state_dict()])


def test_a_sampler_that_has_returned_tasks_accepts_no_state() -> None:
    first = sampler(1, 0)
    draw(first, 1)
    with pytest.raises(ValueError, match=r"^sampler: has already handed out tasks"):
        first.load_state_dict([sampler(1, 0).state_dict()])


class Two(Many):
    """An env with two tasks that belong to the same one of two processes by their ids."""

    @classmethod
    def tasks(cls, split: Split) -> Any:
        return [task(number) for number in (0, 2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_with_too_few_tasks_is_refused_on_all_processes(rank: int) -> None:
    sharding = Sharding(prompts=2, rank=rank, world=2, by_id=True)
    assert len({sharding.owner(SampledTask(0, each)) for each in Two.tasks("train")}) == 1
    with pytest.raises(
        ValueError, match=r"^prompts_per_step: process \d of 2 runs 1 tasks of a batch, but only 0 of the 2 training"
    ):
        TaskSampler.for_training(Two, sharding, seed=0)


class Pairs(Many):
    """An env with a hundred tasks, two per id."""

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(lambda number: task(number // 2), range(100))


class Generated(Many):
    """An env with an endless stream of tasks that have eight ids."""

    @classmethod
    def tasks(cls, split: Split) -> Any:
        return ag.Endless(lambda seed: (task((seed + number) // 2 % 8) for number in itertools.count()))


class Same(Many):
    """An env whose tasks all have one id."""

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(lambda number: task(1), range(100))


@pytest.mark.parametrize("env", [Pairs, Generated])
def test_a_batch_has_each_id_once_even_if_an_env_repeats_some(env: type[Many]) -> None:
    for batch in batches(env, 7, 40, seed=1):
        assert len({each.id for each in batch}) == 7


def test_an_env_with_fewer_ids_than_a_batch_has_tasks_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^prompts_per_step: a batch needs 2 tasks, but the env has only 1 different ids, and then repeated them "
        r"\d+ time",
    ):
        next(batches(Same, 2, 1, seed=0))


def test_processes_that_run_beyond_their_share_need_tasks_assigned_by_id() -> None:
    cut = OversampleConfig(stop="target", extra_rollouts=1)
    crossing = (OversampleConfig(replace=1), replace(cut, extra_groups=1), replace(cut, carry=1))
    assert [each.crosses_batches for each in (OversampleConfig(), cut, *crossing)] == [False, False, True, True, True]
