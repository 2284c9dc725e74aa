"""A tool's return value as the model reads it: complete JSON, equal in every process, or an error with a reason."""

import enum
import os
import subprocess
import sys
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import BaseModel, SecretStr

from agentgym.tools.calls import as_text


class Color(enum.Enum):
    RED = "red"


class Word(str, enum.Enum):  # noqa: UP042  # as in code that is older
    MOON = "moon"


@dataclass
class Place:
    name: str
    around: set[Any]


class Found(NamedTuple):
    at: int
    what: Any = None


class Note(BaseModel):
    tags: set[str]
    by: Any = None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Color.RED, "red"),
        (Word.MOON, "moon"),
        ([Color.RED, Word.MOON], '["red", "moon"]'),
        ({Color.RED: 1, 2: True}, '{"red": 1, "2": true}'),
        (Place("a", {"c", "b"}), '{"name": "a", "around": ["b", "c"]}'),
        (Found(1, Found(2)), '{"at": 1, "what": {"at": 2, "what": null}}'),
        ([Found(1)], '[{"at": 1, "what": null}]'),
        (Note(tags={"b", "a"}, by=np.float32(0.5)), '{"tags":["a","b"],"by":0.5}'),
        ({"note": Note(tags={"b", "a"})}, '{"note": {"tags": ["a", "b"], "by": null}}'),
        (np.float32(1.5), "1.5"),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        ({"x": np.arange(3)}, '{"x": [0, 1, 2]}'),
        ({np.int64(1): 2}, '{"1": 2}'),
        (np.array(["a"], dtype=object), '["a"]'),
        (deque([1, 2]), "[1, 2]"),
        (OrderedDict(b=1, a=2), '{"b": 1, "a": 2}'),
        (Counter("aab"), '{"a": 2, "b": 1}'),
        ({"b": 1, "a": 2}.keys(), '["b", "a"]'),
        (range(3), "[0, 1, 2]"),
        (date(2024, 1, 2), "2024-01-02"),
        ([Decimal("1.10"), Path("a/b")], '["1.10", "a/b"]'),
        (SecretStr("x"), "**********"),
        (1.5, "1.5"),
        (True, "true"),
        (["ö"], '["ö"]'),
        (ValueError("no"), "no"),
    ],
)
def test_a_result_is_read_as_json_by_its_value(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize("value", [np.arange(2000), {"x": np.arange(1500)}, np.zeros((40, 50))])
def test_arrays_are_not_truncated(value: Any) -> None:
    text = as_text(value)
    assert "..." not in text
    assert text.count(",") == (value["x"] if isinstance(value, dict) else value).size - 1


def test_tensors_become_lists() -> None:
    torch = pytest.importorskip("torch")
    assert as_text({"x": torch.arange(3), "y": torch.ones(1, 2)}) == '{"x": [0, 1, 2], "y": [[1.0, 1.0]]}'


def frame() -> Any:
    return pytest.importorskip("pandas").DataFrame({"a": range(100)})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: b"a", r'^bytes; return text, such as data\.decode\(errors="replace"\)$'),
        (lambda: {"x": [bytearray(b"a")]}, r"^bytearray; .*, at \['x'\]\[0\]$"),
        (lambda: Note(tags=set(), by=object()), r"^a object, at \['by'\]$"),
        (lambda: Place("a", {len}), r"^a function, at \['around'\]\[0\]$"),
        (lambda: {(1, 2): 3}, "^an object key of type tuple$"),
        (frame, "^a DataFrame, whose text form omits rows; give its rows as a list of dicts$"),
        (lambda: frame()["a"], "^a Series, whose text form omits rows"),
    ],
)
def test_values_without_a_json_form_are_refused_with_their_position(make: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        as_text(make())


def test_a_set_gives_the_same_text_in_every_process() -> None:
    code = "from agentgym.tools.calls import as_text; print(as_text({'x': {'a', 'b', 'c', 'd', 'e'}}))"
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
        assert said == '{"x": ["a", "b", "c", "d", "e"]}\n'
