"""A task's identity: its fields have one canonical form in every process, from which a store restores the same task."""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretBytes,
    SecretStr,
    computed_field,
    field_serializer as written_by,
)

import agentgym as ag
from agentgym.data.content import content, refuse_unkept, same_fields, task_fields, task_of
from agentgym.engines.scripted import Scripted, say
from agentgym.evals.rescore import rescore
from agentgym.run.preflight import hold_checked
from tests.data.odd_tasks import Color, Holder, Inner, Place, Point, Typed, made

IN_ANOTHER_PROCESS = """
from agentgym.data.content import content
from tests.data.odd_tasks import Inner, Place, Typed, made
names = {"alpha", "beta", "gamma", "delta", "epsilon"}
task = made(Typed, names=names, place=Place("b", frozenset(names)), inner=Inner(names=names), many=[Inner(names=names)],
            pairs={(1, "b"), (1, "a"), (0, "c")}, by_color={"red": {3, 1}, "blue": {2}})
print(content(task), content(made(value=[names, {1, "1", None, (1, 2)}, {"deep": names}])))
"""


def test_a_task_has_the_same_content_in_every_process() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
    assert "['alpha', 'beta', 'delta', 'epsilon', 'gamma']" in said.pop()


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ({"b", "a"}, ["a", "b"]),
        (frozenset([3, 11, 2]), [2, 3, 11]),
        ({1, "1", None, Color.RED}, ["1", "red", 1, None]),
        ({Place("b"), Place("a")}, [{"name": "a", "around": []}, {"name": "b", "around": []}]),
        (Color.RED, "red"),
        ({Color.RED: 1, 2: 3, True: 5}, {"red": 1, "2": 3, "true": 5}),
        (np.float32(0.5), 0.5),
        (np.arange(2000), list(range(2000))),
        (np.array([["a", "b"]]), [["a", "b"]]),
        (np.datetime64("2024-01-01T00:00:00", "ns"), "2024-01-01T00:00:00.000000000"),
        (Point(1, 2), [1, 2]),
        (b"text", "text"),
        (b"\xff", {"base64": "/w=="}),
        (datetime(2024, 1, 1, tzinfo=UTC), "2024-01-01T00:00:00Z"),
        (float("inf"), float("inf")),
        ({"a": 1}.keys(), ["a"]),
        (range(3), [0, 1, 2]),
    ],
)
def test_values_without_a_json_form_are_written_by_value(value: Any, written: Any) -> None:
    held = made()
    object.__setattr__(held, "value", value)
    assert task_fields(held)["value"] == written


def test_a_task_whose_fields_have_aliases_is_restored() -> None:
    class Deep(BaseModel):
        size: int = Field(alias="Size")

    class Aliased(ag.Task):
        x: int = Field(alias="X")
        y: int = Field(validation_alias="Y", serialization_alias="why")
        deep: Deep

    task = made(Aliased, X=1, Y=2, deep={"Size": 3})
    refuse_unkept([task])
    assert task_of(Aliased, task_fields(task)) == task
    assert content(task) != content(made(Aliased, X=1, Y=2, deep={"Size": 4}))


class Blob(ag.Task):
    data: bytes


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (Blob, {"data": b"\xff"}, {"data": b"/w=="}),
        (Holder, {"value": [b"\xff"]}, {"value": [b"/w=="]}),
        (Holder, {"value": np.array([np.nan])}, {"value": np.array([np.inf])}),
        (Holder, {"value": {"deep": [np.float32("inf")]}}, {"value": {"deep": [np.float32("-inf")]}}),
        (Holder, {"value": np.array([[1.0, np.nan]])}, {"value": np.array([[1.0, None]])}),
        (Holder, {"value": {"a": float("nan")}.values()}, {"value": {"a": float("inf")}.values()}),
    ],
)
def test_different_fields_are_different_content(kind: type[ag.Task], one: Any, other: Any) -> None:
    assert content(made(kind, **one)) == content(made(kind, **one))
    assert content(made(kind, **one)) != content(made(kind, **other))


def test_bytes_that_are_not_utf8_are_refused_with_how_to_store_them() -> None:
    with pytest.raises(ValueError, match=r"^Blob\.data: .* write `model_config = pydantic\.ConfigDict\(ser_json_bytes"):
        refuse_unkept([made(Blob, data=b"\xff")])


def later(text: str) -> bool:
    return bool(text)


