"""The verifiers bridge against the real package's loops and rubrics; `make peers` installs it and runs these tests."""

import asyncio
import re
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

import agentgym as ag
from agentgym.bridges.verifiers import VerifiersEnv, VerifiersTask
from agentgym.engines.scripted import Scripted, call, raw, say
from agentgym.errors import EnvError
from agentgym.errors.extras import install_line
from agentgym.scheduling import run_groups
from tests.agent_api.drawing import Drawing, check_exact

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]


async def test_a_version_without_load_environment_names_the_version_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    with pytest.raises(EnvError, match=re.escape(f"no load_environment; {install_line('verifiers')}")):
        VerifiersEnv.configured(env_id="sums").tasks("train")


try:
    import verifiers as vf
    from datasets import Dataset
except ImportError:
    vf = None

needs_verifiers = pytest.mark.skipif(
    not hasattr(vf, "load_environment"), reason="needs the extra agentgym-kit[verifiers]; `make peers` installs it"
)


def rows(*sums: str) -> Any:
    return Dataset.from_list([{"question": one, "answer": str(sum(map(int, one.split("+"))))} for one in sums])


def right(completion: Any, answer: str, parser: Any) -> float:
    return float(parser.parse_answer(completion).strip() == answer)


async def brief(completion: Any) -> float:
    return 1.0 / len(completion[-1]["content"] or "x")


def made(**declared: Any) -> type[VerifiersEnv]:
    """Return an env class with this `load`."""
    load = declared.pop("load")
    return type("Played", (VerifiersEnv,), {"load": classmethod(lambda cls: load()), **declared})


def task(prompt: str = "2+2", **row: Any) -> VerifiersTask:
    return VerifiersTask(id="t", prompt=prompt, row={"example_id": 0, "answer": "4", "info": {}, **row})


def sums() -> Any:
    rubric = vf.Rubric(funcs=[right, brief], weights=[1.0, 0.5])
    return vf.SingleTurnEnv(dataset=rows("2+2"), eval_dataset=rows("3+4", "1+1"), system_prompt="Add.", rubric=rubric)


@needs_verifiers
async def test_a_single_turn_is_scored_by_its_rubric() -> None:
    env = made(load=sums)
    [first] = env.tasks("train")
    assert [one.id for one in env.tasks("test")] == ["test/0", "test/1"]
    rollout = await ag.rollout(env, first, Scripted([say("4")]))
    assert rollout.failure is None, rollout.failure
    assert (rollout.reward, rollout.rewards, rollout.stop_reason) == (1.5, {"verifiers": 1.5}, "max_turns_reached")
    assert (rollout.metrics["verifiers/right"], rollout.metrics["verifiers/brief"]) == (1.0, 1.0)
    [segment] = rollout.segments
    assert [message["content"] for message in segment.prompt_messages] == ["Add.", "2+2"]
    assert (await ag.rollout(env, first, Scripted([say("five")]))).reward == 0.125


