"""Environments: rewards, limits, the registry, and tasks made from their index."""

from collections.abc import Iterator
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, calls, say
from agentgym.environments import registry
from agentgym.environments.registry import find_env, registered
from agentgym.environments.rewards import rewards_of, total
from agentgym.errors import EnvError
from agentgym.sandboxes.fake.sandbox import FakeSandbox

TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="Go."),))


class Base(ag.ToolEnv[ag.Task]):
    @ag.reward
    def plain(self) -> float:
        return 1.0


class Quiz(Base):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "seen"

    @ag.tool
    async def fail(self) -> str:
        """Fail."""
        raise ag.ToolError("no")

    @ag.tool
    async def submit(self) -> ag.Stop:
        """Hand in."""
        return ag.Stop("submitted")

    @ag.reward(weight=0.5)
    async def slow(self) -> float:
        return 3.0

    @ag.reward(weight=-1)
    def errors(self) -> bool:
        return bool(self.metrics["tool_errors"])


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", {})


async def test_plain_and_async_rewards_are_weighted_and_inherited() -> None:
    assert rewards_of(Quiz) == {"plain": 1.0, "slow": 0.5, "errors": -1}
    scores = await Quiz(TASK).score()
    assert scores == {"plain": 1.0, "slow": 3.0, "errors": 0.0}
    assert total(Quiz, scores | {"errors": 1.0, "added": 4.0}) == 1.0 + 1.5 - 1.0 + 4.0


async def test_an_answer_without_a_call_ends_the_rollout_and_step_does_not_score_it() -> None:
    env = Quiz(TASK)
    messages, reward, terminated, truncated, info = await env.step(say("42"))
    assert (messages, reward, terminated, truncated) == ([], 0.0, True, False)
    assert info == {"stop_reason": "answer"}
    assert await env.score() == {"plain": 1.0, "slow": 3.0, "errors": 0.0}
    assert env.answer == "42"


async def test_every_call_of_a_turn_is_answered_in_order_with_its_id() -> None:
    asked = calls(("look", {}), ("lok", {}))
    for number, made in enumerate(asked["tool_calls"]):
        made["id"] = f"id{number}"
    result = await Quiz(TASK).step(asked)
    assert [(m["role"], m["tool_call_id"], m["name"]) for m in result.messages] == [
        ("tool", "id0", "look"),
        ("tool", "id1", "lok"),
    ]
    assert not result.terminated


async def test_stop_ends_the_turn_immediately() -> None:
    env = Quiz(TASK)
    result = await env.step(calls(("look", {}), ("submit", {}), ("look", {})))
    assert result.terminated
    assert result.info["stop_reason"] == "submitted"
    assert env.metrics["tool_calls"] == 2


async def test_calls_errors_and_malformed_calls_are_counted_separately() -> None:
    env = Quiz(TASK)
    await env.step(call("look"))
    await env.step(call("lok"))
    assert env.metrics == {"tool_calls": 1, "tool_errors": 1, "malformed_calls": 1}
    assert (await env.score())["errors"] == 1


async def test_a_call_reaches_a_tool_or_is_malformed_and_unknown_names_are_no_metrics() -> None:
    env = Quiz(TASK)
    broken = call("look")
    broken["tool_calls"][0]["function"]["arguments"] = "{oops"
    for action in (broken, call("lok"), call("look", at=1), call("look"), call("fail")):
        await env.step(action)
    assert env.metrics == {"tool_calls": 2, "malformed_calls": 3, "tool_errors": 4, "tool_errors/fail": 1}


async def test_the_tools_are_offered_and_the_prompt_is_the_tasks() -> None:
    env = Quiz(TASK)
    assert [tool["function"]["name"] for tool in env.tools] == ["look", "fail", "submit"]
    assert await env.reset(seed=1) == (list(TASK.prompt), {})


async def test_setup_runs_at_reset_and_its_errors_are_named() -> None:
    class Prepared(Quiz):
        ready, divisor = 0, 1

        async def setup(self) -> None:
            self.ready = 1 // self.divisor

    env = Prepared(TASK)
    await env.reset(seed=1)
    assert env.ready == 1
    env.divisor = 0
    with pytest.raises(EnvError, match=r"^Prepared\.setup: ZeroDivisionError: "):
        await env.reset(seed=1)


async def test_changes_to_the_prompt_in_reset_stay_in_the_rollout() -> None:
    first, _ = await Quiz(TASK).reset()
    first[0]["content"] += " Think first."
    again, _ = await Quiz(TASK).reset()
    assert again == list(TASK.prompt)
    assert "Think" not in again[0]["content"]


