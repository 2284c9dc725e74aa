"""Simulated users: a model plays the other side, and the policy is never trained on its tokens."""

from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.judges import UserEnv
from agentgym.judges.simulated_user import SimulatedUser
from agentgym.samples import build_samples
from agentgym.store.reader import RolloutStore
from agentgym.testing import check_env
from agentgym.types import Group
from agentgym.types.completion import Completion

TASK = ag.Task(id="t", prompt=[{"role": "system", "content": "You work in a shop."}])
USER = [say("I want my money back."), say("It is 17."), say("Thanks. ###STOP###")]
AGENT = [say("Which order?"), call("refund", order=17), say("Done.")]


class Shop(UserEnv[ag.Task]):
    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [TASK] if split == "train" else []

    async def setup(self) -> None:
        self.refunded: list[int] = []

    async def user_system(self) -> str:
        return "You ordered a lamp, number 17."

    @ag.tool
    async def refund(self, order: int) -> str:
        """Refund an order."""
        self.refunded.append(order)
        return "refunded"

    @ag.reward
    def right(self) -> float:
        self.metrics["words"] = float(len(self.user.messages))
        return float(self.refunded == [17])


async def play(agent: Any = AGENT, user: Any = USER, env: type[Shop] = Shop, **given: Any) -> ag.Rollout:
    return await ag.rollout(env, TASK, Scripted(agent), models={"user": Scripted(user)}, **given)


async def test_the_agent_and_the_user_talk_until_the_user_stops(no_leaks: None) -> None:
    rollout = await play()
    assert (rollout.reward, rollout.stop_reason, rollout.error) == (1.0, "done", None)
    said = [(m["role"], m["content"]) for m in rollout.transcript()[0].messages if m["role"] != "assistant"]
    assert said == [
        ("system", "You work in a shop."),
        ("user", "I want my money back."),
        ("user", "It is 17."),
        ("tool", "refunded"),
        ("user", "Thanks."),
    ]
    assert rollout.metrics["user_turns"] == 2
    assert rollout.metrics["model_calls/user"] == 3


async def test_what_the_user_says_before_it_stops_is_in_the_rollout_its_print_and_its_store(tmp_path: Path) -> None:
    user = Scripted([say("My lamp."), say("Yes, close it.\n###STOP### Bye.")])
    models = {"user": user}
    evaluation = await ag.evaluate(Shop, Scripted([say("Close?")]), tasks=[TASK], models=models, output_dir=tmp_path)
    (rollout,) = evaluation.rollouts
    with RolloutStore(tmp_path) as store:
        (stored,) = [found.rollout for found in store.find()]
    for found in (rollout, stored):
        assert found.transcript()[0].messages[-1] == ag.Message(role="user", content="Yes, close it.")
    assert "user: Yes, close it." in str(rollout)
    assert "STOP" not in str(rollout)


async def test_a_user_that_only_stops_adds_no_message() -> None:
    rollout = await play(agent=[say("Close?")], user=[say("My lamp."), say(" ###STOP###")])
    assert rollout.transcript()[0].messages[-1]["content"] == "Close?"
    assert rollout.stop_reason == "done"


@pytest.mark.parametrize("empty", ["", " \n\t", "<think>I say nothing.</think>", "<think>###STOP###"])
async def test_an_empty_answer_of_the_user_is_requested_again_once_with_a_reminder(empty: str) -> None:
    asked: list[str] = []
    said = [empty, "My lamp.", empty, "It is 17.", "###STOP###"]

    def user(text: str) -> ag.Message:
        asked.append(text)
        return say(said[len(asked) - 1])

    rollout = await play(agent=[say("Which?"), say("Fine.")], user=user)
    told = [message["content"] for message in rollout.transcript()[0].messages if message["role"] == "user"]
    assert told == ["My lamp.", "It is 17."]
    assert rollout.metrics["model_empty_answers/user"] == 2
    reminder = "(Your last message was empty. Write what the user says next, or ###STOP### to end the conversation.)"
    assert [reminder in text for text in asked] == [False, True, False, True, False], "it is not part of the talk"


async def test_a_user_that_says_nothing_twice_ends_the_rollout_which_is_scored() -> None:
    """The agent could make the user silent: this must not cost it the reward."""
    rollout = await play(agent=[call("refund", order=17), say("Which?")], user=[say("My lamp."), say(""), say("")])
    assert (rollout.reward, rollout.stop_reason) == (1.0, "user_silent")
    assert rollout.transcript()[0].messages[-1]["content"] == "Which?"


@pytest.mark.parametrize("said", ["I want a refund. ###STOP###", "###STOP###", ""])
async def test_a_user_that_stops_with_its_first_message_leaves_no_turn_to_the_agent(said: str) -> None:
    rollout = await play(user=lambda text: say(said))
    assert (rollout.reward, rollout.segments) == (None, ())
    first = said.removesuffix("###STOP###").strip()
    assert f"the simulated user's first message, {first!r}, is empty or ends the conversation" in str(rollout.error)


async def test_no_token_of_the_user_is_trained() -> None:
    rollout = await play()
    other = ag.Rollout(rollout_id="t/1", group_id="t", segments=rollout.segments, reward=0.0, stop_reason="done")
    (sample, _) = build_samples([Group(group_id="t", rollouts=(rollout, other))])
    trained = bytes(sample.response_ids[sample.loss_mask].clip(0, 255).astype("uint8")).decode("utf-8", "replace")
    assert "Which order?" in trained
    for words in ("money back", "It is 17", "refunded"):
        assert words not in trained


