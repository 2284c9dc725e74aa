import json
from array import array
from typing import Any

import numpy as np
import pytest

from agentgym.engines.sglang import prompts
from agentgym.engines.sglang.prompts import Prompt, Prompts


@pytest.mark.parametrize(
    "later",
    [
        pytest.param([5, 6, 7], id="longer"),
        pytest.param([5, 6], id="the_same"),
        pytest.param([5], id="shorter"),
        pytest.param([5, 9, 7], id="another"),
        pytest.param(np.array([5, 6, 7]), id="an_array"),
        pytest.param(memoryview(array("q", [5, 6, 7])), id="a_rollouts_view"),
        pytest.param(memoryview(array("q", [5, 9, 7])), id="another_view"),
        pytest.param(memoryview(array("i", [5, 6, 7])), id="a_view_of_smaller_numbers"),
        pytest.param([np.int64(5), np.int64(6), np.int64(7)], id="numpys_integers"),
    ],
)
def test_a_prompt_has_the_given_ids_whatever_the_session_sent_before(later: list[int]) -> None:
    asked = Prompts(10)
    asked.take("s", [5, 6])
    prompt = asked.take("s", later)
    assert prompt.ids == json.loads(b"[" + prompt.text + b"]") == list(later)


def test_a_callers_later_changes_do_not_affect_a_prompt() -> None:
    asked, ids = Prompts(10), [5, 6]
    asked.take("s", ids)
    ids[0] = 7
    assert asked.take("s", ids).text == b"7,6"


def test_an_invalid_id_after_known_ones_is_named_by_its_position_in_the_prompt() -> None:
    asked = Prompts(10)
    asked.take("s", [5, 6])
    for given in ([5, 6, 7, 10], memoryview(array("q", [5, 6, 7, 10]))):
        with pytest.raises(ValueError, match="id 10 at position 3"):
            asked.take("s", given)
    matrix: Any = np.array([[5, 6], [7, 8]])
    bad: Any
    for bad in ([], matrix):
        with pytest.raises(ValueError, match="at least one integer"):
            asked.take("s", bad)


def test_sampled_ids_follow_the_prompt() -> None:
    first = Prompt().then([1, 2])
    longer = first.then([]).then([3])
    assert (longer.ids, bytes(longer.text)) == ([1, 2, 3], b"1,2,3")
    assert (first.ids, bytes(first.text)) == ([1, 2], b"1,2")


def test_a_grown_prompt_is_written_and_hashed_as_if_created_at_once() -> None:
    asked, ids = Prompts(1 << 20), array("q", range(1000, 1500))
    for length in (1, 31, 32, 33, 200, 500):
        prompt = asked.take("s", memoryview(ids)[:length])
        prompt.blocks  # noqa: B018  they are created up to the last id
    whole = Prompt().then(ids.tolist())
    assert (prompt.ids, prompt.text, prompt.blocks) == (whole.ids, whole.text, whole.blocks)
    assert len(prompt.blocks) == 500 // 32


def test_a_prompt_keeps_no_view_of_a_rollouts_ids() -> None:
    asked, ids = Prompts(10), array("q", [5, 6])
    asked.take("s", memoryview(ids))
    ids.append(7)  # BufferError if something held a view
    assert asked.take("s", memoryview(ids)).ids == [5, 6, 7]


@pytest.mark.parametrize("length", [1, 40, 200])
@pytest.mark.parametrize("begin", [0, 1, 90])
def test_a_view_of_a_known_array_may_start_elsewhere(begin: int, length: int) -> None:
    asked, ids = Prompts(300), array("q", [0] * 40 + [*range(250)])
    for view in (memoryview(ids)[:length], memoryview(ids), memoryview(ids)[begin : begin + length], memoryview(ids)):
        assert asked.take("s", view.toreadonly()).ids == view.tolist()


def test_a_grown_array_of_a_rollout_is_read_from_its_previous_end() -> None:
    asked, ids = Prompts(300), array("q", range(100))
    for more in ([], [1, 2], [], [3]):
        ids.extend(more)
        prompt = asked.take("s", memoryview(ids).toreadonly())
        assert prompt.ids == ids.tolist()
    ids[-1] = 7  # which no rollout does
    assert asked.take("s", memoryview(ids).toreadonly()).ids == ids.tolist()
    other = array("q", [5, *ids[1:]])  # same length and same last ids as the other array
    assert asked.take("s", memoryview(other).toreadonly()).ids == other.tolist()


@pytest.mark.parametrize("ids", [[0], [1, 2, 151935], list(range(100))])
def test_ids_are_written_the_same_with_and_without_orjson(ids: list[int]) -> None:
    assert prompts._plainly(ids) == prompts._written(ids) == json.dumps(ids, separators=(",", ":")).encode()


def test_two_sessions_with_the_same_start_have_separate_prompts() -> None:
    asked, opening = Prompts(100), list(range(50))
    first, second = asked.take("a", opening), asked.take("b", opening)
    other = asked.take("c", [99, *opening[1:]])
    assert asked.take("a", [*opening, 1]).ids == [*opening, 1]
    assert (first.ids, second.ids, other.ids) == ([*opening, 1], opening, [99, *opening[1:]])
    assert second.text == json.dumps(opening, separators=(",", ":"))[1:-1].encode()