class Judge:
    def __call__(self, text: str) -> bool:
        return bool(text)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            later,
            r"^Holder\.value: .* got a function; keep the key that selects it, .* `Field\(exclude=True\)`",
        ),
        (lambda text: True, r"^Holder\.value: .* got a function"),
        (len, r"^Holder\.value: .* got a function"),
        (partial(later, "x"), r"^Holder\.value: .* got a function"),
        ({"judges": [later]}, r"^Holder\.value\.judges\.0: .* got a function"),
        (
            Judge(),
            r"^Holder\.value: .* got a Judge; keep the data that it is made from, or write `Field\(exclude=True\)`",
        ),
        (Inner.model_construct(names={later}), r"^Holder\.value\.names\.0: .* got a function"),
        (SecretStr("x"), r"^Holder\.value: a SecretStr is .* write `value: str = Field\(repr=False\)`"),
        ([SecretBytes(b"x")], r"^Holder\.value\.0: a SecretBytes"),
        ({(1, 2): 3}, None),
    ],
)
def test_a_field_without_a_text_form_is_refused_by_name(value: Any, said: str | None) -> None:
    if said is None:  # pydantic can serialize such a key as text
        assert task_fields(made(value=value))["value"] == {"1,2": 3}
        return
    with pytest.raises(ValueError, match=said):
        content(made(value=value))


def test_a_secret_in_a_field_or_nested_model_is_refused_by_name() -> None:
    class Kept(BaseModel):
        word: SecretStr

    class Asked(ag.Task):
        right: Kept

    with pytest.raises(ValueError, match=r"^Asked\.right\.word: a SecretStr"):
        content(made(Asked, right={"word": "moon"}))


