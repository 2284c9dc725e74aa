"""The Gymnasium bridge in both directions, with FakeSandboxPool and Gymnasium's own checker."""

import asyncio
import importlib.util
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any, ClassVar

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium_env

import agentgym as ag
from agentgym.bridges import gymnasium as bridge
from agentgym.bridges.gymnasium import CHARSET, ExportedEnv, GymnasiumTask, GymnasiumToolEnv, register_gymnasium
from agentgym.chat.formats import HERMES
from agentgym.engines.scripted import Reply, Scripted, call, say
from agentgym.errors import EnvError
from agentgym.errors.extras import install_line
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.scheduling import run_groups
from agentgym.testing import check_env
from agentgym.tools import tool_threads as threads
from envs.chase.env import Chase, ChaseTask

TASK = ChaseTask(
    id="t",
    prompt=(ag.Message(role="user", content="Start at key 31. What is the value?"),),
    store={"31": "see 52", "52": "value 17"},
    value=17,
)
MALFORMED = "<tool_call>\nget(31)\n</tool_call>"


def calling(code: str) -> str:
    """Return an assistant turn that runs `code`, in the Hermes format."""
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


class Sandboxed:
    """A sandbox over FakeSandboxPool that counts its open pools.

    It isn't an async generator, because asyncio would close one that is still open when its loop ends.
    """

    def __init__(self) -> None:
        self.open_pools = 0
        self.sandboxes = FakeSandboxPool()

    def open(self, size: int) -> "Sandboxed":
        assert size == 1
        return self

    async def __aenter__(self) -> SandboxPool:
        self.open_pools += 1
        return self.sandboxes

    async def __aexit__(self, *failure: object) -> None:
        self.open_pools -= 1


@pytest.fixture
def unregistered() -> Iterator[None]:
    """Unregister the envs that a test registers with Gymnasium."""
    known = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(known)


# ------------------------------------------------------------------- export


@pytest.mark.usefixtures("no_leaks", "unregistered")
def test_gymnasiums_own_checker_passes(sandboxes: FakeSandboxPool) -> None:
    env = gymnasium.make(register_gymnasium(Chase), sandboxes=sandboxes).unwrapped
    with closing(env):
        check_gymnasium_env(env)


@pytest.mark.usefixtures("no_leaks")
def test_an_oracle_solves_chase_through_the_exported_env(sandboxes: FakeSandboxPool) -> None:
    with closing(ExportedEnv(Chase, tasks=[TASK], sandboxes=sandboxes)) as env:
        observation, info = env.reset(seed=0)
        assert observation == "user: Start at key 31. What is the value?"
        assert info["task"] == "t"
        assert [tool["function"]["name"] for tool in info["tools"]] == ["python"]
        assert env.step(calling("get(31)")) == ("tool: 'see 52'", 0.0, False, False, {})
        assert env.step(calling("get(52)"))[0] == "tool: 'value 17'"
        observation, earned, terminated, truncated, info = env.step("Answer: 17")
    assert (observation, earned, terminated, truncated) == ("", 1.0, True, False)
    assert info["stop_reason"] == "answer"
    assert info["rewards"] == {"solved": 1.0, "malformed": 0.0}
    assert info["metrics"]["tool_calls"] == 2


@pytest.mark.usefixtures("no_leaks")
def test_each_episode_of_a_mixture_uses_the_env_of_its_task(sandboxes: FakeSandboxPool) -> None:
    mixed = ag.mix({"chase": ag.Member(Chase, 1), "plain": ag.Member(Plain, 1)})
    tasks = [TASK.model_copy(update={"id": "chase/t"}), ag.Task(id="plain/p", prompt="Go.")]
    with closing(ExportedEnv(mixed, tasks=tasks, sandboxes=sandboxes)) as env:
        _, info = env.reset(options={"task": 0})
        assert (info["task"], [tool["function"]["name"] for tool in info["tools"]]) == ("chase/t", ["python"])
        assert env.step("Answer: 17")[1:4] == (1.0, True, False)
        observation, info = env.reset(options={"task": 1})
        assert (observation, info["task"]) == ("user: Go.", "plain/p")
        steps = [env.step("on") for _ in range(3)]
    assert [(earned, truncated) for _, earned, _, truncated, _ in steps] == [(1.0, False), (1.0, False), (11.0, True)]


def test_a_mixtures_own_tasks_run_through_gymnasium() -> None:
    mixed = ag.mix({"lake": ag.Member(Still, 2), "sea": ag.Member(Still, 1)})
    with closing(ExportedEnv(mixed)) as env:
        seen = {env.reset(seed=seed)[1]["task"] for seed in range(12)}
        assert env.step("stay")[1] == 0.5
    assert seen == {"lake/0", "lake/1", "sea/0", "sea/1"}


