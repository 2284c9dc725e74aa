"""The data types: each one checks its invariants, and an error names the field."""

from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from agentgym.errors import Failure
from agentgym.sandboxes.protocol import ExecResult, cut_middle
from agentgym.types.completion import Completion, Sampling, Version
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, StopReason, Turn
from agentgym.types.sample import Sample
from agentgym.types.task import Task

NAN = float("nan")
Change = Mapping[str, Any]


def completion(**change: Any) -> Completion:
    made: dict[str, Any] = {"token_ids": [7, 8], "logprobs": [-0.1, -0.2], "finish_reason": "stop"}
    return Completion(**made | change)


def turn(start: int = 2, stop: int = 4) -> Turn:
    written = Message(role="assistant", content="")
    return Turn(start=start, stop=stop, finish_reason="stop", versions=(Version(0, 0),), message=written)


def segment(**change: Any) -> Segment:
    """Return a segment with ids P P a a e and mask 0 0 1 1 0."""
    made: dict[str, Any] = {"index": 0, "parent": None, "kind": "root", "token_ids": [1, 2, 3, 4, 5]}
    made |= {"sampled": [0, 0, 1, 1, 0], "logprobs": [0, 0, -0.5, -0.5, 0], "turns": (turn(),)}
    return Segment(**made | change)


def rollout(**change: Any) -> Rollout:
    made: dict[str, Any] = {"rollout_id": "t/0", "group_id": "t", "segments": (segment(),)}
    return Rollout(**made | {"reward": 1.0, "stop_reason": "done"} | change)


def sample(**change: Any) -> Sample:
    made: dict[str, Any] = {"group_id": "t", "rollout_id": "t/0", "segment": 0, "step": 0, "weight": 1.0}
    made |= {"prompt_ids": [1], "response_ids": [2, 3], "loss_mask": [1, 1], "logprobs": [-1, -1]}
    made |= {"advantages": [1, 1]}
    return Sample(**made | change)


def refuses(build: Callable[..., object], change: Change, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        build(**change)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logprobs": [-0.1]}, "logprobs"),
        ({"logprobs": []}, "logprobs"),
        ({"logprobs": [-0.1, NAN]}, "logprobs"),
        ({"logprobs": [-0.1, -np.inf]}, "logprobs"),
        ({"token_ids": [], "logprobs": []}, "token_ids"),
        ({"token_ids": [1.5, 2.0]}, "token_ids"),
        ({"token_ids": [1, -1]}, "token_ids"),
        ({"token_ids": [2**31, 1]}, "token_ids"),
        ({"token_ids": [2**63, 1]}, "token_ids"),
        ({"token_ids": [2**64, 1]}, "token_ids"),
        ({"token_ids": np.array([2**63, 1], np.uint64)}, "token_ids"),
        ({"token_ids": [True, False]}, "token_ids"),
        ({"token_ids": ["1", "2"]}, "token_ids"),
        ({"token_ids": "12"}, "token_ids"),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": (number for number in (1, 2))}, "token_ids"),
        ({"token_ids": [Decimal("1.5"), 2]}, "token_ids"),
        ({"token_ids": np.array([1, 2], "M8[s]")}, "token_ids"),
        ({"token_ids": [[1], [2]]}, "token_ids"),
        ({"token_ids": np.array([[1], [2]])}, "token_ids"),
        ({"token_ids": [[1], [2, 3]]}, "token_ids"),
        ({"logprobs": ["-0.1", "-0.2"]}, "logprobs"),
        ({"logprobs": [None, None]}, "logprobs"),
        ({"logprobs": [[-0.1], [-0.2]]}, "logprobs"),
        ({"logprobs": [-1e39, -0.1]}, "logprobs"),
        ({"finish_reason": "eos"}, "finish_reason"),
        ({"finish_reason": []}, "finish_reason"),
        ({"versions": None}, "versions"),
        ({"versions": (3,)}, "versions"),
        ({"versions": ()}, "versions"),
        ({"versions": (Version(1, 0),)}, "versions"),
        ({"versions": (Version(0, 0), Version(0, 1))}, "versions"),
    ],
)
def test_a_completion_has_a_finite_logprob_for_each_id(change: Change, field: str) -> None:
    refuses(completion, change, field)


