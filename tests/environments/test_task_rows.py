"""Tasks as people write them and as data sets store them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import agentgym as ag
from agentgym.cli.envs.names import task_of
from agentgym.engines.scripted import Scripted, say
from agentgym.environments.env import Split
from agentgym.environments.task_rows import TaskRows, as_task, as_tasks, task_type
from agentgym.errors import EnvError
from agentgym.run.preflight import hold_checked
from agentgym.scheduling import run_groups
from agentgym.scheduling.task_sampler import batches
from agentgym.testing.env_checks.declared import check_tasks

USER = {"role": "user", "content": "2+3?"}


class Sum(ag.Task):
    answer: str


class Table:
    """A data set like those of `datasets`: rows are dicts, and slicing gives a dict of columns."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(self.count))

    def __getitem__(self, index: Any) -> dict[str, Any]:
        if not isinstance(index, int):
            raise TypeError(f"unhashable type: {type(index).__name__!r}")
        if not -self.count <= index < self.count:
            raise IndexError(index)
        return {"id": index, "prompt": f"{index}+1?", "answer": str(index + 1)}


class Sums(ag.ToolEnv[Sum]):
    @classmethod
    def tasks(cls, split: Split) -> Any:
        return Table(6)

    @ag.reward
    def right(self) -> float:
        return float(self.answer == self.task.answer)


@pytest.mark.parametrize("prompt", ["2+3?", USER, [USER], (USER,), iter([USER])])
def test_a_prompt_is_text_a_message_or_a_sequence_of_messages(prompt: Any) -> None:
    assert ag.Task(id="t", prompt=prompt).prompt == (USER,)


@pytest.mark.parametrize("prompt", ["", 3, None, b"text", [], [3]])
def test_any_other_prompt_is_refused_by_field(prompt: Any) -> None:
    if prompt == "":
        assert ag.Task(id="t", prompt=prompt).prompt == ({"role": "user", "content": ""},)
        return
    with pytest.raises(ValidationError, match="prompt"):
        ag.Task(id="t", prompt=prompt)


def test_an_integer_is_converted_to_an_id_and_other_types_are_not() -> None:
    assert ag.Task(id=7, prompt="x").id == "7"
    for bad in (7.5, True, None):
        with pytest.raises(ValidationError, match="id"):
            ag.Task(id=bad, prompt="x")  # type: ignore[arg-type]


def test_nones_that_arrow_filled_in_are_dropped_from_messages_but_not_from_arguments() -> None:
    call = {"id": None, "type": "function", "function": {"name": "look", "arguments": {"at": None}}}
    filled = {**USER, "name": None, "tool_calls": None, "reasoning_content": None, "tool_call_id": None}
    asked = {"role": "assistant", "content": "", "tool_calls": [call], "name": None}
    task = ag.Task.model_validate({"id": "t", "prompt": [filled, asked]})
    kept = {"type": "function", "function": {"name": "look", "arguments": {"at": None}}}
    assert task.prompt == (USER, {"role": "assistant", "content": "", "tool_calls": [kept]})


def test_content_of_none_is_refused_by_field() -> None:
    with pytest.raises(ValidationError, match=r"prompt\.0\.content"):
        ag.Task.model_validate({"id": "t", "prompt": [{"role": "user", "content": None}]})


async def test_the_classs_system_message_precedes_a_prompt_that_has_none() -> None:
    env = type("Polite", (Sums,), {"system": "Be polite."})
    own = {"role": "system", "content": "Be brief."}
    assert (await env(Sum(id="a", prompt="x", answer="")).reset())[0] == [
        {"role": "system", "content": "Be polite."},
        {"role": "user", "content": "x"},
    ]
    assert (await env(Sum(id="a", prompt=[own, USER], answer="")).reset())[0] == [own, USER]  # type: ignore[list-item]


async def test_changes_to_the_first_messages_do_not_reach_the_task() -> None:
    task = Sum(id="a", prompt="x", answer="")
    messages, _ = await Sums(task).reset()
    messages[0]["content"] += " Think first."
    assert task.prompt[0]["content"] == "x"


def test_an_envs_task_type_is_found_through_its_base_classes() -> None:
    class Harder(Sums):
        pass

    class Bare(ag.ToolEnv):  # type: ignore[type-arg]
        pass

    assert (task_type(Sums), task_type(Harder), task_type(Bare)) == (Sum, Sum, ag.Task)


def test_rows_become_tasks_one_by_one_without_slicing() -> None:
    tasks = as_tasks(Sums, Table(6))
    assert isinstance(tasks, TaskRows)
    assert len(tasks) == 6
    assert tasks[2] == Sum(id="2", prompt="2+1?", answer="3")
    assert [task.id for task in tasks[1:][::2]] == ["1", "3", "5"]
    assert tasks[-1].id == "5"
    with pytest.raises(IndexError):
        tasks[6]


def test_a_sequence_of_tasks_is_used_unchanged() -> None:
    tasks = [Sum(id="a", prompt="x", answer="")]
    assert as_tasks(Sums, tasks) is tasks
    assert as_task(Sums, tasks[0]) is tasks[0]


