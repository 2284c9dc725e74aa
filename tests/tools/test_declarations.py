"""Wrong declarations in an env class are refused when the class is created, by name, with the correction."""

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Iterator
from types import FunctionType
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import call
from agentgym.environments.registry import find_env
from agentgym.environments.rewards import rewards_of
from agentgym.errors import EnvError
from agentgym.tools.tool import class_tools

TASK = ag.Task.model_validate({"id": "t", "prompt": "Go."})


class Base(ag.ToolEnv[ag.Task]):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "seen"

    @ag.reward
    def right(self) -> float:
        return 1.0


def env(**parts: Any) -> type[ag.ToolEnv[ag.Task]]:
    return type("Quiz", (Base,), parts)


def fresh(function: Any) -> Any:
    """Return a copy of the function, since a decorator modifies the function that it gets."""
    made = FunctionType(function.__code__, function.__globals__, function.__name__, None, function.__closure__)
    made.__annotations__, made.__doc__ = function.__annotations__, function.__doc__
    made.__dict__.update(function.__dict__)
    return made


def tool(function: Any, **given: Any) -> Any:
    return ag.tool(**given)(fresh(function))


def reward(function: Any) -> Any:
    return ag.reward(fresh(function))


def plain(self: object) -> str:
    """Do it."""
    return "done"


def other(self: object) -> str:
    """Do something else."""
    return "done"


def positional(self: object, a: int, /) -> None:
    """Take one."""


def forgetful(x: int) -> str:
    """Take one, and forget self."""
    return ""


def selfless() -> str:
    """Take nothing."""
    return ""


def untyped(self: object, x) -> None:  # type: ignore[no-untyped-def]
    """Take anything."""


def silent(self: object) -> None: ...


def yielding(self: object) -> Iterator[int]:
    """Yield."""
    yield 1


async def yielding_async(self: object) -> AsyncIterator[int]:
    """Yield."""
    yield 1


@functools.wraps(yielding)
def wrapped(self: object) -> Any:
    return yielding(self)


def needs_answer(self: object, answer: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    "name", ["answer", "task", "metrics", "step", "score", "close", "tools", "fork", "sandbox", "tool_failures"]
)
def test_a_tool_or_reward_hidden_by_the_envs_own_attributes_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^tool '{name}' of Quiz: agentgym's own classes use .*@ag\.tool\(name="):
        env(**{name: tool(plain)})
    with pytest.raises(ValueError, match=rf"^reward '{name}' of Quiz: agentgym's own classes use '{name}'"):
        env(**{name: reward(plain)})