@pytest.mark.parametrize("seed", range(3))
def test_a_stored_task_is_restored_unchanged(seed: int) -> None:
    names = {f"{seed}{letter}" for letter in "abc"}
    task = made(
        Typed,
        names=names,
        pairs={(seed, "a"), (1, "b")},
        color="blue",
        by_color={"red": {1, 2}},
        place=Place("b", frozenset(names)),
        inner=Inner(names=names),
        many=[Inner(names=names, data=b"x")],
        score=float("nan") if seed == 1 else 0.1,
    )
    refuse_unkept([task])
    back = task_of(Typed, task_fields(task))
    assert same_fields(task_fields(back), task_fields(task))
    assert (back.names, back.by_color, back.point) == (names, {Color.RED: {1, 2}}, Point(1, 2))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            {"a"},
            r"^Holder\.value: a stored task has \['a'\], but this task has {'a'}; give it a type .* such as set\[str\]",
        ),
        ({"deep": [(1,)]}, r"^Holder\.value\.deep\.0: a stored task has \[1\], but this task has \(1,\)"),
        (b"\xff", r"^Holder\.value: .* write `model_config = pydantic\.ConfigDict\(ser_json_bytes='base64'"),
        (np.arange(2), r"^Holder\.value: a stored task has \[0, 1\], but this task has array"),
        ({1: 2}, r"^Holder\.value: a stored task has {'1': 2}, but"),
    ],
)
def test_a_task_that_its_stored_fields_do_not_restore_is_refused_by_field(value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        refuse_unkept([made(value=value)])


def test_a_type_that_rejects_its_own_stored_form_is_refused_by_field() -> None:
    class Numbers(ag.Task):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        value: np.ndarray

    with pytest.raises(
        ValueError,
        match=r"^Numbers\.value: can't be read back from the JSON in which tasks are stored: .*got \[0, 1, 2\]",
    ):
        refuse_unkept([made(Numbers, value=np.arange(3))])


def test_the_code_that_a_refusal_suggests_works() -> None:
    class Plain(ag.Task):
        right: str = Field(repr=False)

    class Written(ag.Task):
        right: SecretStr

        @written_by("right", when_used="json")
        def write(self, right: SecretStr) -> str:
            return right.get_secret_value()

    class Raw(ag.Task):
        model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
        value: bytes

    class Numbers(ag.Task):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        value: Annotated[np.ndarray, BeforeValidator(np.asarray)]

    class Sets(ag.Task):
        value: set[str]

    class Derived(ag.Task):
        kind: str

        @computed_field  # type: ignore[prop-decorator]
        @property
        def doubled(self) -> str:
            return self.kind * 2

    tasks = [
        made(Plain, right="moon"),
        made(Written, right="moon"),
        made(Raw, value=b"\xff"),
        made(Numbers, value=np.arange(3)),
        made(Sets, value={"a", "b"}),
        made(Derived, kind="a"),
    ]
    refuse_unkept(tasks)
    assert "moon" not in repr(tasks[0]) + repr(tasks[1])
    assert content(tasks[1]) != content(made(Written, right="sun"))


class Judged(ag.Task):
    kind: str
    check: Callable[[str], bool] = Field(exclude=True)


def test_an_excluded_field_is_not_content_and_is_not_restored_as_its_default() -> None:
    class Defaulted(ag.Task):
        check: Callable[[str], bool] = Field(default=later, exclude=True)

    one, other = made(Judged, kind="a", check=later), made(Judged, kind="a", check=lambda text: False)
    assert content(one) == content(other)
    refuse_unkept([one, made(Defaulted)])
    with pytest.raises(ValueError, match=r"^Defaulted\.check: it is excluded, so a stored task has its default"):
        refuse_unkept([made(Defaulted, check=lambda text: False)])


async def test_an_env_of_excluded_fields_can_be_resumed_but_not_rescored(
    tmp_path: Path,
) -> None:
    class Asking(ag.ToolEnv[Judged]):
        @ag.reward
        def right(self) -> float:
            return float(self.task.check(self.answer or ""))

    tasks = [Judged(id=i, prompt="x", kind="a", check=later) for i in range(2)]
    for resume in (False, True):
        evaluation = await ag.evaluate(
            Asking, Scripted([say("a")]), tasks=tasks, output_dir=tmp_path / "eval", resume=resume
        )
        assert evaluation.reward == 1.0
    with pytest.raises(ValueError, match=r"the run's task '0' isn't a task of Asking: .*\n?check"):
        await rescore(tmp_path / "eval", Asking, tmp_path / "again")


class Secret(ag.Task):
    right: SecretStr


class Guess(ag.ToolEnv[Secret]):
    """Asks for a word that must not be stored."""

    @classmethod
    def tasks(cls, split: ag.Split) -> list[Secret]:
        return [Secret(id=f"{split}{i}", prompt="x", right=SecretStr("moon")) for i in range(3)]

    @ag.reward
    def is_right(self) -> float:
        return float(self.answer == self.task.right.get_secret_value())


async def test_tasks_that_cannot_be_stored_are_refused_when_an_evaluation_or_run_starts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^Secret\.right: a SecretStr"):
        await ag.evaluate(Guess, Scripted([say("moon")]), output_dir=tmp_path / "eval")
    assert not (tmp_path / "eval").exists()
    assert (await ag.evaluate(Guess, Scripted([say("moon")]))).reward == 1.0  # nothing is stored
    run = ag.RunConfig(recipe="guess", env="guess", model="tiny", max_steps=1, prompts_per_step=2, eval_tasks=0)
    with pytest.raises(ValueError, match=r"^Secret\.right: a SecretStr"), hold_checked(run, Guess, tmp_path / "run"):
        pass


async def test_tasks_with_sets_are_resumed_and_compared_in_any_order(tmp_path: Path) -> None:
    class Sets(ag.Task):
        right: set[str]

    class Asking(ag.ToolEnv[Sets]):
        words: ClassVar = [*"abcdef"]

        @classmethod
        def tasks(cls, split: ag.Split) -> list[Sets]:
            right = set[str]()
            for word in cls.words:  # with hash collisions, a set's order depends on the insertion order
                right.add(word)
            return [Sets(id=i, prompt="x", right=right) for i in range(2)]

        @ag.reward
        def is_right(self) -> float:
            return float((self.answer or "") in self.task.right)

    await ag.evaluate(Asking, Scripted([say("a")]), output_dir=tmp_path / "one")
    Asking.words.reverse()
    again = await ag.evaluate(Asking, Scripted([say("b")]), output_dir=tmp_path / "one", resume=True)
    assert again.resumed == 2
    await ag.evaluate(Asking, Scripted([say("g")]), output_dir=tmp_path / "two")
    assert ag.compare(tmp_path / "one", tmp_path / "two").difference == -1.0
    others = [Sets(id=i, prompt="y", right={"a"}) for i in range(2)]
    other = await ag.evaluate(Asking, Scripted([say("a")]), tasks=others)
    with pytest.raises(ValueError, match=r"^other: task '0' differs from the one in the first evaluation"):
        ag.compare(again, other)  # in memory, too


def test_a_split_by_key_needs_a_text_form_and_treats_equal_records_alike() -> None:
    tasks = [Holder(id=i, prompt=f"{i}?", value=i % 20) for i in range(60)]
    with pytest.raises(
        ValueError, match=r"^by: expected a value with the same text in every process, got a Judge; return text"
    ):
        ag.split(tasks, train=0.5, test=0.5, by=lambda task: Judge())
    with pytest.raises(ValueError, match=r"^by: .* got a function"):
        ag.split(tasks, train=0.5, test=0.5, by=lambda task: later)
    parts = ag.split(tasks, train=0.5, test=0.5, by=lambda task: Place(str(task.value), frozenset("ab")))
    assert {t.value for t in parts["train"]} & {t.value for t in parts["test"]} == set()
    with pytest.raises(ValueError, match=r"^Holder\.value: .* got a function"):
        ag.split([made(value=later)], train=0.5, test=0.5)
