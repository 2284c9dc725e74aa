"""Values that an env returns: each field is validated, and an invalid one fails its rollout by name."""

import math
import re
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.errors import EnvError
from agentgym.rollouts.step_result import read_step
from agentgym.scheduling import run_groups
from agentgym.types.messages import Message
from agentgym.types.task import StepResult

GOOD, BAD = (ag.Task(id=name, prompt=(ag.Message(role="user", content="Go."),)) for name in ("good", "bad"))
IMAGE = {"role": "user", "content": [{"type": "image", "image": "x"}]}


class Desk(ag.Env[ag.Task]):
    """An env with reward 1.0 after one turn."""

    limits = ag.Limits(turns=2)

    async def step(self, action: Message) -> Any:
        return StepResult([], 1.0, True, False, {})


def returning(**given: Any) -> Any:
    """Return a `step` with these fields in its result for the task "bad".

    For other tasks it ends the rollout normally.
    """
    fields = {"messages": [], "reward": 1.0, "terminated": True, "truncated": False, "info": {}, **given}

    async def step(self: Desk, action: Message) -> Any:
        return StepResult(**fields) if self.task.id == "bad" else await Desk.step(self, action)

    return {"step": step}


def resetting(value: Any) -> Any:
    async def reset(self: Desk, **given: Any) -> Any:
        return value if self.task.id == "bad" else await Desk.reset(self, **given)

    return {"reset": reset}


def measuring(value: Any) -> Any:
    async def step(self: Desk, action: Message) -> Any:
        if self.task.id == "bad":
            self.metrics = value
        return await Desk.step(self, action)

    return {"step": step}


def scoring(value: Any) -> Any:
    async def score(self: Desk) -> Any:
        return value if self.task.id == "bad" else {}

    return {"score": score}


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        (returning(reward=None), "step: reward must be a number, got None"),
        (returning(reward="1"), "step: reward must be a number, got '1'"),
        (returning(reward=np.array([1.0])), "step: reward must be a number, got array"),
        (returning(reward=math.nan), "step: reward must be finite, got nan"),
        (returning(terminated=None), "step: terminated must be True or False, got None"),
        (returning(truncated="no"), "step: truncated must be True or False, got 'no'"),
        (returning(info=None), "step: info must be a dict, got NoneType"),
        (returning(info={"stop_reason": None}), r"step: info\['stop_reason'\] must be a word, got None"),
        (returning(info={"stop_reason": ""}), r"step: info\['stop_reason'\] must be a word, got ''"),
        (returning(info={"rewards": [1.0]}), r"step: info\['rewards'\]: must be a dict of numbers by name, got list"),
        (returning(info={"rewards": {"a": None}}), r"step: info\['rewards'\]\['a'\] must be a number, got None"),
        (returning(info={"rewards": {0: 1, 1: -1}}), r"step: info\['rewards'\]: a name must be text, got 0"),
        (
            returning(info={"rewards": {"a": 0.5}}),
            r"step: reward is 1, but info\['rewards'\] .* sum to 0.5; set only one",
        ),
        (returning(messages="hi", terminated=False), "step: messages must be a list of messages, got str"),
        (returning(messages=["hi"]), r"step: messages\[0\] must be a dict, got str"),
        (
            returning(messages=[IMAGE]),
            r"step: messages\[0\].content\[0\]: must be {'type': 'text', .* got {type: 'image'",
        ),
        (
            returning(messages=[{"role": "user", "content": None}]),
            r"step: messages\[0\].content: must be text, or a list of parts .* got None",
        ),
        (returning(messages=[{"role": "developer", "content": ""}]), r"step: messages\[0\].role must be one of system"),
        (resetting(None), r"reset: must return \(messages, info\), got NoneType"),
        (resetting(([IMAGE], {})), r"reset: messages\[0\].content\[0\]: must be {'type': 'text'"),
        (resetting(([], {})), "reset: messages must not be empty"),
        (measuring(None), "metrics: must be a dict of numbers by name, got NoneType"),
        (measuring({"forks": 10.0}), r"metrics\['forks'\]: the rollout counts this itself; give .* another name"),
        (measuring({"seconds": 1.0}), r"metrics\['seconds'\]: the rollout counts this itself"),
        (measuring({"model_calls/judge": 1}), r"metrics\['model_calls/judge'\]: the rollout counts this itself"),
        (measuring({"why": "because"}), r"metrics\['why'\] must be a number, got 'because'"),
        (scoring(None), "score: must be a dict of numbers by name, got NoneType"),
        (scoring({"a": None}), r"score\['a'\] must be a number, got None"),
    ],
)
async def test_an_invalid_result_of_an_env_fails_its_rollout_by_field_name(parts: Any, error: str) -> None:
    groups = await run_groups(type("Broken", (Desk,), parts), [BAD, GOOD], Scripted([say("hi")] * 2), n=1)
    bad, good = groups.rollouts
    assert (bad.reward, good.reward) == (None, 1.0)
    assert re.match(rf"EnvError: Broken\.{error}", bad.error or "")
    assert groups.metrics()["reward"] == 1.0


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.array(1.0), np.int64(1)])
async def test_every_kind_of_number_is_a_reward(reward: Any) -> None:
    rollout = await ag.rollout(type("Desk", (Desk,), returning(reward=reward)), BAD, Scripted([say("hi")]))
    assert (rollout.reward, type(rollout.reward)) == (1.0, float)


