"""Images on text-only engines: refused by name, and before a model is loaded if that can be known."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentgym as ag
from agentgym.bridges.episode_player import EpisodePlayer
from agentgym.bridges.trl.environment import _prompt
from agentgym.cli import main as cli
from agentgym.engines.messages import refuse_in_training
from agentgym.environments import GameTask
from agentgym.environments.mixture import mix
from agentgym.errors import EnvError
from agentgym.judges.simulated_user import _with_first_words
from agentgym.run.preflight import hold_checked
from agentgym.testing import Scripted, Seeing, call, check_env, say
from agentgym.tools.calls import dispatch
from agentgym.tools.images import image_in
from agentgym.types.messages import Message, text_of
from agentgym.types.task import StepResult
from tests.types.messages.pictures import GIF, PART, PNG, SHOWN, text_part

WORDS = ag.Task(id="words", prompt="What is it?")
SEEN = ag.Task(id="seen", prompt=["What is it?", ag.Image(PNG)])
TOLD = r"contains an image, but this engine supports only text, also in training; evaluate with a chat endpoint whose"


class Looks(ag.ToolEnv[ag.Task]):
    """An env with reward 1 for an answer; its tool may return a picture, which its annotation doesn't say."""

    listed: ClassVar[Sequence[ag.Task]] = (WORDS,)

    @classmethod
    def tasks(cls, split: str) -> Sequence[ag.Task]:
        return [task.model_copy(update={"id": f"{split}-{task.id}"}) for task in cls.listed]

    @ag.tool
    async def look(self, how: str) -> Any:
        """Look at the picture."""
        shown: dict[str, Any] = {
            "alone": ag.Image(PNG),
            "beside": ("a cat", ag.Image(PNG), {"legs": 4}),
            "list": ["a cat", "a dog"],
            "stop": ag.Stop("seen", ag.Image(PNG)),
        }
        return shown[how]

    @ag.reward
    def said(self) -> float:
        return float(self.answer == "a cat")


class Shown(Looks):
    """An env whose prompts contain pictures."""

    listed = (WORDS, SEEN)


class Returns(Looks):
    """An env whose tool is annotated to return a picture."""

    @ag.tool
    async def picture(self) -> ag.Image:
        """Show the picture."""
        return ag.Image(PNG)


@pytest.mark.parametrize(
    ("how", "content"),
    [
        ("alone", [PART]),
        ("beside", [text_part("a cat"), PART, text_part('{"legs": 4}')]),
        ("list", '["a cat", "a dog"]'),
        ("stop", [PART]),
    ],
)
async def test_a_tool_result_with_an_image_becomes_content_parts(how: str, content: Any) -> None:
    result = await dispatch(Looks(WORDS), "look", {"how": how})
    assert (result.content, result.error) == (content, False)


async def test_an_image_that_cannot_be_created_is_a_tool_failure() -> None:
    class Broken(Looks):
        @ag.tool
        def torn(self) -> ag.Image:
            """Show a torn picture."""
            return ag.Image(PNG[4:])

    result = await dispatch(Broken(WORDS), "torn", {})
    assert result.failed
    assert result.content.startswith("error: tool 'torn' failed: ValueError: data: starts with b'\\r\\n")


async def test_an_image_of_another_library_raises_an_error_with_the_conversion() -> None:
    class Draws(Looks):
        @ag.tool
        def draw(self) -> Any:
            """Draw."""
            return pytest.importorskip("PIL.Image").new("RGB", (3, 2))

    result = await dispatch(Draws(WORDS), "draw", {})
    assert result.content.endswith("neither text nor JSON: TypeError: a Image; return ag.Image.from_pil(...) of it")


