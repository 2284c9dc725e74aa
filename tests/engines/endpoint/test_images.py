"""Images on a real HTTP endpoint: how they are sent, stored, displayed, scored again and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import agentgym as ag
from agentgym.chat.message_chat import IMAGE_TOKENS, estimated_tokens
from agentgym.cli import main as cli
from agentgym.engines.endpoint.requests import api_messages, prompt_messages
from agentgym.evals.rescore import rescore
from agentgym.exports.atif_reader import read_atif
from agentgym.store.reader import RolloutStore
from agentgym.types.messages import Message
from agentgym.types.tool_names import SentNames
from tests.engines.endpoint.chat_server import Answers, ChatServer, Request, Sent, called, chat_server, said
from tests.store.test_store import same
from tests.types.messages.pictures import GIF, PART, PNG, SHOWN, text_part

pytest.importorskip("openai", reason="needs the extra agentgym-kit[endpoint]")

GIF_PART = ag.Image(GIF).part


class Gallery(ag.ToolEnv[ag.Task]):
    """An env with reward 1 for naming the animal in the second picture."""

    limits = ag.Limits(turns=4, turn_tokens=64, context_tokens=8192)

    @classmethod
    def tasks(cls, split: str) -> list[ag.Task]:
        return [ag.Task(id=split, prompt=["Which animal is on the next picture?", ag.Image(PNG)])]

    @ag.tool
    def look(self, at: int) -> list[str | ag.Image]:
        """Look at a picture."""
        return [f"picture {at}", ag.Image(GIF)]

    @ag.tool
    def leave(self) -> ag.Stop:
        """Leave with a picture."""
        return ag.Stop("left", ["good bye", ag.Image(GIF)])

    @ag.reward
    def right(self) -> float:
        return float(self.answer == "a cat")


TASK = Gallery.tasks("test")[0]


def looks(request: Request, number: int) -> Sent:
    """Look at a picture, then name the animal if a later message has an image."""
    last = request["messages"][-1]["content"]
    if number == 0:
        return called("look", '{"at": 2}')
    return said("a cat" if GIF_PART in last else "I see nothing")


async def play(answers: Answers = looks, env: Any = Gallery, **settings: Any) -> tuple[ag.Rollout, ChatServer]:
    given: dict[str, Any] = {"model": "m", "first_wait_s": 0.001, **settings}
    async with chat_server(answers) as server, ag.Endpoint(server.url, **given) as engine:
        return await ag.rollout(env, TASK, engine, seed=1), server


async def test_images_of_prompts_and_tools_reach_the_endpoint_in_user_messages() -> None:
    rollout, server = await play()
    assert (rollout.error, rollout.reward) == (None, 1.0)
    prompt = {"role": "user", "content": [text_part("Which animal is on the next picture?"), PART]}
    assert server.requests[0]["messages"] == [prompt]
    _, assistant, told, seen = server.requests[1]["messages"]
    assert told == {
        "role": "tool",
        "content": "picture 2\n[image 1, in the next message]",
        "tool_call_id": assistant["tool_calls"][0]["id"],
    }
    assert seen == {"role": "user", "content": [text_part("image 1 of the tools' results:"), GIF_PART]}


async def test_images_of_prompt_tools_are_inside_the_delimiters_of_their_result() -> None:
    def answers(request: Request, number: int) -> Sent:
        if number == 0:
            return said('<tool_call>\n{"name": "look", "arguments": {"at": 2}}\n</tool_call>')
        return looks(request, number)

    rollout, server = await play(answers, tools="prompt")
    assert rollout.reward == 1.0
    assert server.requests[1]["messages"][-1] == {
        "role": "user",
        "content": [text_part("<tool_response>\npicture 2"), GIF_PART, text_part("</tool_response>")],
    }


def result(call: str, content: Any) -> Message:
    return Message(role="tool", content=content, tool_call_id=call, name="look")


def called_at(*names: str) -> Message:
    function = {"name": "look", "arguments": {}}
    calls = [{"id": name, "type": "function", "function": function} for name in names]
    return Message(role="assistant", content="", tool_calls=calls)  # type: ignore[typeddict-item]


def test_images_of_several_results_follow_all_results_and_precede_the_next_message() -> None:
    both = [result("a", [PART, text_part("half \ud800"), PART]), result("b", [GIF_PART])]
    told = ["[image 1, in the next message]\nhalf \ufffd\n[image 2, in the next message]"]
    named = [text_part(f"image {number} of the tools' results:") for number in (1, 2, 3)]
    seen = [named[0], PART, named[1], PART, named[2], GIF_PART]
    end = [{"role": "user", "content": seen}]
    *_, first, second, behind = api_messages([called_at("a", "b"), *both], names=SentNames(()))
    assert [first["content"], second["content"]] == [*told, "[image 3, in the next message]"]
    assert [behind] == end
    on = api_messages([called_at("a", "b"), *both, Message(role="user", content="On.")], names=SentNames(()))
    assert on[3:] == [{"role": "user", "content": [*seen, text_part("On.")]}]
    on = api_messages([called_at("a", "b"), *both, called_at("c")], names=SentNames(()))
    assert [message["role"] for message in on] == ["assistant", "tool", "tool", "user", "assistant", "tool"]
    left = api_messages([called_at("a", "b"), both[0]], names=SentNames(()))
    assert [message["content"] for message in left[1:3]] == [*told, "[no result]"]
    assert left[3]["content"] == seen[:4]
    alone = api_messages([result("z", [PART])], names=SentNames(()))
    assert alone == [{"role": "user", "content": [PART]}]


def test_results_of_one_turn_in_the_prompt_share_a_message_with_their_images() -> None:
    (made,) = prompt_messages([result("a", [text_part("x"), PART]), result("b", "y"), result("c", [PART])], [])
    assert made["content"] == [
        text_part("<tool_response>\nx"),
        PART,
        text_part("</tool_response>\n<tool_response>\ny\n</tool_response>\n<tool_response>"),
        PART,
        text_part("</tool_response>"),
    ]


def test_an_image_counts_as_a_fixed_number_of_tokens_not_as_its_base64_text() -> None:
    large = ag.Message(role="user", content=["a", ag.Image(PNG + bytes(3_000_000)).part])
    assert IMAGE_TOKENS < estimated_tokens([large]) < IMAGE_TOKENS + 50


async def test_an_endpoint_without_vision_fails_the_rollout_with_its_own_error_text() -> None:
    def blind(request: Request, number: int) -> Sent:
        return Sent({"error": {"message": "m is not a multimodal model"}}, 400)

    rollout, server = await play(blind)
    assert rollout.reward is None
    assert "status 400" in str(rollout.error)
    assert "m is not a multimodal model" in str(rollout.error)
    assert len(server.requests) == 1


async def test_the_picture_of_a_tool_that_ends_the_rollout_is_kept() -> None:
    rollout, _ = await play(lambda request, number: called("leave", "{}"))
    assert rollout.stop_reason == "left"
    assert rollout.segments[0].turns[0].env_messages[0]["content"] == [text_part("good bye"), GIF_PART]


class Marks(BaseModel):
    mark: float


class Judged(Gallery):
    """An env whose reward is the mark that a judge with vision gives the picture."""

    judge: ag.Judge[Marks]

    @ag.reward
    async def right(self) -> float:  # type: ignore[override]
        shown = [ag.Message(role="user", content=["The drawing:", ag.Image(PNG)])]
        assert await self.model("judge").ask(shown) == '{"mark": 0.5}'
        return (await self.judge.ask(self.model("judge"), shown)).mark


async def test_a_judge_sees_images_and_its_cache_distinguishes_them(tmp_path: Path) -> None:
    Judged.judge = ag.Judge(rubric="How good is the drawing?", response=Marks, cache=tmp_path / "answers.sqlite")

    def marks(request: Request, number: int) -> Sent:
        assert PART in request["messages"][-1]["content"]
        return said('{"mark": 0.5}')

    async with (
        chat_server(looks) as server,
        ag.Endpoint(server.url, model="m") as engine,
        chat_server(marks) as other,
        ag.Endpoint(other.url, model="j") as judge,
    ):
        rollout = await ag.rollout(Judged, TASK, engine, models={"judge": judge})
        again = await ag.rollout(Judged, TASK, engine, models={"judge": judge})
    assert (rollout.error, rollout.reward) == (None, 0.5)
    assert (again.metrics["model_calls/judge"], again.metrics["model_cached/judge"]) == (1, 1)


class Sums(Gallery):
    """An env that summarizes after each turn and whose sub-agent looks in a separate fork."""

    context = ag.Compact(at=None, turns=1)

    @ag.tool
    async def look(self, at: int) -> list[str | ag.Image]:  # type: ignore[override]
        """Let a sub-agent look."""
        asked = ag.Message(role="user", content=["What is it?", ag.Image(GIF)])
        async with self.fork("subagent", [asked]) as agent:
            return [await agent.run(), ag.Image(GIF)]


async def test_sub_agents_and_summaries_keep_the_images_they_continue_from() -> None:
    def answers(request: Request, number: int) -> Sent:
        return (
            called("look", '{"at": 2}') if number == 0 else said(["a cat, I think", "a summary", "a cat"][number - 1])
        )

    rollout, server = await play(answers, env=Sums)
    assert (rollout.error, rollout.reward) == (None, 1.0)
    _, sub_agent, _, behind = server.requests
    assert sub_agent["messages"] == [{"role": "user", "content": [text_part("What is it?"), GIF_PART]}]
    (kept,) = behind["messages"]
    assert kept["content"] == [text_part("Which animal is on the next picture?"), PART, text_part("a summary")]


async def test_an_evaluation_with_images_is_stored_displayed_rescored_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with chat_server(looks) as server, ag.Endpoint(server.url, model="m") as engine:
        done = await ag.evaluate(Gallery, engine, output_dir=tmp_path / "run")
    (rollout,) = done.groups.rollouts
    with RolloutStore(tmp_path / "run") as store:
        (stored,) = store.find()
        assert same(stored.rollout, rollout)
        assert ag.Task.model_validate(store.task("test")) == TASK
    assert cli.main(["show", str(tmp_path / "run"), "--id", "1"]) == 0
    shown = capsys.readouterr().out
    assert f"user: Which animal is on the next picture?\n    {SHOWN}\n" in shown
    assert f"tool look: picture 2\n    [image/gif, {len(GIF)} bytes]\n" in shown
    assert "base64" not in shown
    again = await rescore(tmp_path / "run", Gallery, tmp_path / "again")
    assert again.reward.after == [1.0]

    assert cli.main(["export", str(tmp_path / "run"), "--to", "openai", "--output", str(tmp_path / "a.jsonl")]) == 0
    (line,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert [message["role"] for message in line["messages"]] == ["user", "assistant", "tool", "user", "assistant"]
    assert line["messages"][3]["content"][-1] == GIF_PART
    assert cli.main(["export", str(tmp_path / "run"), "--to", "sft", "--output", str(tmp_path / "b.jsonl")]) == 1
    assert "1 conversations with an image, which the format doesn't support" in capsys.readouterr().err

    assert cli.main(["export", str(tmp_path / "run"), "--to", "atif", "--output", str(tmp_path / "atif")]) == 0
    (file,) = (tmp_path / "atif").glob("*.json")
    assert "base64" not in file.read_text()
    sources = [
        part["source"] for part in json.loads(file.read_text())["steps"][0]["message"] if part["type"] == "image"
    ]
    assert [source["media_type"] for source in sources] == ["image/png"]
    assert (tmp_path / "atif" / sources[0]["path"]).read_bytes() == PNG
    assert same(read_atif(file).rollout, rollout)