async def test_the_user_model_sees_swapped_roles_after_its_own_instructions() -> None:
    texts: list[str] = []

    def user(text: str) -> ag.Message:
        texts.append(text)
        return USER[len(texts) - 1]

    await play(user=user)
    assert "<|im_start|>system\nYou ordered a lamp, number 17." in texts[1]
    assert "<|im_start|>user\nHello! How can I help you?" in texts[1]
    assert "<|im_start|>assistant\nI want my money back." in texts[1]
    assert texts[1].rstrip().endswith("<|im_start|>user\nWhich order?<|im_end|>\n<|im_start|>assistant")
    assert "You work in a shop." not in texts[1]


async def test_a_users_last_text_is_returned_and_the_end_is_detected() -> None:
    found: list[tuple[str, bool]] = []

    class Talks(ag.ToolEnv[ag.Task]):
        @ag.reward
        async def one(self) -> float:
            user = SimulatedUser(self.model("user"), "You are brief.")
            for said in ("Hi", "Bye"):
                answer = await user.answer(said)
                found.append((answer, user.stopped))
            return 1.0

    user = Scripted([say("Hello."), say("Thanks. ###STOP### and more")])
    await ag.rollout(Talks, TASK, Scripted([say("x")]), models={"user": user})
    assert found == [("Hello.", False), ("Thanks.", True)]


async def test_a_users_first_message_is_joined_to_a_prompt_that_ends_with_a_user() -> None:
    task = ag.Task(id="t", prompt="A customer comes in.")
    rollout = await ag.rollout(Shop, task, Scripted(AGENT), models={"user": Scripted(USER)})
    assert rollout.segments[0].prompt_messages[0]["content"] == "A customer comes in.\n\nI want my money back."
    told = (*TASK.prompt, ag.Message(role="user", content="A customer comes in."))
    rollout = await ag.rollout(Shop, ag.Task(id="t", prompt=told), Scripted(AGENT), models={"user": Scripted(USER)})
    assert [message["content"] for message in rollout.segments[0].prompt_messages] == [
        "You work in a shop.",
        "A customer comes in.\n\nI want my money back.",
    ]


async def test_a_user_by_default_generates_at_most_512_tokens_greedily() -> None:
    asked: list[tuple[int, float]] = []

    class Noted(Scripted):
        async def generate(self, *args: Any, max_tokens: int, sampling: ag.Sampling, **given: Any) -> Completion:
            asked.append((max_tokens, sampling.temperature))
            return await super().generate(*args, max_tokens=max_tokens, sampling=sampling, **given)

    class Chatty(Shop):
        user_max_tokens = 64
        user_temperature = 0.5

    for env in (Shop, Chatty):
        await ag.rollout(env, TASK, Scripted(AGENT), models={"user": Noted(USER)})
    assert asked == [*[(512, 0.0)] * 3, *[(64, 0.5)] * 3]


class Short(Shop):
    limits = ag.Limits(turns=3)


async def test_a_user_that_never_stops_is_ended_by_a_limit() -> None:
    rollout = await play(agent=lambda text: say("And?"), user=lambda text: say("Hm."), env=Short)
    assert (rollout.stop_reason, rollout.reward) == ("turns", 0.0)


async def test_a_full_user_context_ends_a_scored_rollout_with_advice() -> None:
    """The agent could fill the context: its own output must not cost it the reward."""

    def user(text: str) -> ag.Message:
        return say("word " * 40)

    roomy = await play(agent=lambda text: say("And?"), user=user, env=Short)
    assert (roomy.error, roomy.metrics["model_cut_answers/user"]) == (None, 0)
    models = {"user": Scripted(user, context_tokens=800)}
    rollout = await ag.rollout(Short, TASK, Scripted(lambda text: say("And?")), models=models)
    assert (rollout.reward, rollout.stop_reason) == (0.0, "model_limit")
    assert rollout.metrics["model_cut_answers/user"] == 1  # The previous answer had less space than requested.
    said = "model 'user': 8 messages with 825 ids leave no room for a reply in its context of 800; use a"
    assert said in str(rollout.failed_cases)


async def test_an_env_with_a_user_fulfills_the_contract() -> None:
    def user(text: str) -> ag.Message:
        return USER[2] if "Done." in text else USER[text.count("<|im_start|>assistant") - 1]

    await check_env(Shop, TASK, oracle=AGENT, models={"user": Scripted(user)})


async def test_a_user_env_needs_a_model_and_instructions() -> None:
    rollout = await ag.rollout(Shop, TASK, Scripted(AGENT))
    assert "there is no model 'user'; there are: none" in str(rollout.error)

    class Nobody(UserEnv[ag.Task]):
        @ag.reward
        def one(self) -> float:
            return 1.0

    rollout = await ag.rollout(Nobody, TASK, Scripted(AGENT), models={"user": Scripted(USER)})
    assert "Nobody.user_system(): must be implemented" in str(rollout.error)
    with pytest.raises(ValueError, match="user_system is a plain `def`"):

        class Plain(UserEnv[ag.Task]):
            def user_system(self) -> str:  # type: ignore[override]
                return ""