async def test_a_generators_text_precedes_the_image_that_it_stops_with() -> None:
    class Talks(Looks):
        @ag.tool
        async def talk(self) -> Any:
            """Talk, and show the picture."""
            yield "it is "
            yield "this:"
            yield ag.Stop("shown", [ag.Image(PNG), "Bye."])

    result = await dispatch(Talks(WORDS), "talk", {})
    assert (result.stop, result.content) == ("shown", [text_part("it is this:"), PART, text_part("Bye.")])


async def test_a_prompt_with_an_image_fails_on_a_text_engine_with_advice() -> None:
    rollout = await ag.rollout(Looks, SEEN, Scripted([say("a cat")]))
    said = "EnvError: Looks: first prompt: ValueError: messages[0].content: contains an image, but this engine supports"
    assert str(rollout.error).startswith(said)
    assert rollout.sampled_tokens == 0


async def test_a_tool_that_returns_an_image_fails_its_rollout_on_a_text_engine() -> None:
    rollout = await ag.rollout(Looks, WORDS, Scripted([call("look", how="beside"), say("a cat")]))
    assert str(rollout.error).startswith(
        "EnvError: Looks: the messages of step: ValueError: messages[0].content: contains"
    )
    assert rollout.segments[0].turns[0].env_messages[0]["content"] == [
        text_part("a cat"),
        PART,
        text_part('{"legs": 4}'),
    ]


async def test_a_text_only_judge_is_never_sent_an_image() -> None:
    class Judged(Looks):
        @ag.reward
        async def judged(self) -> float:
            shown = [Message(role="user", content=["How good?", ag.Image(PNG)])]
            return float(await self.model("judge").ask(shown))

    rollout = await ag.rollout(Judged, WORDS, Scripted([say("a cat")]), models={"judge": Scripted([say("1")])})
    assert "the messages to model 'judge': ValueError: messages[0].content: contains an image" in str(rollout.error)


async def test_an_image_in_a_system_message_is_refused_on_every_engine() -> None:
    class Odd(ag.Env[ag.Task]):
        async def step(self, action: Message) -> StepResult:
            return StepResult([Message(role="system", content=[ag.Image(PNG)])], 0.0, False, False, {})

    for engine in (Scripted([say("a")]), Seeing(Scripted([say("a")]))):
        rollout = await ag.rollout(Odd, WORDS, engine)
        assert rollout.error == (
            "EnvError: Odd.step: messages[0].content[0]: a message with the role 'system' can't have an image; "
            "put it in a user message"
        )


async def test_an_evaluation_is_refused_before_anything_is_loaded_or_run() -> None:
    told = (
        r"^model: .*none/such reads only text, but the prompt of task 'test-seen' has an image, messages\[0\]\.content"
    )
    with pytest.raises(ValueError, match=told):
        await ag.evaluate(Shown, "none/such")
    engine = Scripted([say("a cat")])
    with pytest.raises(
        ValueError, match="Scripted reads only text, but tool 'picture' of Returns returns an image; eval"
    ):
        await ag.evaluate(Returns, engine)
    with pytest.raises(ValueError, match="Scripted reads only text, but the prompt of task 'b/test-seen' has an image"):
        await ag.evaluate(mix({"a": ag.Member(Looks, 1), "b": ag.Member(Shown, 1)}), engine)
    evaluation = await ag.evaluate(Shown, Seeing(Scripted([say("a cat")])))
    assert evaluation.reward == 1.0


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (
            Shown,
            r"^env: the prompt of task 'train-seen' has an image, messages\[0\]\.content\[1\], but training supports",
        ),
        (Returns, r"^env: tool 'picture' of Returns returns an image, but training supports only text; evaluate with"),
        (
            mix({"a": ag.Member(Looks, 1), "b": ag.Member(Returns, 1)}),
            r"^env: tool 'picture' of Returns returns an image, but training supports only text",
        ),
    ],
)
def test_training_is_refused_before_a_model_is_loaded(tmp_path: Path, env: Any, told: str) -> None:
    run = ag.RunConfig(recipe="r", env="e", model="none/such", max_steps=1, prompts_per_step=1, eval_tasks=0)
    with pytest.raises(ValueError, match=told), hold_checked(run, env, tmp_path / "run"):
        raise AssertionError
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"^model: "), hold_checked(run, Looks, tmp_path / "run"):
        raise AssertionError  # Without images, only the model is wrong.