def test_the_lowest_float32_is_a_valid_logprob() -> None:
    lowest = float(np.finfo(np.float32).min)
    assert completion(logprobs=[lowest, lowest]).logprobs.tolist() == [lowest, lowest]


@pytest.mark.parametrize("ids", [[5, 6], (5, 6), range(5, 7), bytearray([5, 6]), np.array([5, 6], np.uint16)])
def test_a_completion_accepts_any_sequence_of_integers(ids: Any) -> None:
    assert completion(token_ids=ids).token_ids.tolist() == [5, 6]
    assert completion(token_ids=[0, 2**31 - 1]).token_ids.tolist() == [0, 2**31 - 1]


@pytest.mark.parametrize("versions", [[Version(0, 3)], ((0, 3),), [[0, 3]]])
def test_versions_in_any_sequences_become_a_tuple_of_versions(versions: Any) -> None:
    assert completion(versions=versions).versions == (Version(0, 3),)
    assert isinstance(completion(versions=versions).versions[0], Version)


def test_a_completion_without_logprobs_raises_an_error_that_suggests_an_abort() -> None:
    with pytest.raises(ValueError, match="return an abort"):
        completion(logprobs=[])


def test_only_an_aborted_completion_may_be_empty() -> None:
    assert len(completion(token_ids=[], logprobs=[], finish_reason="abort").token_ids) == 0


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 2), (-1, 2)])
def test_a_turn_contains_at_least_one_token(start: int, stop: int) -> None:
    refuses(segment, {"turns": (turn(start, stop),)}, "turns")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sampled": [0, 0, 1, 1]}, "sampled"),
        ({"logprobs": [0, 0, -0.5, -0.5]}, "logprobs"),
        ({"sampled": [0, 0, 1, 0, 0]}, "sampled"),
        ({"sampled": [0, 0, 1, 1, 1]}, "sampled"),
        ({"token_ids": [1, 2, 3, -4, 5]}, "token_ids"),
        ({"token_ids": [1, 2, 3, 2**32 + 4, 5]}, "token_ids"),
        ({"turns": ()}, "sampled"),
        ({"turns": (turn(2, 4), turn(3, 4))}, "turns"),
        ({"turns": (turn(3, 4), turn(2, 3))}, "turns"),
        ({"turns": (turn(2, 6),)}, "turns"),
        ({"logprobs": [-0.5, 0, -0.5, -0.5, 0]}, "logprobs"),
        ({"logprobs": [0, 0, -0.5, -0.5, NAN]}, "logprobs"),
        ({"parent": 0}, "parent"),
        ({"kind": "compaction"}, "parent"),
    ],
)
def test_a_segments_lists_have_one_length_and_its_mask_is_the_union_of_its_turns(change: Change, field: str) -> None:
    refuses(segment, change, field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rollout_id": ""}, "rollout_id"),
        ({"group_id": ""}, "group_id"),
        ({"stop_reason": ""}, "stop_reason"),
        ({"reward": None}, "reward"),
        ({"reward": 0.0, "failure": Failure(type="EnvError", message="it died")}, "reward"),
        ({"reward": NAN}, "reward"),
        ({"segments": (segment(), segment())}, "segments"),
        ({"segments": (segment(index=1, parent=0, kind="fork"),)}, "segments"),
        ({"segments": (segment(), segment(index=1, parent=1, kind="fork"))}, "segments"),
    ],
)
def test_a_rollout_has_ids_a_stop_reason_and_either_a_finite_reward_or_an_error(change: Change, field: str) -> None:
    refuses(rollout, change, field)


def test_a_failed_rollout_is_not_scored_but_a_zero_is_a_score() -> None:
    failed, zero = (
        rollout(rollout_id="t/1", reward=None, failure=Failure(type="EnvError", message="it died")),
        rollout(reward=0.0),
    )
    assert Group(group_id="t", rollouts=(failed, zero)).scored == (zero,)


def test_the_sampled_tokens_of_a_rollout_are_counted_over_all_segments() -> None:
    both = rollout(segments=(segment(), segment(index=1, parent=0, kind="compaction")))
    assert both.sampled_tokens == 4
    assert len(both.messages) == 2


