"""Tests of notes, read by scripted readers."""

import re
from dataclasses import replace

import pytest

import agentgym as ag
from agentgym.engines.scripted import ReplyPolicy, calls
from agentgym.testing import Reply, Scripted, call, check_env, say
from envs.notes.env import COUNT, ENDED, PAGES_A_CONTEXT, WRITE, Notes, make_task, oracle

TASK = make_task("train", 12, 0)


async def read(reader: ReplyPolicy) -> ag.Rollout:
    return await ag.rollout(Notes, TASK, Scripted(reader))


async def test_notes_keeps_the_contract_of_an_env() -> None:
    await check_env(Notes, TASK, oracle=oracle(TASK), reward_range=(0.0, 1.0))


@pytest.mark.parametrize("pages", [6, 36])
async def test_a_reader_who_takes_notes_solves_books_of_any_length(pages: int, no_leaks: None) -> None:
    task = make_task("test", pages, 1)
    rollout = await ag.rollout(Notes, task, Scripted(oracle(task)))
    assert (rollout.reward, rollout.stop_reason) == (1.0, "answer"), rollout
    assert [segment.kind for segment in rollout.segments] == ["root"] + ["compaction"] * (pages // PAGES_A_CONTEXT)


async def test_a_reader_without_notes_cannot_answer() -> None:
    rollout = await read(oracle(TASK, takes_notes=False))
    assert rollout.reward == 0.0, rollout
    moves = {f"carried the {thing}" for thing in TASK.places}
    assert any(move in str(rollout) for move in moves)
    for segment in rollout.segments[-2:]:  # The last pages, and what follows them.
        assert not any(move in str(segment.transcript()) for move in moves)


@pytest.mark.parametrize("calls_a_turn", [2, 7])
async def test_no_turn_reads_two_pages_so_no_context_contains_the_book(calls_a_turn: int) -> None:
    class Roomy(Notes):
        limits = replace(Notes.limits, context_tokens=1 << 20, turn_tokens=1 << 16)

    reader = oracle(TASK, takes_notes=False)

    def greedy(text: str) -> Reply:
        reply = reader(text)
        is_call = not isinstance(reply, str) and reply.get("tool_calls")
        return calls(*[("next_page", {})] * calls_a_turn) if is_call else reply

    rollout = await ag.rollout(Roomy, TASK, Scripted(greedy))
    assert (rollout.reward, rollout.stop_reason) == (0.0, "answer"), rollout
    assert "error: this call has read nothing: a turn reads one page" in str(rollout)
    assert [str(segment.transcript()).count(" of 12. ") for segment in rollout.segments[1:-1]] == [3, 3, 3]


async def test_an_answer_before_the_last_page_is_not_rewarded() -> None:
    right = say("\n".join(f"{thing}: {room}" for thing, room in TASK.places.items()))
    last = len(TASK.pages) // PAGES_A_CONTEXT
    script = [reply for _ in range(last) for reply in (*[call("next_page")] * PAGES_A_CONTEXT, say("Nothing."))]
    for replies, reward in (([right], 0.0), ([*script[:-2], right], 0.0), ([*script, right], 1.0)):
        assert (await ag.rollout(Notes, TASK, Scripted(replies))).reward == reward


async def test_a_fact_missing_from_one_note_is_missing_at_the_end() -> None:
    reader, first = oracle(TASK), next(iter(TASK.places))

    def forgetful(text: str) -> Reply:
        reply = reader(text)
        if WRITE in text.rpartition("user\n")[2] and not isinstance(reply, str):
            return say(re.sub(rf"^{first}: .*\n?", "", reply["content"]))
        return reply

    assert (await read(forgetful)).reward == pytest.approx(2 / 3)


async def test_notes_are_too_short_for_the_pages_themselves() -> None:
    reader = oracle(TASK)

    def copying(text: str) -> Reply:
        if WRITE in text.rpartition("user\n")[2]:
            return say("\n".join(re.findall(r"Page .*", text)))
        return reader(text)

    rollout = await read(copying)
    assert (rollout.reward, rollout.stop_reason) == (0.0, "length"), rollout


async def test_no_page_can_be_read_twice() -> None:
    task = make_task("train", 6, 0)
    script = [reply for _ in range(3) for reply in (*[call("next_page")] * PAGES_A_CONTEXT, say("Nothing."))]
    rollout = await ag.rollout(Notes, task, Scripted([*script[:-1], say("I do not know.")]))
    said = [
        turn.env_messages[0]["content"] for s in rollout.segments for turn in s.turns if turn.message.get("tool_calls")
    ]
    assert said == [*task.pages, *["The book has ended."] * 3]


async def test_naming_every_room_is_not_rewarded() -> None:
    rooms = ("attic", "cellar", "kitchen", "hall", "garden", "library", "stable", "tower")
    every = "\n".join(f"{thing}: {room}" for thing in TASK.places for room in rooms)
    right = "\n".join(f"{thing}: {room}" for thing, room in TASK.places.items())
    reader = oracle(TASK)
    for answer, reward in ((every, 0.0), (f"{right}\nlamp: stable", 0.0), (right, 1.0)):

        def answering(text: str, answer: str = answer) -> Reply:
            return say(answer) if ENDED in text else reader(text)

        assert (await read(answering)).reward == reward


def test_the_last_pages_never_move_the_items_of_the_question() -> None:
    for index in range(100):
        task = make_task("train", 9, index)
        last = " ".join(task.pages[-PAGES_A_CONTEXT:])
        assert not any(f"carried the {thing} " in last for thing in task.places)
        assert task == make_task("train", 9, index)
        assert task.pages != make_task("test", 9, index).pages
    assert len(Notes.configured(pages=9).tasks("test")) == COUNT