def test_an_engine_with_vision_is_refused_in_training() -> None:
    with pytest.raises(ValueError, match=r"^engine: Seeing returns neither token ids nor log-probabilities"):
        refuse_in_training(Seeing(Scripted([])))


def annotated(returns: Any) -> type[Looks]:
    async def shows(self: Any) -> Any:
        """Show it."""

    shows.__annotations__["return"] = returns
    return type("Annotated", (Looks,), {"shows": ag.tool(shows)})


@pytest.mark.parametrize(
    ("returns", "is_image"),
    [
        (ag.Image, True),
        (list[str | ag.Image], True),
        (tuple[str, ag.Image], True),
        (ag.Image | ag.Stop, True),
        (ag.Image | None, True),
        (str | ag.Image, False),
        (str | ag.Stop, False),
        (list[str], False),
        (Any, False),
        (None, False),
    ],
)
def test_a_tool_counts_as_returning_images_only_if_its_annotation_requires_it(returns: Any, is_image: bool) -> None:
    assert (image_in(annotated(returns), []) is not None) == is_image


def test_images_only_for_sub_agents_or_other_models_are_no_reason_to_refuse() -> None:
    class Sub(Looks):
        @ag.tool(root=False)
        async def picture(self) -> ag.Image:
            """Show the picture."""
            return ag.Image(PNG)

    class Other(Returns):
        root_engine = "sees"

    assert image_in(Sub, [WORDS]) is image_in(Other, [SEEN]) is None
    assert image_in(Looks, [WORDS, SEEN]) == "the prompt of task 'seen' has an image, messages[0].content[1]"


async def test_check_env_gives_an_env_with_images_an_engine_with_vision(caplog: pytest.LogCaptureFixture) -> None:
    oracle = [call("look", how="alone"), say("a cat")]
    with caplog.at_level(logging.WARNING, "agentgym.testing.env_checks"):
        await check_env(Looks, WORDS, oracle=[say("a cat")])
        assert caplog.messages == []
        await check_env(Looks, SEEN, oracle=oracle, secrets=[PART["image_url"]["url"].partition(",")[2]])
        await check_env(Looks, WORDS, oracle=oracle)
    said = "Looks shows images: it is checked as on an endpoint with vision, and it can only be evaluated there, not"
    assert [message.startswith(said) for message in caplog.messages] == [True, True]


async def test_a_different_image_for_the_same_seed_is_detected() -> None:
    class Random(Looks):
        drawn: ClassVar[list[int]] = []

        @ag.tool
        async def look(self, how: str) -> Any:
            """Look at another picture each time."""
            self.drawn.append(0)
            return ag.Image(PNG + bytes([len(self.drawn)]))

    class Steps(ag.Env[ag.Task]):
        async def step(self, action: Message) -> StepResult:
            Random.drawn.append(0)
            shown = Message(role="user", content=[ag.Image(PNG + bytes([len(Random.drawn)]))])
            return StepResult([shown], 1.0, len(Random.drawn) % 2 == 0, False, {})

        async def score(self) -> dict[str, float]:
            return {}

    oracle = [call("look", how="alone"), say("a cat")]
    with pytest.raises(
        AssertionError, match="seed: tool 'look' gave different results for the same call with the same seed"
    ):
        await check_env(Random, WORDS, oracle=oracle, shared=["drawn"])
    with pytest.raises(
        AssertionError, match=r"seed: step\(\) gave different results for the same call with the same seed"
    ):
        await check_env(Steps, WORDS, oracle=lambda text: say("a"))


