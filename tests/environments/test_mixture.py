"""Several envs as one: the order of their tasks, the class that runs each, and each env's metrics."""

import asyncio
import json
import math
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given, settings, strategies as st
from pydantic import Field

import agentgym as ag
from agentgym.cli.output import RefusedWords
from agentgym.cli.recipe import settings as read_settings
from agentgym.engines.scripted import Scripted, call, say
from agentgym.environments.mixture import Member, Mixture, mix
from agentgym.run.tasks.envs import env_metrics, open_envs
from agentgym.sandboxes.choose import AnySandbox
from agentgym.scheduling import batches
from agentgym.scheduling.task_sampler import Sharding, TaskSampler
from agentgym.testing import check_env
from envs.chase.env import Chase
from tests.run.test_resume import SETTINGS


@ag.register("ones")
class Ones(ag.ToolEnv[ag.Task]):
    """Nine tasks, three of them held out; the reward is a parameter."""

    worth = ag.Parameter(1.0, Annotated[float, Field(ge=0)])

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[ag.Task]:
        return ag.Procedural(lambda i: ag.Task(id=i, prompt="one?"), range(6) if split == "train" else range(6, 9))

    @ag.reward
    def worth_it(self) -> float:
        return self.worth


@ag.register("rows")
class Rows(ag.ToolEnv[ag.Task]):
    """Two rows of a data set."""

    @classmethod
    def tasks(cls, split: ag.Split) -> Any:
        return [{"id": i, "prompt": "row?"} for i in range(2)]

    @ag.reward
    def zero(self) -> float:
        return 0.0


class Asking(ag.ToolEnv[ag.Task]):
    """The right answer is the word that its tool returns."""

    limits = ag.Limits(turns=2)

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=split, prompt="Ask.")]

    @ag.tool
    async def ask(self) -> str:
        """Say the word."""
        return "word"

    @ag.reward
    def said(self) -> float:
        return float(self.answer == "word")


class Forgetful(Asking):
    """Never rewards an answer."""

    @ag.reward
    def said(self) -> float:
        return 0.0


ASKED = mix({"asking": Member(Asking, 1), "forgetful": Member(Forgetful, 1)})


def mixed(ones: float = 3, rows: float = 1) -> type[Mixture]:
    return mix({"rows": Member(Rows, rows), "ones": Member(Ones, ones)})


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_each_members_share_of_turns_is_always_exact_to_within_one(weights: list[float]) -> None:
    env = mix({f"m{i}": Member(Ones, weight) for i, weight in enumerate(weights)})
    had = Counter[str]()
    for turn, name in enumerate(islice(env.turns(), 200), start=1):
        had[name] += 1
        assert all(abs(had[f"m{i}"] - w / sum(weights) * turn) < 1 + 1e-9 for i, w in enumerate(weights))


def test_held_out_tasks_alternate_by_weight_until_the_longest_member_ends() -> None:
    ids = [task.id for task in mixed().tasks("test")]
    assert sorted(ids) == ["ones/6", "ones/7", "ones/8", "rows/0", "rows/1"]
    assert Counter(name.partition("/")[0] for name in ids[:4]) == {"ones": 3, "rows": 1}
    assert [task.id for task in mixed().tasks("test")[1:3]] == ids[1:3]


async def test_each_task_runs_in_its_own_env_and_is_counted_for_it() -> None:
    evaluation = await ag.evaluate(mixed(), Scripted([say("1")]), n=5)
    assert {name: rewards[0] for name, rewards in evaluation.rewards.items()} == {
        "ones/6": 1.0,
        "ones/7": 1.0,
        "ones/8": 1.0,
        "rows/0": 0.0,
        "rows/1": 0.0,
    }
    assert env_metrics(mixed(), evaluation.groups, "eval/") == {
        "eval/env/ones/groups": 3.0,
        "eval/env/ones/rollouts": 3.0,
        "eval/env/ones/failed": 0.0,
        "eval/env/ones/reward": 1.0,
        "eval/env/ones/reward/worth_it": 1.0,
        "eval/env/rows/groups": 2.0,
        "eval/env/rows/rollouts": 2.0,
        "eval/env/rows/failed": 0.0,
        "eval/env/rows/reward": 0.0,
        "eval/env/rows/reward/zero": 0.0,
    }
    assert env_metrics(Ones, evaluation.groups) == {}