@pytest.mark.parametrize(
    ("tasks", "why"),
    [
        ({"train": [], "test": []}, "^tasks: give one sequence of tasks, got a mapping with the keys train, test"),
        (ag.Task(id="t", prompt="x"), "^tasks: pass a list of tasks, got the single task 't'"),
    ],
)
def test_values_that_are_not_a_sequence_of_tasks_are_refused(tasks: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        as_tasks(Sums, tasks)


@pytest.mark.parametrize(
    ("row", "why"), [({"id": "t", "prompt": "x"}, "answer"), ("x", "needs a Sum or a dict of its")]
)
async def test_a_row_that_is_not_a_task_is_refused_by_field(row: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        await ag.rollout(Sums, row, Scripted([say("1")]))


async def test_rollouts_groups_and_batches_accept_rows() -> None:
    row: Any = Table(6)[4]
    assert (await ag.rollout(Sums, row, Scripted([say("5")]))).reward == 1.0
    rows: Any = Table(2)
    groups = await run_groups(Sums, rows, Scripted(lambda text: say("1")), n=2)
    assert [[r.reward for r in group.rollouts] for group in groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert {type(task) for batch in batches(Sums, 3, 2, seed=1) for task in batch} == {Sum}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"id": "b"},
            r"prompt: Field required, got .*; if other columns hold the fields, use ag.Rows\(data, Sum, ...\)$",
        ),
        (
            {"id": "b", "prompt": [{"role": "user"}], "answer": "1"},
            "prompt.0.content: Field required, got {'role': 'user'}$",
        ),
        ({"id": "b", "prompt": "x", "answer": "1", "answr": "y"}, "answr: Extra inputs are not permitted, got 'y'$"),
        ({"id": "\ud800", "prompt": "x", "answer": "y"}, "id: Input should be a valid string"),
        (None, "task: Sums needs a Sum or a dict of its fields, got None"),
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_is_not_a_task_gives_one_line_with_its_number(row: Any, said: str, place: int) -> None:
    rows: list[Any] = [{"id": f"a{number}", "prompt": "x", "answer": "1"} for number in range(2)]
    rows.insert(place, row)
    with pytest.raises(ValueError, match=rf"^data: row {place}: {said}") as refused:
        [*as_tasks(Sums, rows)]
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("given", ["abc", None, 3, (row for row in "abc"), {"a", "b"}])
def test_values_that_are_not_list_like_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^tasks: pass a sequence of tasks, such as a list, got "):
        as_tasks(Sums, given)


def test_a_list_may_mix_tasks_and_rows() -> None:
    given = [Sum(id="a", prompt="x", answer="1"), {"id": "b", "prompt": "x", "answer": "2"}]
    assert [task.id for task in as_tasks(Sums, given)] == ["a", "b"]


class Unsliced:
    """Tasks that support indexing but not slicing."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Sum:
        return Sum.model_validate(Table(6)[index])


def dataset() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(list(Table(6)))


@pytest.mark.parametrize("make", [dataset, lambda: Table(6), Unsliced, lambda: np.array(list(Table(6)), dtype=object)])
@pytest.mark.parametrize("n", [None, 2])
async def test_an_env_whose_tasks_are_a_data_set_can_be_evaluated(make: Callable[[], Any], n: int | None) -> None:
    class Held(Sums):
        @classmethod
        def tasks(cls, split: Split) -> Any:
            return make()

    evaluation = await ag.evaluate(Held, Scripted(lambda text: say("1")), n=n)
    assert [group.group_id for group in evaluation.groups] == [str(i) for i in range(n or 6)]
    assert check_tasks(Held)[0].wrong.startswith("train and test share")


async def test_a_slice_of_a_data_set_is_a_sequence_of_tasks() -> None:
    columns = {"id": [0, 1], "prompt": ["0+1?", "1+1?"], "answer": ["1", "2"]}
    part: Any = dataset()[:2]
    assert part == columns
    assert [task.answer for task in as_tasks(Sums, part)] == ["1", "2"]
    assert [task.answer for task in ag.Rows(part, Sum)] == ["1", "2"]
    assert len(as_tasks(Sums, {name: [] for name in columns})) == 0
    groups = await run_groups(Sums, part, Scripted(lambda text: say("1")), n=2)
    assert [[r.reward for r in group.rollouts] for group in groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert (await ag.evaluate(Sums, Scripted(lambda text: say("1")), tasks=part)).reward == 0.5


@pytest.mark.parametrize(
    "given",
    [
        {"train": [{"id": 1, "prompt": "x", "answer": "1"}], "test": [{"id": 2, "prompt": "x", "answer": "1"}]},
        {"id": [1], "prompt": ["x", "y"], "answer": ["1"]},
        {"id": [1], "prompt": ["x"]},
        {"id": "ab", "prompt": "xy", "answer": "12"},
    ],
)
def test_a_mapping_that_is_not_a_slice_of_a_data_set_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^tasks: give one sequence of tasks, got a mapping with the keys"):
        as_tasks(Sums, given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (row for row in Table(6)),
        lambda: None,
        lambda: {1, 2},
        lambda: {"train": []},
        lambda: 3,
        lambda: dataset().to_iterable_dataset(),
        lambda: pytest.importorskip("pandas").DataFrame(list(Table(6))),
    ],
)
async def test_tasks_that_are_not_a_sequence_are_refused_by_the_methods_name(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    class Wrong(Sums):
        @classmethod
        def tasks(cls, split: Split) -> Any:
            return make()

    with pytest.raises(ValueError, match=r"^Wrong\.tasks\('test'\): (give|pass|got) "):
        await ag.evaluate(Wrong, Scripted([say("1")]), n=2)
    with pytest.raises(ValueError, match=r"^Wrong\.tasks\('train'\): (give|pass|got) "):
        next(iter(batches(Wrong, 2, 1, seed=0)))
    with pytest.raises(EnvError, match=r"Wrong\.tasks\('train'\).*: (give|pass|got) "):
        task_of(Wrong, "train", 0, None)
    run = ag.RunConfig(recipe="wrong", env="wrong", model="tiny", max_steps=1, prompts_per_step=2, eval_tasks=0)
    with (
        pytest.raises(ValueError, match=r"^Wrong\.tasks\('train'\): (give|pass|got) "),
        hold_checked(run, Wrong, tmp_path),
    ):
        pass
