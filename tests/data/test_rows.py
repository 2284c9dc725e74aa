"""Rows of lists, data sets, tables and frames as tasks."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import Field

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.environments.task_rows import as_tasks
from agentgym.scheduling import batches, run_groups


class Sum(ag.Task):
    answer: int
    hint: str = "none"
    store: dict[str, str] = Field(default_factory=dict)


class Sums(ag.ToolEnv[Sum]):
    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Rows[Sum]:
        rows = ag.Rows(PLAIN, Sum, id="number", prompt="question", columns={"answer": "sum"})
        return rows[:1] if split == "train" else rows[1:]

    @ag.reward
    def right(self) -> float:
        return float(self.answer == str(self.task.answer))


PLAIN: list[dict[str, Any]] = [
    {"number": 7, "question": "2+3?", "sum": 5, "hint": "count", "source": "a", "store": {"x": "1"}},
    {"number": 8, "question": "2+4?", "sum": 6, "hint": None, "source": "b", "store": {"y": "2"}},
]
"""The rows of every data set in these tests: a hint and keys of `store` are missing in some."""
JSONL = [{key: value for key, value in row.items() if value is not None} for row in PLAIN]


def list_of_dicts() -> Any:
    return JSONL


def arrow_table() -> Any:
    return pytest.importorskip("pyarrow", reason="needs pyarrow").Table.from_pylist(PLAIN)


def data_set() -> Any:
    return pytest.importorskip("datasets", reason="needs datasets").Dataset.from_list(PLAIN)


def pandas_frame() -> Any:
    return pytest.importorskip("pandas", reason="needs pandas").DataFrame(PLAIN)


def polars_frame() -> Any:
    return pytest.importorskip("polars", reason="needs polars").DataFrame(PLAIN)


SOURCES = [list_of_dicts, arrow_table, data_set, pandas_frame, polars_frame]


@pytest.mark.parametrize("source", SOURCES)
def test_each_kind_of_data_gives_the_same_tasks_without_filled_in_nones(source: Callable[[], Any]) -> None:
    rows = ag.Rows(source(), Sum, id="number", prompt="question", columns={"answer": "sum"})
    assert list(rows) == [
        Sum(id="7", prompt="2+3?", answer=5, hint="count", store={"x": "1"}),
        Sum(id="8", prompt="2+4?", answer=6, hint="none", store={"y": "2"}),
    ]
    assert rows[-1] == rows[1:][0] == rows[::-1][0]
    with pytest.raises(IndexError):
        rows[2]


def test_rows_are_read_lazily_also_in_slices() -> None:
    asked: list[int] = []

    class Disk:
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> dict[str, Any]:
            asked.append(index)
            return {"id": index, "prompt": "x", "answer": index}

    rows = ag.Rows(Disk(), Sum)[500:]
    assert (len(rows), asked) == (999_500, [0])
    assert (rows[1].id, asked) == ("501", [0, 501])


def test_functions_of_the_row_make_prompt_id_and_columns() -> None:
    rows = ag.Rows(
        [{"a": 2, "b": 3}],
        Sum,
        id=lambda row: f"{row['a']}+{row['b']}",
        prompt=lambda row: [{"role": "user", "content": f"{row['a']}+{row['b']}?"}],
        columns={"answer": lambda row: row["a"] + row["b"]},
    )
    assert rows[0] == Sum(id="2+3", prompt="2+3?", answer=5)


def test_rows_without_an_id_are_numbered_and_keep_their_numbers_in_slices() -> None:
    rows = ag.Rows([{"prompt": "x", "answer": i} for i in range(4)], Sum, id=None)
    assert [task.id for task in rows[2:]] == ["2", "3"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"id": "nummer"}, "^id: the data has no column 'nummer'; did you mean 'number'"),
        ({"prompt": "text"}, "^prompt: the data has no column 'text'"),
        ({"columns": {"answer": "summ"}}, "^answer: the data has no column 'summ'; did you mean 'sum'"),
        ({"columns": {"answers": "sum"}}, "^columns: Sum has no field 'answers'; did you mean 'answer'"),
        ({"columns": {"id": "number"}}, "^columns: 'id' has its own argument"),
        ({"columns": {}}, r"^columns: no column for Sum.answer; pass columns=\{'answer': ...\}"),
    ],
)
def test_an_unknown_column_or_field_is_refused_before_a_row_is_read(given: Any, why: str) -> None:
    named = {"id": "number", "prompt": "question", "columns": {"answer": "sum"}}
    with pytest.raises(ValueError, match=why):
        ag.Rows(PLAIN, Sum, **(named | given))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"train": [], "test": []}, "^data: expected one sequence of rows, got a mapping with the keys train, test"),
        (iter(PLAIN), "^data: must have a length and rows by index, got list_iterator"),
        (set(), "^data: must have a length and rows by index, got set"),
        ("rows", "^data: must have a length and rows by index, got str"),
        ([{"prompt": "x"}, 3], "^data: a row must be a dict of columns, but row 1 is 3"),
    ],
)
def test_data_that_is_not_a_sequence_of_rows_is_refused(data: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ag.Rows(data, Sum)


def test_a_row_that_is_not_a_task_is_refused_by_its_number_and_field() -> None:
    data = [{"id": 1, "prompt": "x", "answer": 1}, {"id": 2, "prompt": "x", "answer": "one"}]
    with pytest.raises(ValueError, match=r"^data: row 1: answer: .*valid integer.*'one'"):
        ag.Rows(data, Sum)[1]
    with pytest.raises(ValueError, match=r"^data: row 0: answer: the function raised KeyError: 'sum'"):
        ag.Rows(data, Sum, columns={"answer": lambda row: row["sum"]})[0]


async def test_an_env_can_use_rows_as_its_tasks() -> None:
    groups = await run_groups(Sums, Sums.tasks("train"), Scripted([say("5")]), n=1)
    assert [rollout.reward for rollout in groups.rollouts] == [1.0]
    assert [task.id for batch in batches(Sums, 1, 2, seed=0) for task in batch] == ["7", "7"]


@pytest.mark.parametrize("source", [arrow_table, pandas_frame, polars_frame])
def test_a_table_in_place_of_tasks_is_an_error_that_mentions_rows(source: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"whose \[index\] does not return a row; write ag\.Rows\(table, Sum\)"):
        as_tasks(Sums, source())