def test_the_turn_limit_truncates_and_the_score_is_in_the_last_reward(sandboxes: FakeSandboxPool) -> None:
    with closing(ExportedEnv(Chase, tasks=[TASK], sandboxes=sandboxes)) as env:
        env.reset()
        steps = [env.step(action) for action in [MALFORMED, *[calling("1")] * 5]]
    assert [(earned, terminated, truncated) for _, earned, terminated, truncated, _ in steps[:-1]] == [(0, 0, 0)] * 5
    assert steps[-1][:4] == ("tool: 1", -0.1, False, True)
    assert steps[-1][4]["rewards"]["malformed"] == 1.0  # the method's return value; the reward has its weight
    assert steps[-1][4]["stop_reason"] == "turns"


def test_ending_on_the_last_turn_is_not_truncation(sandboxes: FakeSandboxPool) -> None:
    with closing(ExportedEnv(Chase, tasks=[TASK], sandboxes=sandboxes)) as env:
        env.reset()
        steps = [env.step(action) for action in [*[calling("1")] * 5, "Answer: 17"]]
    assert steps[-1][1:4] == (1.0, True, False)


class Still(ag.ToolEnv[ag.Task]):
    """Two tasks, each worth 0.5 whatever the model says."""

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=str(number), prompt="Stay.") for number in range(2)]

    @ag.reward
    def half(self) -> float:
        return 0.5


class Plain(ag.Env[ag.Task]):
    """Earns 1 per step and records the asyncio task of each call."""

    limits = ag.Limits(turns=3)
    used: ClassVar[list[object]] = []

    async def reset(self, **options: Any) -> tuple[list[ag.Message], dict[str, Any]]:
        self.used.append(asyncio.current_task())
        return await super().reset(**options)

    async def step(self, action: ag.Message) -> ag.StepResult:
        self.used.append(asyncio.current_task())
        return ag.StepResult([ag.Message(role="user", content=action["content"])], 1.0, False, False, {})

    async def score(self) -> dict[str, float]:
        return {"end": 10.0}

    async def close(self) -> None:
        self.used.append(asyncio.current_task())


PLAIN = ag.Task(id="p", prompt=(ag.Message(role="user", content="Go on."),))


@pytest.mark.usefixtures("no_leaks")
def test_step_rewards_and_the_score_add_up_as_in_a_rollout() -> None:
    with closing(ExportedEnv(Plain, tasks=[PLAIN])) as env:
        env.reset()
        earned = [env.step("on")[1] for _ in range(3)]
    played = asyncio.run(ag.rollout(Plain, PLAIN, Scripted([say("on")] * 3)))
    assert earned == [1.0, 1.0, 11.0]
    assert played.reward == sum(earned)


def test_all_calls_of_an_env_are_in_one_asyncio_task() -> None:
    Plain.used.clear()
    with closing(ExportedEnv(Plain, tasks=[PLAIN])) as env:
        env.reset()
        env.step("on")
        env.reset()
    assert len(Plain.used) == 5
    assert len(set(Plain.used)) == 1


class Stuck(Plain):
    limits = ag.Limits(turns=3, seconds=0.05)

    async def step(self, action: ag.Message) -> ag.StepResult:
        await asyncio.Event().wait()
        raise AssertionError


def test_the_time_limit_truncates_a_step_that_never_ends() -> None:
    with closing(ExportedEnv(Stuck, tasks=[PLAIN])) as env:
        env.reset()
        observation, earned, terminated, truncated, info = env.step("on")
    assert (observation, earned, terminated, truncated) == ("", 10.0, False, True)
    assert info["stop_reason"] == "seconds"


class Interrupted(Plain):
    """Raises SIGINT in its own step, as Ctrl-C does, and waits."""

    async def step(self, action: ag.Message) -> ag.StepResult:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.used.append(task.cancelling())


@pytest.mark.usefixtures("no_leaks")
def test_an_interrupt_cancels_the_step_and_the_env_still_closes() -> None:
    Plain.used.clear()
    env = ExportedEnv(Interrupted, tasks=[PLAIN])
    env.reset()
    with pytest.raises(KeyboardInterrupt):
        env.step("on")
    env.close()
    assert Plain.used[1:] == [0], "expected one close, in a task without a pending cancellation"


class Broken(Plain):
    async def step(self, action: ag.Message) -> ag.StepResult:
        raise KeyError("lost")