@needs_verifiers
async def test_an_environment_is_loaded_by_name_with_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_sums.py").write_text(
        "import verifiers as vf\nfrom datasets import Dataset\n\n"
        "def load_environment(number=2):\n"
        "    rows = [{'question': f'{i}+{number}', 'answer': str(i + number)} for i in range(60)]\n"
        "    rubric = vf.Rubric(funcs=[lambda **given: 1.0])\n"
        "    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    env = VerifiersEnv.configured(env_id="my-sums", arguments='{"number": 5}')
    train, test = env.tasks("train"), env.tasks("test")
    assert len(train) + len(test) == 60
    assert train[0].prompt[0]["content"] == f"{train[0].row['example_id']}+5"
    assert not {one.id for one in train} & {one.id for one in test}
    with pytest.raises(EnvError, match="env_id: empty"):
        VerifiersEnv.tasks("train")


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any
    """
    if number < 0:
        raise ValueError("no negative numbers")
    return 2 * number


def doubling() -> Any:
    return vf.ToolEnv(tools=[double], max_turns=4, dataset=rows("2+2"), rubric=vf.Rubric(funcs=[right]))


@needs_verifiers
async def test_an_environments_tools_are_called_and_the_model_reads_their_errors() -> None:
    script = [call("double", number=-1), call("double", number=2), say("4")]
    rollout = await ag.rollout(made(load=doubling), task("Double 2."), Scripted(script))
    assert (rollout.failure, rollout.reward, rollout.stop_reason) == (None, 1.0, "no_tools_called")
    [segment] = rollout.segments
    said = [answer["content"] for turn in segment.turns for answer in turn.env_messages]
    assert said == ["no negative numbers", "4"]
    assert rollout.metrics["verifiers/double_calls"] == 2


@needs_verifiers
async def test_a_malformed_call_is_text() -> None:
    rollout = await ag.rollout(made(load=doubling), task(), Scripted([raw('<tool_call>\n{"name": "double", ')]))
    assert (rollout.failure, rollout.reward, rollout.stop_reason) == (None, 0.0, "no_tools_called")


def chatting(**settings: Any) -> Any:
    class Chat(vf.MultiTurnEnv):  # type: ignore[misc]
        """Says "on" until it is told to stop."""

        cleaned: ClassVar[list[Any]] = []
        torn: ClassVar[list[str]] = []

        async def env_response(self, messages: Any, state: Any, **others: Any) -> Any:
            if "crash" in messages[-1]["content"]:
                raise vf.InfraError("no disk")
            if "break" in messages[-1]["content"]:
                raise KeyError("a bug")
            if "stop" in messages[-1]["content"]:
                state["final_env_response"] = [{"role": "user", "content": "bye"}]
                return []
            return [{"role": "user", "content": "on"}]

        @vf.cleanup  # type: ignore[untyped-decorator]
        async def clean(self, state: Any) -> None:
            self.cleaned.append(state)

        @vf.teardown  # type: ignore[untyped-decorator]
        async def tear(self) -> None:
            self.torn.append("torn")

    settings = {"rubric": vf.Rubric(funcs=[counted]), "dataset": rows("2+2"), "eval_dataset": rows("1+1"), **settings}
    return Chat(**settings)


def counted(state: Any) -> float:
    return float(len(state["trajectory"]))


@needs_verifiers
async def test_each_turn_of_a_chat_is_trained_with_the_sampled_ids() -> None:
    engine = Drawing(calls=False)
    rollout = await ag.rollout(made(load=lambda: chatting(max_turns=5)), task(), engine)
    assert (rollout.failure, rollout.reward, rollout.stop_reason) == (None, 5.0, "max_turns_reached")
    assert [(segment.kind, len(segment.turns)) for segment in rollout.segments] == [("root", 5)]
    check_exact(engine, [rollout])


@needs_verifiers
@pytest.mark.parametrize(
    ("declared", "engine", "reason", "turns"),
    [
        ({"limits": ag.Limits(turns=2)}, Scripted(lambda _: say("yes")), "turns", 2.0),
        ({"limits": ag.Limits(tokens=30)}, Scripted(lambda _: say("yes " * 3)), "tokens", None),
        ({}, Scripted(lambda _: say("yes " * 20), context_tokens=400), "context", None),
        ({}, Scripted([say("yes"), raw(""), say("stop")]), "has_final_env_response", 3.0),
    ],
)
async def test_a_chat_that_ends_is_scored(declared: Any, engine: Any, reason: str, turns: float | None) -> None:
    rollout = await ag.rollout(made(load=chatting, **declared), task(), engine)
    assert (rollout.failure, rollout.stop_reason) == (None, reason)
    assert rollout.reward == (len([turn for one in rollout.segments for turn in one.turns]) if turns is None else turns)


@needs_verifiers
@pytest.mark.parametrize(
    ("script", "kind", "why"),
    [
        ([say("crash")], "EnvError", "Played: InfraError: no disk"),
        ([say("break")], "EnvError", "KeyError: 'a bug'"),
        ([say("yes")], "EngineError", "the script has 1 replies"),
    ],
)
async def test_each_kind_of_failure_is_named(script: Any, kind: str, why: str) -> None:
    rollout = await ag.rollout(made(load=chatting), task(), Scripted(script))
    assert rollout.failure is not None
    assert (rollout.reward, rollout.failure.type) == (None, kind)
    assert why in rollout.failure.message


@needs_verifiers
async def test_a_reward_that_raises_fails_the_rollout_or_is_zero_if_configured() -> None:
    def broken(completion: Any) -> float:
        raise LookupError("no key")

    def load() -> Any:
        return vf.SingleTurnEnv(dataset=rows("2+2"), rubric=vf.Rubric(funcs=[right, broken]))

    rollout = await ag.rollout(made(load=load), task(), Scripted([say("4")]))
    assert rollout.failure is not None
    assert "reward 'broken': LookupError: no key" in rollout.failure.message
    kept = await ag.rollout(made(load=load, raised_rewards_are_zero=True), task(), Scripted([say("4")]))
    assert (kept.failure, kept.reward) == (None, 1.0)


@needs_verifiers
async def test_rubrics_that_compare_rollouts_are_refused() -> None:
    def compared(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    load = lambda: vf.SingleTurnEnv(dataset=rows("2+2"), rubric=vf.Rubric(funcs=[compared]))  # noqa: E731
    with pytest.raises(EnvError, match="its rubric compares the rollouts of a task"):
        made(load=load).tasks("train")


@needs_verifiers
async def test_an_environment_is_shared_and_torn_down_once_without_touching_signals() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    environments: list[Any] = []

    def load() -> Any:
        environments.append(chatting(max_turns=2))
        return environments[-1]

    env = made(load=load)
    groups = await run_groups(env, env.tasks("train"), Drawing(calls=False), n=3)
    assert [one.reward for group in groups for one in group.rollouts] == [2.0] * 3
    [environment] = environments
    assert (len(environment.cleaned), environment.torn) == (3, ["torn"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    await environment._teardown()
    assert environment.torn == ["torn"], "torn down again when the process ended"


@needs_verifiers
async def test_a_cancelled_rollout_is_cleaned_up_and_leaves_no_task() -> None:
    environments: list[Any] = []
    released: list[Any] = []

    def load() -> Any:
        environments.append(chatting())
        environments[-1].rubric.add_cleanup_handler(lambda state: released.append(state))
        return environments[-1]

    engine = Drawing(calls=False)
    engine.gate.clear()
    before = asyncio.all_tasks()
    playing = asyncio.create_task(ag.rollout(made(load=load), task(), engine))
    await engine.asked.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    [environment] = environments
    assert (environment.cleaned, environment.torn) == (released, ["torn"])
    assert len(released) == 1
    assert asyncio.all_tasks() == before