def test_a_tool_may_be_named_answer_if_its_method_is_not() -> None:
    made: type = env(hand_in=tool(plain, name="answer"))
    assert "answer" in class_tools(made)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (plain, "^'look' of Quiz is overridden without @ag.tool; .* `look = None` to remove it"),
        (property(tool(plain)), "^'look' of Quiz: @ag.tool only works on a method, not on a property"),
        (staticmethod(tool(plain)), "^'look' of Quiz: @ag.tool only works on a method, not on a staticmethod"),
        (classmethod(tool(plain)), "^'look' of Quiz: @ag.tool only works on a method, not on a classmethod"),
        (tool(silent), "^tool 'look' of Quiz needs a docstring"),
        (tool(untyped), "^tool 'look' of Quiz: parameter 'x' needs a type annotation"),
        (tool(positional), "^tool 'look' of Quiz: parameter 'a' is positional-only, .* remove the `/`"),
        (tool(selfless), "^tool 'look' of Quiz needs `self` as its first parameter$"),
        (tool(forgetful), "^tool 'look' of Quiz needs `self` as its first parameter, got 'x'$"),
        (tool(yielding), "^tool 'look' of Quiz is a plain generator"),
        (tool(wrapped), "^tool 'look' of Quiz is a plain generator"),
    ],
)
def test_a_tool_that_cannot_be_called_is_refused_when_the_class_is_created(part: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        env(look=part)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (lambda self: 1.0, "^'right' of Quiz is overridden without @ag.reward; .* `right = None`"),
        (property(ag.reward(lambda self: 1.0)), "^'right' of Quiz: @ag.reward only works on a method"),
        (reward(forgetful), "^reward 'right' of Quiz needs `self` as its first parameter, got 'x'$"),
        (reward(needs_answer), "^reward 'right' of Quiz is called with only `self`, but parameter 'answer'"),
        (reward(yielding), "^reward 'right' of Quiz is a generator"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused_when_the_class_is_created(part: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        env(right=part)


@pytest.mark.parametrize("name", ["setup", "reset", "step", "score", "close", "call_tools"])
@pytest.mark.parametrize(
    ("part", "why"),
    [
        (lambda self, *given, **named: None, " is a plain `def`, but agentgym awaits it; write `async def {}"),
        (yielding_async, " is a generator"),
        (property(plain), ": must be a method, got .*; write `async def {}"),
        (None, ": must be a method, got None; write `async def {}"),
    ],
)
def test_a_method_that_is_awaited_is_an_async_def(name: str, part: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^Quiz\.{name}{why.format(name)}"):
        env(**{name: part})


def test_an_env_without_tools_must_await_its_methods_too() -> None:
    with pytest.raises(ValueError, match=r"^Bare\.step is a plain `def`"):
        type("Bare", (ag.Env,), {"step": plain})


def test_a_decorated_async_method_is_accepted() -> None:
    async def close(self: object) -> None: ...

    @functools.wraps(close)
    def decorated(self: object) -> Any:
        return close(self)

    assert env(close=decorated, setup=functools.partialmethod(close))


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (lambda self, split: [], " is called on the class, without an instance; write `@classmethod` above"),
        ([TASK], r": must be a method of the class, got \[.*; write `@classmethod` above"),
        (classmethod(yielding), " is a generator"),
        (classmethod(fresh(Base.step)), " is an `async def`, but agentgym does not await it"),
    ],
)
def test_tasks_must_be_a_plain_classmethod(part: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^Quiz\.tasks{why}"):
        env(tasks=part)


def test_tasks_may_be_static_or_cached() -> None:
    cached: Any = functools.cache(lambda cls, split: [TASK])
    assert env(tasks=staticmethod(lambda split: [TASK])).tasks("train") == [TASK]
    assert env(tasks=classmethod(cached)).tasks("train") == [TASK]


def test_tools_must_be_a_property() -> None:
    with pytest.raises(ValueError, match=r"^Quiz\.tools is read, not called; write `@property` above `def tools"):
        env(tools=lambda self: [])


def test_none_removes_an_inherited_tool_or_reward() -> None:
    bare: type = env(look=None, right=None)
    assert (class_tools(bare), rewards_of(bare)) == ({}, {})


def test_two_tools_with_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^tool 'x' of Quiz: two methods have this name, 'a' and 'b'"):
        env(a=tool(plain, name="x"), b=tool(other, name="x"))


@pytest.mark.parametrize("target", ["look", 0.5, property(plain), staticmethod(plain)])
def test_a_decorator_on_anything_but_a_method_shows_the_correct_form(target: Any) -> None:
    with pytest.raises(TypeError, match=r"^@ag\.tool: expected a method, got .*; write `@ag\.tool`"):
        ag.tool(target)
    with pytest.raises(TypeError, match=r"^@ag\.reward: expected a method, got .*`@ag\.reward\(weight=0\.5\)`"):
        ag.reward(target)


@pytest.mark.parametrize("weight", ["2", None, float("nan"), float("inf"), True])
def test_a_weight_must_be_a_finite_number(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"^weight: must be a finite number, got "):
        ag.reward(weight=weight)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"limits": ag.Limits}, r"^Quiz\.limits: must be `ag\.Limits\(\.\.\.\)`, got the class Limits without \(\)"),
        ({"limits": {"turns": 3}}, r"^Quiz\.limits: must be .*, got {'turns': 3}"),
        (
            {"sandbox_spec": ag.AnySandbox},
            r"^Quiz\.sandbox_spec: must be .* `ag\.AnySandbox\(\)`, got the class AnySandbox without \(\)",
        ),
        ({"context": ag.Compact}, r"^Quiz\.context: must be .*, got the class Compact without \(\)"),
        ({"system": 3}, r"^Quiz\.system: must be text, got 3"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused_when_the_class_is_created(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        env(**parts)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sytem", "Be brief.", "sytem is not an env setting; did you mean 'system'?"),
        ("sysetm", "Be brief.", "sysetm is not an env setting; did you mean 'system'?"),
        ("limit", ag.Limits(turns=3), "limit is not an env setting; did you mean 'limits'?"),
        ("contxt", ag.Window(), "contxt is not an env setting; did you mean 'context'?"),
        ("sandbox_spek", ag.AnySandbox(), "sandbox_spek is not an env setting; did you mean 'sandbox_spec'?"),
        (
            "sandbox",
            ag.AnySandbox(),
            "sandbox: this name is reserved for a rollout's leased sandbox; "
            "declare the kind of sandbox as `sandbox_spec = ...`",
        ),
    ],
)
def test_a_misspelled_setting_is_refused_when_the_class_is_created(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'Quiz.{said}')}$"):
        env(**{name: value})