async def test_a_task_that_belongs_to_no_member_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^task: 'chase/1' belongs to no member of the mixture; .* one of ones, rows"):
        await ag.rollout(mixed(), ag.Task(id="chase/1", prompt="?"), Scripted([say("1")]))


def test_no_task_repeats_in_a_batch_and_each_member_cycles_separately() -> None:
    found = list(batches(mixed(), 4, 40, seed=1))
    ids = [[task.id for task in batch] for batch in found]
    assert all(len(set(batch)) == 4 for batch in ids)
    assert Counter(name for batch in ids for name in batch) == {f"ones/{i}": 20 for i in range(6)} | {
        f"rows/{i}": 20 for i in range(2)
    }
    assert ids == [[task.id for task in batch] for batch in batches(mixed(), 4, 40, seed=1)]
    assert ids != [[task.id for task in batch] for batch in batches(mixed(), 4, 40, seed=2)]


def test_a_batch_that_needs_more_tasks_than_a_member_has_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"^prompts_per_step: a batch needs 3 tasks, but rows has only 2 training tasks"
    ):
        list(batches(mixed(1, 1), 6, 1, seed=1))


def test_a_resumed_sampler_of_several_envs_continues_with_the_same_tasks() -> None:
    def sampler() -> TaskSampler[Any]:
        return TaskSampler.for_training(mixed(), Sharding(prompts=4), seed=3)

    def draw(one: TaskSampler[Any], count: int) -> list[str]:
        drawn = [sampled for sampled in (one.next() for _ in range(count)) if sampled]
        for sampled in drawn:
            one.played(sampled.number)
        return [sampled.task.id for sampled in drawn]

    order = draw(sampler(), 30)
    first, second = sampler(), sampler()
    draw(first, 9)
    second.load_state_dict([json.loads(json.dumps(first.state_dict()))])
    assert draw(second, 21) == order[9:]


def test_each_member_has_its_own_arguments_and_the_requested_sandbox() -> None:
    env = open_envs({"ones": 2, "chase": 1}, {"ones.worth": 3.0}, "unsafe")
    assert issubclass(env, Mixture)
    ones, chase = env.members["ones"].env, env.members["chase"].env
    assert issubclass(ones, Ones)
    assert issubclass(chase, Chase)
    assert (ones.worth, ones.sandbox_spec, Ones.worth) == (3.0, None, 1.0)
    task = env.tasks_of("chase", "test")[0]
    assert env.sandbox_for(task) == chase.sandbox_spec == AnySandbox(kind="unsafe")
    assert env.sandbox_for(env.tasks_of("ones", "test")[0]) is None