@pytest.mark.parametrize("rewards", [None, {}])
async def test_empty_named_rewards_replace_nothing(rewards: Any) -> None:
    env = type("Desk", (Desk,), returning(info={"rewards": rewards}))
    rollout = await ag.rollout(env, BAD, Scripted([say("hi")]))
    assert (rollout.reward, rollout.segments[0].turns[0].reward) == (1.0, 1.0)


async def test_an_env_that_ends_the_episode_is_still_scored() -> None:
    env = type("Desk", (Desk,), scoring({"won": 2.0}))
    rollout = await ag.rollout(env, BAD, Scripted([say("hi")]))
    assert (rollout.reward, rollout.rewards, rollout.stop_reason) == (3.0, {"won": 2.0}, "done")


@pytest.mark.parametrize("end", ["terminated", "truncated"])
async def test_a_last_step_that_names_its_rewards_is_not_scored_again(end: str) -> None:
    ends = {"terminated": False, "truncated": False, end: True}
    parts = returning(reward=0.5, info={"rewards": {"won": 0.5}}, **ends) | scoring({"won": 2.0})
    rollout = await ag.rollout(type("Desk", (Desk,), parts), BAD, Scripted([say("hi")]))
    assert (rollout.reward, rollout.rewards) == (0.5, {"won": 0.5})


async def test_an_instance_instead_of_the_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^env: must be an Env class or its name, got .*pass the class itself"):
        await ag.rollout(Desk(GOOD), GOOD, Scripted([]))  # type: ignore[arg-type]


async def test_a_sub_agents_messages_are_validated_like_those_of_a_step() -> None:
    class Asks(Desk):
        async def step(self, action: Message) -> Any:
            async with self.fork("subagent", [IMAGE]):  # type: ignore[list-item]
                raise AssertionError

    rollout = await ag.rollout(Asks, GOOD, Scripted([say("hi")]))
    assert str(rollout.error).startswith("EnvError: Asks.fork: messages[0].content[0]: must be {'type': 'text', ")


@pytest.mark.parametrize(("result", "got"), [(None, "NoneType"), ([], "list"), (([], 1.0, True), "3 values")])
def test_an_invalid_step_result_is_named_in_the_error(result: Any, got: str) -> None:
    said = rf"^Desk\.step: must return StepResult\(messages, .*\), got {got}$"
    with pytest.raises(EnvError, match=said):
        read_step(result, "Desk.step")