@pytest.mark.usefixtures("no_leaks")
def test_an_error_of_the_env_reaches_the_caller() -> None:
    with closing(ExportedEnv(Broken, tasks=[PLAIN])) as env:
        env.reset()
        with pytest.raises(KeyError, match="lost"):
            env.step("on")


@pytest.mark.usefixtures("no_leaks")
def test_each_episode_has_a_new_sandbox_and_close_returns_all_of_them() -> None:
    spec = Sandboxed()
    env = ExportedEnv(Chase, tasks=[TASK], spec=spec)
    assert spec.open_pools == 0
    env.reset()
    env.step(calling("x = 1"))
    env.reset()
    assert env.step(calling("x"))[0].endswith("NameError: name 'x' is not defined")
    assert (spec.open_pools, len(spec.sandboxes.leased), len(spec.sandboxes.made)) == (1, 1, 2)
    env.step("I give up")
    assert (spec.open_pools, len(spec.sandboxes.leased)) == (1, 0)
    env.reset()
    env.close()
    env.close()
    assert (spec.open_pools, len(spec.sandboxes.leased)) == (0, 0)


class NoStart(Chase):
    async def setup(self) -> None:
        raise OSError("no disk")


@pytest.mark.usefixtures("no_leaks")
def test_a_failed_reset_returns_its_sandbox(sandboxes: FakeSandboxPool) -> None:
    with closing(ExportedEnv(NoStart, tasks=[TASK], sandboxes=sandboxes)) as env:
        with pytest.raises(EnvError, match=r"setup: OSError: .*no disk"):
            env.reset()
        assert (len(sandboxes.made), len(sandboxes.leased)) == (1, 0)


def test_a_step_outside_an_episode_is_refused(sandboxes: FakeSandboxPool) -> None:
    with closing(ExportedEnv(Chase, tasks=[TASK], sandboxes=sandboxes)) as env:
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step("before the first reset")
        env.reset()
        env.step("Answer: 17")
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step("after the end")


def test_the_seed_selects_the_task_and_options_can_name_it(sandboxes: FakeSandboxPool) -> None:
    with closing(ExportedEnv(Chase, sandboxes=sandboxes)) as env:
        seeded = [env.reset(seed=seed)[1]["task"] for seed in (1, 2, 1)]
        assert seeded[0] == seeded[2] != seeded[1]
        assert env.reset(options={"task": 7})[1]["task"] == Chase.tasks("train")[7].id
    with closing(ExportedEnv(Chase, split="test", sandboxes=sandboxes)) as env:
        assert env.reset(options={"task": 7})[1]["task"] == Chase.tasks("test")[7].id


def test_changes_of_the_info_dict_do_not_reach_the_env(sandboxes: FakeSandboxPool) -> None:
    with closing(ExportedEnv(Chase, tasks=[TASK], sandboxes=sandboxes)) as env:
        first = env.reset()[1]
        first["tools"][0]["function"]["name"] = "mine"
        assert env.reset()[1]["tools"][0]["function"]["name"] == "python"


@pytest.mark.usefixtures("no_leaks")
def test_nothing_starts_before_the_first_reset() -> None:
    env = ExportedEnv(Chase)
    assert env.observation_space.contains("")


def test_an_empty_list_of_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="tasks: pass at least one"):
        ExportedEnv(Chase, tasks=[])


def test_an_observation_stays_in_its_space() -> None:
    with closing(ExportedEnv(Plain, tasks=[PLAIN], max_length=60)) as env:
        env.reset()
        strange = env.step("tab\t é ł Ω 東 \x1b \0")[0]
        long = env.step("x" * 100 + "end")[0]
        assert strange == "user: tab\t é ł ? ? ? ?"
        assert len(long) == 60
        assert long.endswith("end")
        assert all(text in env.observation_space for text in (strange, long, CHARSET[:60]))


def test_several_calls_including_a_malformed_one_are_answered_in_one_turn(sandboxes: FakeSandboxPool) -> None:
    with closing(ExportedEnv(Chase, tasks=[TASK], sandboxes=sandboxes)) as env:
        env.reset()
        observation = env.step(f"Let me see. {calling('get(31)')}\n{MALFORMED}\n{calling('get(52)')}")[0]
    first, second, *written, last = observation.split("\n")
    assert (first, last) == ("tool: 'see 52'", "tool: 'value 17'")
    assert second.startswith("tool: error: the tool call cannot be read")
    assert "\n".join(written) == HERMES.example


