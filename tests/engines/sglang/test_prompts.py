import json
from typing import Any

import numpy as np
import pytest

from agentgym.engines.sglang.prompts import NOTHING, Prompts


@pytest.mark.parametrize(
    "later",
    [
        pytest.param([5, 6, 7], id="longer"),
        pytest.param([5, 6], id="the_same"),
        pytest.param([5], id="shorter"),
        pytest.param([5, 9, 7], id="another"),
        pytest.param(np.array([5, 6, 7]), id="an_array"),
        pytest.param([np.int64(5), np.int64(6), np.int64(7)], id="numpys_integers"),
    ],
)
def test_a_prompt_is_the_ids_it_was_given_whatever_the_session_asked_before(later: list[int]) -> None:
    prompts = Prompts(10)
    prompts.take("s", [5, 6])
    prompt = prompts.take("s", later)
    assert prompt.ids == json.loads(f"[{prompt.text}]") == list(later)


def test_a_callers_later_changes_do_not_reach_a_prompt() -> None:
    prompts, ids = Prompts(10), [5, 6]
    prompts.take("s", ids)
    ids[0] = 7
    assert prompts.take("s", ids).text == "7,6"


def test_a_bad_id_behind_known_ones_is_named_by_its_position_in_the_prompt() -> None:
    prompts = Prompts(10)
    prompts.take("s", [5, 6])
    with pytest.raises(ValueError, match="id 10 at position 3"):
        prompts.take("s", [5, 6, 7, 10])
    matrix: Any = np.array([[5, 6], [7, 8]])
    bad: Any
    for bad in ([], matrix):
        with pytest.raises(ValueError, match="at least one integer"):
            prompts.take("s", bad)


def test_sampled_ids_stand_behind_the_prompt() -> None:
    assert NOTHING.then([1, 2]).then([]).then([3]) == ([1, 2, 3], "1,2,3")