@pytest.mark.parametrize(
    "parts",
    [
        {"limit": 5},
        {"stem": "walk"},
        {"contexts": ["a", "b"]},
        {"systems": "sun, moon"} | {"system": "Name one."},
        {"big": ag.Docker(memory_mb=2048)},
    ],
)
def test_users_own_attributes_are_not_taken_for_misspelled_settings(parts: dict[str, Any]) -> None:
    assert vars(env(**parts)).items() >= parts.items()


@pytest.mark.parametrize("field", ["turns", "context_tokens", "turn_tokens", "tokens", "retries"])
@pytest.mark.parametrize("value", ["3", 2.5, True, float("nan")])
def test_a_counting_limit_must_be_an_integer(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be a valid integer, got {value!r}"):
        ag.Limits(**{field: value})


def test_only_the_token_limit_may_be_none() -> None:
    assert ag.Limits(tokens=None).tokens is None
    with pytest.raises(ValueError, match=r"^turns: must be a valid integer, got None"):
        ag.Limits(turns=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, "3", float("nan")])
def test_the_limit_of_seconds_must_be_a_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^seconds: must be a (valid|finite) number, got "):
        ag.Limits(seconds=value)


def test_register_without_a_name_or_an_env_shows_the_correct_form() -> None:
    with pytest.raises(TypeError, match=r'^register: expected a name, as in `@ag\.register\("name"\)`'):
        ag.register(Base)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^register: 'fn' can only name an env class, got <function"):
        ag.register("fn")(plain)  # type: ignore[type-var]


def test_an_instance_is_refused_as_an_env() -> None:
    with pytest.raises(ValueError, match=r"^env: must be an Env class or its name, got "):
        find_env(Base(TASK))  # type: ignore[arg-type]


def test_an_env_without_rewards_gives_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Unscored(ag.ToolEnv[ag.Task]):
        pass

    for _ in range(2):
        Unscored(TASK)
    said = "Unscored has no @ag.reward and overrides neither score nor step, so every rollout has the reward 0.0"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_an_env_with_a_custom_score_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def score(self: Any) -> dict[str, float]:
        return {"own": 1.0}

    env(right=None, score=score)(TASK)
    Base(TASK)
    assert caplog.records == []


def test_a_tool_hidden_by_an_instance_attribute_is_an_error_that_names_it() -> None:
    class Hiding(Base):
        def __init__(self, task: ag.Task) -> None:
            super().__init__(task)
            self.look = None  # type: ignore[assignment, method-assign]

    async def play() -> None:
        await Hiding(TASK).step(call("look"))

    with pytest.raises(EnvError, match=r"^tool 'look' of Hiding: hidden by self\.look = None"):
        asyncio.run(play())


def test_an_invalid_sandbox_setting_is_refused_with_the_fix() -> None:
    with pytest.raises(
        ValueError, match=r"^Boxed\.sandbox_spec: must be a sandbox, such as `ag\.AnySandbox\(\)`, got 'docker'"
    ):
        type("Boxed", (ag.ToolEnv,), {"sandbox_spec": "docker"})