@pytest.mark.usefixtures("no_leaks", "unregistered")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_make_vec_steps_two_envs_at_once(mode: str) -> None:
    id = register_gymnasium("chase", sandboxes=FakeSandboxPool(), tasks=[TASK])
    options = {"shared_memory": False} if mode == "async" else {}
    with closing(gymnasium.make_vec(id, num_envs=2, vectorization_mode=mode, vector_kwargs=options)) as vector:
        observations, _ = vector.reset(seed=0)
        assert observations == ("user: Start at key 31. What is the value?",) * 2
        observations, earned, terminated, _, _ = vector.step((calling("get(31)"), "Answer: 17"))
        assert observations == ("tool: 'see 52'", "")
        assert (earned.tolist(), terminated.tolist()) == ([0.0, 1.0], [False, True])
        observations, *_ = vector.step((calling("get(52)"), "the next episode begins"))
        assert observations == ("tool: 'value 17'", "user: Start at key 31. What is the value?")


@pytest.mark.usefixtures("unregistered")
def test_an_id_cannot_be_registered_for_two_envs() -> None:
    assert register_gymnasium(Chase) == register_gymnasium(Chase) == "agentgym/Chase-v0"
    assert register_gymnasium(Chase, "agentgym/Small-v1", max_length=100) == "agentgym/Small-v1"
    with pytest.raises(ValueError, match="already registered"):
        register_gymnasium(Plain, "agentgym/Chase-v0")


def test_without_gymnasium_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    spec = importlib.util.spec_from_file_location("without_gymnasium", str(bridge.__file__))
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=re.escape(install_line("gymnasium"))):
        spec.loader.exec_module(ModuleType("without_gymnasium"))


# ------------------------------------------------------------------- import


class FrozenLake(GymnasiumToolEnv):
    action_names = ("left", "down", "right", "up")


def lake(**kwargs: Any) -> GymnasiumTask:
    return GymnasiumTask(
        id="lake",
        prompt=(ag.Message(role="user", content="Walk from S to G; H is a hole."),),
        env_id="FrozenLake-v1",
        kwargs={"map_name": "4x4", "is_slippery": False, **kwargs},
    )


PATH: list[Reply] = [call("act", action=name) for name in ("down", "down", "right", "down", "right", "right")]


def read(played: ag.Rollout) -> str:
    """Return the whole rollout as text."""
    return Scripted([]).tokenizer.decode(played.segments[-1].token_ids.tolist())


async def test_frozen_lake_keeps_the_contract_of_an_env(no_leaks: None) -> None:
    await check_env(FrozenLake, lake(), oracle=PATH)


async def test_a_scripted_walk_solves_frozen_lake(no_leaks: None) -> None:
    played = await ag.rollout(FrozenLake, lake(), Scripted(PATH))
    assert (played.reward, played.stop_reason, played.error) == (1.0, "done", None)
    assert played.rewards == {"gym_return": 1.0}


async def test_the_first_prompt_has_the_choices_and_the_first_observation() -> None:
    played = await ag.rollout(FrozenLake, lake(), Scripted([say("no")]))
    assert "G; H is a hole.\n\nActions: left, down, right, up\n\n\n[S]FFF\nFHFH\nFFFH\nHFFG" in read(played)


async def test_an_action_moves_the_player() -> None:
    played = await ag.rollout(FrozenLake, lake(), Scripted([PATH[0], say("no")]))
    assert "<|im_start|>tool\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n<|im_end|>" in read(played)
    assert "\x1b" not in read(played)


async def test_actions_can_be_given_as_numbers() -> None:
    numbers: list[Reply] = [call("act", action=action) for action in (1, "1", 2, 1, 2, "2")]
    assert (await ag.rollout(FrozenLake, lake(), Scripted(numbers))).reward == 1.0
    assert (await ag.rollout(GymnasiumToolEnv, lake(), Scripted(numbers))).reward == 1.0


async def test_an_unknown_action_gets_a_message_and_takes_no_step() -> None:
    wrong: list[Reply] = [call("act", action=action) for action in ("fly", 4, -1)]
    played = await ag.rollout(FrozenLake, lake(), Scripted([*wrong, *PATH]))
    assert "error: no action 'fly'; the actions are: left, down, right, up" in read(played)
    assert (played.reward, played.metrics["tool_errors"]) == (1.0, 3)


async def test_a_hole_ends_the_episode_without_a_reward() -> None:
    played = await ag.rollout(FrozenLake, lake(), Scripted([PATH[0], call("act", action="right")]))
    assert (played.reward, played.stop_reason) == (0.0, "done")