def test_a_group_contains_its_own_rollouts_once_each() -> None:
    with pytest.raises(ValueError, match=r"^rollouts: \['t/0'\] do not belong to group 'u'"):
        Group(group_id="u", rollouts=(rollout(),))
    with pytest.raises(ValueError, match=r"^rollouts: a rollout_id appears twice"):
        Group(group_id="t", rollouts=(rollout(), rollout()))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_ids": []}, "prompt_ids"),
        ({"response_ids": [], "loss_mask": [], "logprobs": [], "advantages": []}, "response_ids"),
        ({"loss_mask": [1]}, "loss_mask"),
        ({"logprobs": [-1, -1, -1]}, "logprobs"),
        ({"advantages": []}, "advantages"),
    ],
)
def test_a_sample_has_a_prompt_and_four_lists_as_long_as_its_response(change: Change, field: str) -> None:
    refuses(sample, change, field)


def test_the_length_of_a_sample_is_prompt_plus_response() -> None:
    assert len(sample()) == 3


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"id": "", "prompt": [{"role": "user", "content": "x"}]}, "id"),
        ({"id": "t", "prompt": []}, "prompt"),
        ({"id": "t", "prompt": [{"role": "robot", "content": "x"}]}, "prompt.0.role"),
        ({"id": "t", "prompt": [{"role": "user"}]}, "prompt.0.content"),
        ({"id": "t", "prompt": [{"role": "user", "content": "x"}], "awnser": 3}, "awnser"),
    ],
)
def test_an_invalid_row_of_a_data_set_is_refused_by_field_name(row: Change, field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Task.model_validate(row)
    assert ".".join(map(str, refused.value.errors()[0]["loc"])) == field


def test_a_task_cannot_be_changed() -> None:
    task = Task(id="t", prompt=(Message(role="user", content="x"),))
    with pytest.raises(ValidationError, match="frozen"):
        task.id = "u"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
    ],
)
def test_sampling_settings_of_wrong_type_or_range_are_refused(change: Change, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be"):
        Sampling(**change)


@pytest.mark.parametrize("made", [completion(), segment(), sample()])
def test_arrays_of_completions_segments_and_samples_are_read_only(made: Completion | Segment | Sample) -> None:
    with pytest.raises(ValueError, match="read-only"):
        made.logprobs[0] = -9.0
    with pytest.raises(FrozenInstanceError):
        made.logprobs = made.logprobs  # type: ignore[misc]


def test_a_segment_leaves_the_arrays_it_was_given_writable() -> None:
    given = np.array([1, 2, 3, 4, 5])
    segment(token_ids=given)
    given[0] = 9
    assert given[0] == 9


def test_a_stop_reason_equals_its_text() -> None:
    assert [StopReason.ANSWER, f"{StopReason.CONTEXT}"] == ["answer", "context"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stdout": "4\n"}, "4"),
        ({"stdout": "4\n", "stderr": "careful\n"}, "4\ncareful"),
        ({"exit_code": 3, "status": "error"}, "[exit code 3]"),
        ({"exit_code": -9, "status": "timeout", "seconds": 2.0}, "[timeout after 2.0 s]"),
        ({"stdout": "4", "state_lost": True}, "4\n[the Python state was lost]"),
    ],
)
def test_an_exec_results_text_describes_the_failure(change: dict[str, Any], text: str) -> None:
    made: dict[str, Any] = {"status": "ok", "exit_code": 0, "stdout": "", "stderr": ""}
    assert ExecResult(**made | change).text() == text


def test_a_program_is_ok_if_it_exited_with_zero() -> None:
    assert ExecResult(status="ok", exit_code=0, stdout="", stderr="").ok
    assert not ExecResult(status="ok", exit_code=1, stdout="", stderr="").ok
    late = ExecResult(status="timeout", exit_code=0, stdout="", stderr="")
    assert not late.ok


@pytest.mark.parametrize("limit", [0, 1, 10, 50, 99])
def test_a_cut_text_never_exceeds_its_limit(limit: int) -> None:
    assert len(cut_middle("x" * 100, limit)) <= limit


def test_a_cut_text_keeps_head_and_tail_and_names_the_cut() -> None:
    cut = cut_middle("a" * 100 + "b" * 100, 80)
    assert (cut[:3], cut[-3:], "characters cut" in cut) == ("aaa", "bbb", True)
    assert cut_middle("short", 80) == "short"