async def test_changes_to_a_call_in_the_prompt_in_reset_stay_in_the_rollout() -> None:
    task = ag.Task(id="t", prompt=({"role": "user", "content": "?"}, call("look", at=1)))
    first, _ = await Quiz(task).reset()
    first[1]["tool_calls"][0]["function"]["arguments"]["at"] = 2  # type: ignore[index]
    again, _ = await Quiz(task).reset()
    assert again[1]["tool_calls"][0]["function"]["arguments"] == {"at": 1}


@pytest.mark.parametrize(
    ("field", "value"), [("turns", None), ("turns", 2.5), ("seconds", float("nan")), ("seconds", None), ("tokens", "9")]
)
def test_a_limit_that_is_not_a_number_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be a"):
        ag.Limits(**{field: value})


async def test_a_bare_env_has_no_tools_and_no_score_and_must_define_step_and_tasks() -> None:
    env = ag.Env(TASK)
    assert env.tools == []
    assert await env.score() == {}
    with pytest.raises(NotImplementedError, match=r"Env\.step"):
        await env.step(say(""))
    with pytest.raises(NotImplementedError, match=r"Env\.tasks\(split\) is not implemented; override it"):
        ag.Env.tasks("train")


def test_an_env_without_a_sandbox_says_how_to_get_one() -> None:
    with pytest.raises(EnvError, match="Quiz has no sandbox: declare `sandbox"):
        Quiz(TASK).sandbox.digest  # noqa: B018
    env = Quiz(TASK)
    env.sandbox = FakeSandbox()
    assert env.sandbox.digest == "fake"


def test_a_registered_env_is_found_by_name() -> None:
    assert ag.register("quiz")(Quiz) is Quiz
    assert find_env("quiz") is Quiz
    assert list(registered()) == [("quiz", Quiz)]


def test_two_envs_with_the_same_name_are_an_error_but_reruns_of_a_module_are_not() -> None:
    ag.register("quiz")(Quiz)
    ag.register("quiz")(type("Quiz", (Quiz,), {"__module__": Quiz.__module__}))
    with pytest.raises(ValueError, match=r"^register: 'quiz' is already registered as .*Quiz$"):
        ag.register("quiz")(Base)