async def test_gymnasiums_own_limit_ends_the_episode_as_truncated() -> None:
    played = await ag.rollout(FrozenLake, lake(max_episode_steps=2), Scripted(PATH))
    assert (played.reward, played.stop_reason, played.metrics["turns"]) == (0.0, "truncated", 2)


class Counting(gymnasium.Env[int, int]):  # type: ignore[misc]
    """Counts up from a seeded start; action 5 pays 0.5, and action 6 pays 1 and ends the episode."""

    observation_space = gymnasium.spaces.Discrete(1000)
    action_space = gymnasium.spaces.Discrete(2, start=5)
    closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = int(self.np_random.integers(900))
        return self.count, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.count, 0.5 if action == 5 else 1.0, action == 6, False, {}

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def counting(unregistered: None) -> GymnasiumTask:
    gymnasium.register("test/Counting-v0", entry_point=Counting)
    return GymnasiumTask(id="c", prompt=PLAIN.prompt, env_id="test/Counting-v0", seed=3)


class Told(GymnasiumToolEnv):
    action_names = ("more", "stop")

    def describe(self, observation: Any) -> str:
        return f"The count is {observation}."


async def test_rewards_are_summed_and_observations_are_described(counting: GymnasiumTask) -> None:
    script = [call("act", action="more"), call("act", action=5), call("act", action="stop")]
    played = await ag.rollout(Told, counting, Scripted(script))
    assert played.reward == 2.0
    start = int(gymnasium.make("test/Counting-v0").reset(seed=3)[0])
    assert f"Actions: more, stop\n\nThe count is {start}." in read(played)
    assert f"The count is {start + 2}." in read(played)


async def test_without_a_seed_attempts_start_differently_and_group_members_start_alike(
    counting: GymnasiumTask,
) -> None:
    task, engine = counting.model_copy(update={"seed": None}), Scripted([say("no")])
    apart = await ag.evaluate(GymnasiumToolEnv, engine, tasks=[task], k=12)
    together = await run_groups(GymnasiumToolEnv, [task], engine, n=12)
    starts, shared = ({read(rollout) for rollout in played.rollouts} for played in (apart, together))
    assert len(starts) > 1
    assert len(shared) == 1


async def test_without_rendering_the_observation_is_printed(counting: GymnasiumTask) -> None:
    start = int(gymnasium.make("test/Counting-v0").reset(seed=3)[0])
    played = await ag.rollout(GymnasiumToolEnv, counting, Scripted([say("no")]))
    assert f"Actions: 5, 6\n\n{start}<|im_end|>" in read(played)
    assert played.reward == 0.0


async def test_the_gymnasium_env_is_closed(counting: GymnasiumTask, no_leaks: None) -> None:
    before = Counting.closed
    await ag.rollout(Told, counting, Scripted([say("no")]))
    assert Counting.closed == before + 1


async def test_the_wrong_number_of_names_is_an_error() -> None:
    class Two(GymnasiumToolEnv):
        action_names = ("left", "right")

    played = await ag.rollout(Two, lake(), Scripted(PATH))
    assert played.error is not None
    assert "action_names: got 2 names for the 4 actions of FrozenLake-v1" in played.error


async def test_actions_that_are_not_discrete_are_an_error() -> None:
    task = GymnasiumTask(id="p", prompt=PLAIN.prompt, env_id="Pendulum-v1")
    played = await ag.rollout(GymnasiumToolEnv, task, Scripted([]))
    assert played.error is not None
    assert "Pendulum-v1: expected a Discrete action space" in played.error


def test_an_exported_env_is_closed_after_its_tools_thread_has_ended() -> None:
    diary, begun, free = list[str](), threading.Event(), threading.Event()

    class Slow(ag.ToolEnv[ag.Task]):
        @ag.tool(timeout_s=0.01)
        def work(self) -> None:
            """Work past the time limit."""
            try:
                begun.set()
                free.wait()
            except threads.Interrupted:  # The interrupt came before the C call started.
                free.wait()
            finally:
                diary.append("work ended")

        @ag.reward
        def done(self) -> float:
            return 1.0

        async def close(self) -> None:
            diary.append("closed")

    exported = ExportedEnv(Slow, tasks=[ag.Task.model_validate({"id": "t", "prompt": "Go."})])
    exported.reset(seed=0)
    while not begun.is_set():  # A call does nothing if its thread had not started by its time limit.
        text, *_ = exported.step('<tool_call>\n{"name": "work", "arguments": {}}\n</tool_call>')
        assert "timed out" in text
    threading.Timer(0.1, free.set).start()
    exported.close()
    assert diary == ["work ended", "closed"]