async def test_a_script_sees_a_placeholder_per_image_and_requests_are_recorded() -> None:
    texts: list[str] = []

    def answer(text: str) -> Message:
        texts.append(text)
        return say("a cat") if SHOWN in text.rpartition("tool")[2] else call("look", how="alone")

    engine = Seeing(Scripted(answer))
    rollout = await ag.rollout(Looks, WORDS, engine)
    assert (rollout.error, rollout.reward, len(texts)) == (None, 1.0, 2)
    assert [text_of(message["content"]) for message in engine.asked[-1]] == ["What is it?", "", SHOWN]
    assert engine.asked[-1][-1]["tool_call_id"] == engine.asked[-1][1]["tool_calls"][0]["id"]


def test_a_human_player_sees_a_placeholder_per_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "turns"
    lines.write_text("/tool look how=alone\na cat\n")
    with lines.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert cli.main(["play", f"{__name__}:Shown", "--number", "1"]) == 0
    said = capfd.readouterr().out
    assert f"user: What is it?\n    {SHOWN}\n" in said
    assert f"tool: {SHOWN}\n" in said
    assert "reward 1, stopped by answer" in said


class Nim(ag.Game):
    """A game that ends with the first move."""

    def start(self, seed: int) -> None:
        self.turn: int | None = 0

    def play(self, action: str, player: int) -> None:
        self.turn = None

    def observe(self, player: int) -> str:
        return "three matches"

    def to_move(self) -> int | None:
        return self.turn

    def returns(self) -> list[float]:
        return [1.0, -1.0]


async def test_text_appended_to_a_prompt_leaves_its_images_in_place() -> None:
    behind = text_part("three matches")
    asked = GameTask(id="g", prompt=["Play:", ag.Image(PNG)], seed=0, seat=0)
    rollout = await ag.rollout(Nim, asked, Seeing(Scripted([call("move", action="1"), say("over")])))
    assert (rollout.error, rollout.reward) == (None, 1.0)
    assert rollout.segments[0].prompt_messages[0]["content"] == [text_part("Play:"), PART, behind]
    (first,) = _with_first_words(SEEN.prompt, "three matches")
    assert first["content"] == [text_part("What is it?"), PART, behind]


async def test_the_last_message_of_a_sub_agent_stopped_by_a_tool_is_text() -> None:
    class Sends(Looks):
        heard: ClassVar[list[str]] = []

        @ag.tool
        async def send(self) -> str:
            """Send a sub-agent."""
            async with self.fork("subagent", [Message(role="user", content="Look.")], tools=[self.look]) as agent:
                self.heard.append(await agent.run())
            return self.heard[-1]

    script = [call("send"), call("look", how="stop"), say("a cat")]
    rollout = await ag.rollout(Sends, WORDS, Seeing(Scripted(script)))
    assert (rollout.error, Sends.heard) == (None, [SHOWN])


async def test_agent_programs_and_trl_accept_only_text() -> None:
    with pytest.raises(EnvError, match=r"^AgentEnv: messages\[0\]\.content\[1\]: an agent gets its prompt as text"):
        await ag.AgentEnv(SEEN).play(None, SEEN.prompt)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^prompt: task 'seen' has an image, but TRL gets only text"):
        _prompt(Looks, SEEN)


async def test_other_libraries_get_the_contents_unchanged() -> None:
    class Shows(ag.Env[ag.Task]):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return [Message(role="user", content=["Look:", ag.Image(PNG)])], {}

        async def step(self, action: Message) -> StepResult:
            return StepResult([Message(role="user", content=["Look:", ag.Image(GIF)])], 0.0, False, False, {})

    player = EpisodePlayer(Shows, None, None)
    (first,), _ = await player.reset(WORDS, seed=0, options=None)
    assert first["content"] == [text_part("Look:"), PART]
    result = await player.step(say("a"))
    assert result.messages[0]["content"] == [text_part("Look:"), ag.Image(GIF).part]
    await player.close()
