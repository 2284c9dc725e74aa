"""The signs of a suspicious rollout: each is found, and a normal rollout has none."""

from pathlib import Path
from typing import Any

import pytest

from agentgym.store import rows, statements
from agentgym.store.reader import RolloutStore
from agentgym.store.suspicious import SIGNS, signs_of_group
from agentgym.store.writer import RolloutWriter, Trained
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment, Turn
from tests.store.test_store import group, rollout, written


def called(tool: str = "bash", argument: int = 0) -> Message:
    call: Any = {"type": "function", "function": {"name": tool, "arguments": {"n": argument}}}
    return Message(role="assistant", content="", tool_calls=[call])


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def played(name: str, reward: float | None, *messages: Message, **metrics: float) -> Rollout:
    """Return a rollout in which the model wrote these messages, two tokens each."""
    length = 1 + 2 * len(messages)
    segment = Segment(
        index=0,
        parent=None,
        kind="root",
        token_ids=list(range(length)),  # type: ignore[arg-type]
        sampled=[False] + [True] * (length - 1),  # type: ignore[arg-type]
        logprobs=[0.0] + [-1.0] * (length - 1),  # type: ignore[arg-type]
        turns=tuple(
            Turn(start=1 + 2 * i, stop=3 + 2 * i, finish_reason="stop", versions=(), message=message)
            for i, message in enumerate(messages)
        ),
    )
    made = rollout(name, reward, segments=(segment,))
    object.__setattr__(made, "metrics", metrics)
    return made


SOUND = (
    played("t/0", 1.0, called(), said("4"), tool_calls=1),
    played("t/1", 0.0, called(), called(argument=2), said("5"), tool_calls=2),
)


def signs(*rollouts: Rollout) -> dict[str, tuple[str, ...]]:
    return signs_of_group(Group(group_id="t", rollouts=rollouts))


def test_normal_rollouts_have_no_sign() -> None:
    assert signs(*SOUND) == {}


def test_a_reward_without_tool_calls_is_a_sign_if_others_called_tools() -> None:
    assert signs(*SOUND, played("t/2", 1.0, said("4"))) == {"t/2": ("no-tool-call",)}


@pytest.mark.parametrize(
    "others", [(played("t/0", 0.0, said("5")),), (played("t/0", 1.0, called()),)], ids=["no other calls", "not higher"]
)
def test_a_reward_without_tool_calls_is_not_a_sign_if_it_is_usual_or_not_higher(others: Any) -> None:
    assert signs(*others, played("t/2", 1.0, said("4"))) == {}


def test_a_malformed_call_does_not_count_as_a_tool_call() -> None:
    malformed = played("t/0", 0.0, called(), tool_calls=0, malformed_calls=1)
    assert signs(malformed, played("t/1", 1.0, said("4"), tool_calls=0)) == {}
    odd = played("t/2", 0.9, called(), tool_calls=0, malformed_calls=1)
    assert signs(*SOUND, odd) == {"t/2": ("no-tool-call",)}


@pytest.mark.parametrize(("errors", "reward", "found"), [(2, 1.0, True), (1, 1.0, False), (2, 0.5, False)])
def test_the_highest_reward_despite_a_mostly_failing_tool_is_a_sign(errors: int, reward: float, found: bool) -> None:
    odd = played("t/2", reward, called(), called(argument=1), called(argument=2), **{"tool_errors/bash": errors})
    assert signs(*SOUND, odd) == ({"t/2": ("tool-fails",)} if found else {})


@pytest.mark.parametrize(("reward", "found"), [(1.0, True), (0.5, False)])
def test_the_highest_reward_despite_a_malformed_call_is_a_sign(reward: float, found: bool) -> None:
    odd = played("t/2", reward, called(), malformed_calls=1)
    assert signs(*SOUND, odd) == ({"t/2": ("malformed-call",)} if found else {})


def test_a_reward_of_zero_is_not_a_success_even_if_it_is_the_highest() -> None:
    assert signs(played("t/0", 0.0, called(), malformed_calls=1, **{"tool_errors/bash": 1})) == {}


@pytest.mark.parametrize(("times", "found"), [(3, True), (2, False)])
def test_a_turn_that_is_repeated_three_times_is_a_sign(times: int, found: bool) -> None:
    odd = played("t/2", 0.0, *[called(argument=7)] * times, said("4"))
    assert signs(*SOUND, odd) == ({"t/2": ("repeats",)} if found else {})