def test_an_env_is_found_by_class_or_by_module_and_class_name() -> None:
    assert find_env(Quiz) is Quiz
    assert find_env("agentgym.environments.tool_env:ToolEnv") is ag.ToolEnv


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("nothing", ValueError, r"'nothing' is not registered \(there are: .*, quiz.*\); import its module, or write"),
        ("agentgym.environments.env:Limits", ValueError, "is not an Env class"),
        ("agentgym.environments.env:Nothing", ValueError, r"is not an Env class; .* \(there are: Env\)"),
        ("no_such_module:Env", EnvError, "ModuleNotFoundError"),
    ],
)
def test_an_unknown_env_is_an_error_that_names_it(name: str, kind: type[Exception], why: str) -> None:
    ag.register("quiz")(Quiz)
    with pytest.raises(kind, match=why) as raised:
        find_env(name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize("field", ["turns", "seconds", "context_tokens", "turn_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_must_be_positive(field: str, value: int) -> None:
    change: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"^{field}: must be (at least 1|above 0), got {value}"):
        ag.Limits(**change)


@pytest.mark.parametrize(
    ("change", "field"), [({"at": None}, "at"), ({"at": 0.0}, "at"), ({"at": 1.0}, "at"), ({"turns": 0}, "turns")]
)
def test_invalid_compaction_settings_are_refused_by_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        ag.Compact(**change)


def make(index: int) -> ag.Task:
    return TASK.model_copy(update={"id": f"t{index}"})


def names(tasks: ag.Procedural[ag.Task]) -> Iterator[str]:
    return (task.id for task in tasks)


def test_a_slice_of_procedural_tasks_makes_the_same_tasks() -> None:
    tasks = ag.Procedural(make, range(10, 10_000_000))
    assert len(tasks) == 9_999_990
    assert list(names(tasks[1:7:2])) == ["t11", "t13", "t15"]
    assert list(names(tasks[:4][2:])) == ["t12", "t13"]
    assert list(names(tasks[2::-1])) == ["t12", "t11", "t10"]
    assert (tasks[0].id, tasks[-1].id) == ("t10", "t9999999")


def test_procedural_tasks_are_made_on_demand_and_end() -> None:
    asked: list[int] = []

    def watched(index: int) -> ag.Task:
        asked.append(index)
        return make(index)

    tasks = ag.Procedural(watched, range(3))
    assert asked == []
    assert len(list(tasks[1:])) == 2
    assert asked == [1, 2]
    with pytest.raises(IndexError):
        tasks[3]


@pytest.mark.parametrize(("own", "first"), [(False, "Be brief."), (True, "Be kind.")])
async def test_the_class_provides_the_system_message_if_the_task_has_none(own: bool, first: str) -> None:
    prompt = (ag.Message(role="system", content="Be kind."), *TASK.prompt) if own else TASK.prompt
    env = type("Brief", (Quiz,), {"system": "Be brief."})
    messages, _ = await env(ag.Task(id="t", prompt=prompt)).reset()
    assert messages == [ag.Message(role="system", content=first), *TASK.prompt]


def test_an_env_without_limits_has_the_defaults_of_the_guide() -> None:
    assert ag.ToolEnv.limits == ag.Limits(
        turns=20, seconds=600.0, context_tokens=8192, turn_tokens=1024, tokens=None, parallel_calls=16, retries=0
    )


def test_a_misspelled_env_gets_the_nearest_registered_name() -> None:
    ag.register("chase")(Quiz)
    with pytest.raises(ValueError, match=r"^env: 'chsae' is not registered \(did you mean 'chase'\?\); import its"):
        registry.find_env("chsae")


class Counting(Quiz):
    async def setup(self) -> None:
        self.metrics = {"guesses": 2.0}


class Clearing(Quiz):
    async def setup(self) -> None:
        self.metrics.clear()

    @ag.tool
    async def wipe(self) -> str:
        """Clear the counts."""
        self.metrics.clear()
        return "wiped"


@pytest.mark.parametrize("env", [Counting, Clearing])
async def test_calls_are_counted_if_setup_replaces_or_clears_the_metrics(env: type[Quiz]) -> None:
    rollout = await ag.rollout(env, TASK, Scripted([call("look"), call("fail"), say("done")]))
    assert {name: rollout.metrics[name] for name in ("tool_calls", "tool_errors", "malformed_calls")} == {
        "tool_calls": 2,
        "tool_errors": 1,
        "malformed_calls": 0,
    }
    assert rollout.metrics.get("guesses", 2.0) == 2.0


async def test_counting_continues_if_a_tool_clears_the_metrics() -> None:
    rollout = await ag.rollout(Clearing, TASK, Scripted([call("look"), call("wipe"), call("fail"), say("done")]))
    assert (rollout.error, rollout.metrics["tool_calls"], rollout.metrics["tool_errors"]) == (None, 2, 1)


async def test_metrics_that_are_not_a_dict_are_an_error_after_setup() -> None:
    class Wrong(Quiz):
        async def setup(self) -> None:
            self.metrics: Any = None

    rollout = await ag.rollout(Wrong, TASK, Scripted([say("done")]))
    assert rollout.error == "EnvError: Wrong.metrics: must be a dict of numbers by name, got NoneType"


@pytest.mark.parametrize("returned", [ag.Stop("nothing to do"), [], 0.0])
async def test_a_setup_that_returns_a_value_is_refused(
    returned: Any,
) -> None:
    class Over(Quiz):
        async def setup(self) -> Any:
            return returned

    rollout = await ag.rollout(Over, TASK, Scripted([say("done")]))
    assert rollout.reward is None
    assert rollout.error is not None
    assert f"Over.setup: returned {returned!r}, but must return None: a rollout begins with a turn" in rollout.error


async def test_an_empty_prompt_and_an_unknown_role_are_refused_by_field() -> None:
    with pytest.raises(ValueError, match=r"prompt\n.*has no messages; the model needs at least one"):
        ag.Task(id="t", prompt=[])
    message = {"role": "developer", "content": "Be brief."}
    with pytest.raises(ValueError, match=r"prompt\.0\.role\n.*got 'developer'; use 'system'"):
        ag.Task.model_validate({"id": "t", "prompt": [message]})

    class Odd(Quiz):
        first: Any = ()

        async def reset(self, **given: Any) -> Any:
            return self.first, {}

    empty = await ag.rollout(Odd, TASK, Scripted([say("done")]))
    odd = await ag.rollout(type("Odd", (Odd,), {"first": [message]}), TASK, Scripted([say("done")]))
    assert empty.error == "EnvError: Odd.reset: messages must not be empty, because the model needs a prompt"
    assert odd.error is not None
    assert "Odd.reset: messages[0].role must be one of system, user, assistant, tool, got 'developer'; " in odd.error
