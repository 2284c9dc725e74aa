"""Invalid server responses: each raises an engine error and no other error."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest

from agentgym.engines.sglang.answers import completion_of, scores_of, server_facts
from agentgym.errors import EngineError
from agentgym.types.completion import Version

ODD: Sequence[Any] = (
    *(None, True, 0, -1, 1.5, 5.0, 2**31, 2**63, 2**64, 10**400, -(10**400), 1e39, float("nan"), float("inf")),
    *("", "5", "\ud800", [], [None], [[]], [5.0], {}, {"a": 1}),
)
ANSWER = {
    "output_ids": [5, 6, 7],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 7},
        "output_token_logprobs": [[-0.5, 5, None], [-0.1, 6, None], [-0.2, 7, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    },
}
GONE = object()


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all values inside a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*above, key)
        yield from places(value[key], (*above, key))


def changed(place: Sequence[Any], odd: Any) -> Any:
    """Return the answer with another value at a path, or without it."""
    answer = deepcopy(ANSWER)
    inner: Any = answer
    for key in place[:-1]:
        inner = inner[key]
    if odd is GONE:
        del inner[place[-1]]
    else:
        inner[place[-1]] = odd
    return answer


@pytest.mark.parametrize("place", [pytest.param(place, id=".".join(map(str, place))) for place in places(ANSWER)])
def test_a_broken_answer_is_an_engine_error_or_fulfills_the_invariants(place: tuple[Any, ...]) -> None:
    for odd in (*ODD, GONE):
        try:
            made = completion_of(changed(place, odd), 3)
        except EngineError:
            continue
        assert place[0] == "meta_info", odd  # The ids themselves can't be anything else.
        assert made.token_ids.tolist() == [5, 6, 7]
        assert len(made.logprobs) == 3


def test_a_valid_answer_is_accepted() -> None:
    assert completion_of(ANSWER, 3).versions == (Version(0, 3), Version(2, 4))


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:9])
def test_broken_scores_are_an_engine_error(odd: Any) -> None:
    for rows in (odd, [odd, odd], [[-0.5, odd], [-0.1, 6]]):
        with pytest.raises(EngineError, match=r"^the server"):
            scores_of(rows, [5, 6]) if odd != 5.0 else scores_of([odd], [5, 6])


@pytest.mark.parametrize("odd", [10**400, float("inf"), "x", None, [], {}], ids=lambda odd: str(odd)[:9])
def test_broken_server_info_is_an_engine_error(odd: Any) -> None:
    for info in (odd, {"max_req_input_len": odd, "model_path": "x"}):
        if isinstance(odd, int) and info is not odd:
            continue  # a whole number, however large, is a length
        with pytest.raises(EngineError, match="not an SGLang server's response"):
            server_facts(info, "http://x")