def test_empty_turns_and_failed_rollouts_have_no_sign() -> None:
    assert signs(*SOUND, played("t/2", 0.0, *[said("")] * 3), played("t/3", None, *[said("a")] * 3)) == {}


def found_by_the_store(folder: Path) -> dict[str, tuple[str, ...]]:
    with RolloutStore(folder) as store:
        found = {of.rollout.rollout_id: of.suspicious for of in store.find(suspicious=True)}
        assert {of.rollout_id: of.suspicious for of in store.summaries(suspicious=True)} == found
        assert store.count(suspicious=True) == len(found)
    return found


@pytest.mark.parametrize(("gap", "found"), [(1.5, True), (0.2, False), (None, False)])
def test_a_large_logprob_gap_is_a_sign(tmp_path: Path, gap: float | None, found: bool) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout("t/0"))], step=0)
        writer.add_step([Trained(rollout_id="t/0", segment=0, logprobs=None, advantages=[1.0, 1.0], gap=gap)], step=0)
    assert found_by_the_store(tmp_path) == ({"t/0": ("logprob-gap",)} if found else {})


@pytest.mark.parametrize(
    ("rewards", "far"),
    [
        ([0, 0.2, 0.4, 0.6, 0.8, 1, 1, 9.0], 9.0),
        ([0, 0.2, 0.4, 0.6, 0.8, 1, 1, -7.0], -7.0),
        ([0.0] * 8 + [1.0], None),  # the first success
        ([0.0] * 8 + [1000.0], 1000.0),
        ([0, 0.2, 0.4, 0.6, 0.8, 1, 1, 2.0], None),
        ([0, 1, 9.0], None),  # too few to tell
    ],
)
def test_an_outlying_reward_is_a_sign(tmp_path: Path, rewards: list[float], far: float | None) -> None:
    written(tmp_path, *(group(rollout(f"t{i}/0", reward)) for i, reward in enumerate(rewards)))
    found = found_by_the_store(tmp_path)
    assert found == ({} if far is None else {f"t{rewards.index(far)}/0": ("reward-far",)})


def test_a_reward_is_compared_only_within_its_phase(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path) as writer:
        writer.add([group(rollout(f"t{i}/0", i / 8)) for i in range(8)], step=0)
        writer.add([group(rollout(f"e{i}/0", 100 + i / 8)) for i in range(2)], phase="eval_after", step=1)
    assert found_by_the_store(tmp_path) == {}


def test_every_sign_has_a_description() -> None:
    assert set(SIGNS) == {"no-tool-call", "tool-fails", "malformed-call", "repeats", "logprob-gap", "reward-far"}


FAILING: Any = {"tool_calls": 4, "tool_errors": 3, "tool_errors/bash": 3}
POOR = played("t/0", 0.15, *[called(argument=i) for i in range(4)], said("4"), **FAILING)
"""Has the highest reward while it is the only rollout."""


def test_rollouts_added_one_by_one_get_the_signs_when_their_group_is_complete(tmp_path: Path) -> None:
    better = played("t/1", 1.0, called(), said("4"), tool_calls=1)
    worse = played("t/2", 0.1, called(), said("5"), tool_calls=1)
    idle = played("t/3", 1.0, said("4"))
    with RolloutWriter(tmp_path) as writer:
        for one in (POOR, better, worse, idle):
            writer.add([Group(group_id="t", rollouts=(one,))], phase="eval", step=0, whole=False)
        writer.flush()
        assert found_by_the_store(tmp_path) == {}
        writer.sign(Group(group_id="t", rollouts=(POOR, better, worse, idle)), phase="eval", step=0)
    assert found_by_the_store(tmp_path) == {"t/3": ("no-tool-call",)}


def test_a_group_that_is_written_in_parts_has_the_same_signs_as_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    better, broken = played("t/1", 1.0, called(), said("4"), tool_calls=1), played("t/2", 0.5, said("x"))
    row = rows.rollout_row

    def refusing(made: Rollout, **place: Any) -> tuple[object, ...]:
        if made is broken:
            raise TypeError("no form for it")
        return row(made, **place)

    monkeypatch.setattr(statements, "rollout_row", refusing)
    with RolloutWriter(tmp_path) as writer:
        writer.add([Group(group_id="t", rollouts=(POOR, better, broken))], step=0)
    with RolloutStore(tmp_path) as store:
        assert (writer.lost, len(store)) == (1, 2)
    assert found_by_the_store(tmp_path) == {}