@pytest.mark.parametrize(
    ("envs", "arguments", "said"),
    [
        (
            {"ones": 1, "rows": 1},
            {"worth": 2},
            r"^env_args\.worth: put the member's name in front, as in ones\.worth",
        ),
        ({"ones": 1, "rows": 1}, {"ones.wort": 2}, r"^env_args\.ones\.wort: Ones has no such .*'worth'"),
        ({"ones": 1, "my.envs:ones": 1}, {}, r"^env: two of ones, my\.envs:ones are named ones"),
    ],
)
def test_arguments_and_names_that_match_no_member_are_refused(envs: Any, arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_envs(envs, arguments, "auto")


@pytest.mark.parametrize("envs", [{}, {"ones": 0}, {"ones": -1.0}, {"": 1.0}, 3])
def test_invalid_weights_are_refused_by_field(envs: Any) -> None:
    with pytest.raises(ValueError, match=r"^env: "):
        replace(SETTINGS, env=envs)


async def test_a_member_of_a_mixture_keeps_the_contract_of_an_env(no_leaks: None) -> None:
    await check_env(ASKED, ASKED.tasks("test")[0], oracle=[call("ask"), say("word")])


async def test_a_check_of_a_mixture_names_the_member_that_breaks_its_contract() -> None:
    task = next(task for task in ASKED.tasks("test") if task.id.startswith("forgetful/"))
    with pytest.raises(AssertionError, match=r"Forgetful[\s\S]*oracle: reward 0\.0 < 1\.0") as said:
        await check_env(ASKED, task, oracle=[call("ask"), say("word")])
    assert "cancel:" not in str(said.value)


BOTH = ag.RunConfig(recipe="both", env={"ones": 2.0, "rows": 1.0}, model="tiny")


def test_the_command_line_sets_weights_and_parameters_of_single_members() -> None:
    run = read_settings(BOTH, ["--env.ones.worth", "3"])
    assert (run.env, run.env_args) == ({"ones": 2.0, "rows": 1.0}, {"ones.worth": 3.0})
    assert read_settings(BOTH, ["--env.rows", "5"]).env == {"ones": 2.0, "rows": 5.0}


def test_a_member_with_too_few_tasks_is_refused_before_the_run_starts(tmp_path: Path) -> None:
    run = replace(SETTINGS, env={"terse": 1, "rows": 1}, prompts_per_step=6, output_dir=tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"^prompts_per_step: Rows\.tasks\('train'\) has 2 tasks, but at least 3 are needed"
    ):
        asyncio.run(ag.train_policy(run))
    with pytest.raises(
        ValueError, match=r"^prompts_per_step: Rows\.tasks\('train'\) has 2 tasks, but at least 3 .* max_staleness"
    ):
        asyncio.run(ag.train_policy(replace(run, prompts_per_step=3, max_staleness=1)))
    assert not (tmp_path / "run").exists()


def test_a_run_on_several_envs_has_metrics_of_each_and_resumes_with_the_same_ones(tmp_path: Path) -> None:
    run = replace(
        SETTINGS,
        env={"terse": 1, "ones": 1},
        prompts_per_step=2,
        max_steps=2,
        eval_tasks=2,
        output_dir=tmp_path,
        env_args={"ones.worth": 2},
    )
    summary = asyncio.run(ag.train_policy(run))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert [(line["env/ones/groups"], line["env/ones/reward"], line["env/terse/groups"]) for line in steps] == [
        (1.0, 2.0, 1.0)
    ] * 2
    assert next(line for line in lines if "eval/reward" in line)["eval/env/ones/reward"] == 2.0
    assert summary["optimizer_steps"] > 0
    with pytest.raises(ValueError, match=r"env: the run has .*\"ones\": 1"):
        asyncio.run(ag.train_policy(replace(run, env={"terse": 1, "ones": 2}, output_dir=None, resume=tmp_path)))
    asyncio.run(ag.train_policy(replace(run, max_steps=3, output_dir=None, resume=tmp_path)))


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, "1", True])
def test_a_member_that_would_never_run_is_refused(weight: Any) -> None:
    with pytest.raises(ValueError, match=r"^weight: must be "):
        Member(Ones, weight)


BY_MODULE = ag.RunConfig(env={"tests.environments.test_mixture:Ones": 3.0, "envs.chase.env:Chase": 1.0}, model="tiny")
"""A mixture of two envs named by their modules."""


def test_a_weight_is_set_by_the_members_name_like_its_parameters() -> None:
    for flags in (["--env.Chase", "2"], ["--env.Chase=2"], ["--env.envs.chase.env:Chase", "2"]):
        run = read_settings(BY_MODULE, [*flags, "--env.Ones.worth", "4"])
        assert run.env == {"tests.environments.test_mixture:Ones": 3.0, "envs.chase.env:Chase": 2.0}
        assert run.env_args == {"Ones.worth": 4.0}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--env.Chas", "2"], r"--env\.Chas: it isn't a MEMBER\.PARAMETER or a member; did you mean 'Chase'\?"),
        (["--env.worth", "2"], r"--env\.worth: put the member's name in front, as in Ones\.worth"),
        (["--env.Chase", "0"], r"--env: 'envs\.chase\.env:Chase' must be above 0, got 0"),
    ],
)
def test_an_invalid_mixture_flag_is_refused_with_the_correct_form(flags: list[str], said: str) -> None:
    with pytest.raises(RefusedWords, match=said):
        read_settings(BY_MODULE, flags)


def test_help_says_how_to_set_a_weight(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read_settings(BY_MODULE, ["--help"])
    assert "--env.MEMBER 2 sets one weight" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_weights_may_be_fractions_and_the_order_of_members_repeats() -> None:
    env = mix({"a": Member(Ones, 0.7), "b": Member(Ones, 0.3)})
    turns = list(islice(env.turns(), 30))
    assert turns[:10] == turns[10:20] == turns[20:]
    assert Counter(turns) == {"a": 21, "b": 9}
    assert env.most(4, 10**15) == env.most(4, 5) == {"a": 3, "b": 2}
