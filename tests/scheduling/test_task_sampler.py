"""The order of tasks: shared out over processes, and gone on with on another number of them."""

import itertools
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import agentgym as ag
from agentgym.environments.env import Split
from agentgym.scheduling.task_sampler import Draw, Place, merge_states


def task(number: int) -> ag.Task:
    return ag.Task(id=f"t{number}", prompt=(ag.Message(role="user", content="Say."),))


class Many(ag.ToolEnv[ag.Task]):
    """A thousand tasks."""

    @classmethod
    def tasks(cls, split: Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(task, range(1000))


def draw(world: int, rank: int, by_id: bool = False, places: Any = ()) -> Draw[ag.Task]:
    return Draw(Many, 4, seed=3, rank=rank, world=world, by_id=by_id, places=places)


def ids(tasks: Any, count: int) -> list[str]:
    return [task.id for task in itertools.islice(tasks, count)]


ORDER = ids(draw(1, 0), 400)


def test_a_draw_goes_on_where_another_one_was() -> None:
    first = draw(1, 0)
    ids(first, 9)
    assert ids(draw(1, 0, places=[first.place(Place(drawn=9))]), 20) == ORDER[9:29]


def test_what_was_drawn_and_not_played_comes_first() -> None:
    first = draw(1, 0)
    ids(first, 9)
    again = draw(1, 0, places=[first.place(Place(drawn=9, unplayed=(2, 7)))])
    assert ids(again, 4) == [ORDER[2], ORDER[7], ORDER[9], ORDER[10]]


def test_a_second_stop_before_those_were_drawn_forgets_none() -> None:
    first = draw(1, 0)
    ids(first, 9)
    second = draw(1, 0, places=[first.place(Place(drawn=9, unplayed=(2, 5, 7)))])
    ids(second, 2)
    third = draw(1, 0, places=[second.place(Place(drawn=2, unplayed=(1,)))])
    assert ids(third, 3) == [ORDER[5], ORDER[7], ORDER[9]]


@given(
    worlds=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 25)), min_size=1, max_size=4),
    by_id=st.booleans(),
    dice=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_over_any_stops_on_any_number_of_processes_each_task_is_played_once(
    worlds: list[tuple[int, int]], by_id: bool, dice: Any
) -> None:
    played: Counter[str] = Counter()
    places: list[Place] = []
    for world, most in [*worlds, (1, 0)]:
        draws = [draw(world, rank, by_id, places) for rank in range(world)]
        places = []
        for one in draws:
            drawn = ids(one, dice.randint(0, most))
            unplayed = sorted(dice.sample(range(len(drawn)), dice.randint(0, len(drawn))))
            played.update(name for number, name in enumerate(drawn) if number not in unplayed)
            places.append(one.place(Place(drawn=len(drawn), unplayed=tuple(unplayed))))
    rest = ids(draw(1, 0, by_id, places), 400 - played.total())
    assert played.total() == len(played)
    assert not played.keys() & set(rest)
    assert played.keys() | set(rest) == set(ORDER)


def test_the_first_process_takes_over_all_that_was_in_play() -> None:
    places = [
        Place(batches=3, started=1, resumed=2, tokens=10, requests={"started": 4, "dropped": 4}),
        Place(batches=3, resumed=1, tokens=5, requests={"started": 1, "finished": 1}),
    ]
    first, second = merge_states(places, 0), merge_states(places, 1)
    assert (first.batches, first.started, first.resumed, first.tokens) == (3, 1, 3, 15)
    assert first.requests == {"started": 5, "dropped": 4, "finished": 1}
    assert second == Place(batches=3)
    assert merge_states((), 0) == Place()
