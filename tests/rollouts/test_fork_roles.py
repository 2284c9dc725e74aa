"""Sub-agents on other engines, without training, with separate tools and rewards; and self-play in two roles."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.engines.teacher import divergence, teacher_advantages
from agentgym.samples import build_samples, demonstrations, teacher_samples
from agentgym.scheduling import Schedule, Scheduler, run_groups
from agentgym.store.reader import RolloutStore
from agentgym.store.writer import RolloutWriter
from agentgym.types import Group, Segment
from agentgym.types.messages import Message

TASK = ag.Task(id="t", prompt="Go.")


class Desk(ag.ToolEnv[ag.Task]):
    """An env that queries a sub-agent with the test's settings."""

    asks: dict[str, Any] = {}  # noqa: RUF012  set by `desk`

    @ag.tool
    async def ask(self) -> str:
        """Ask a sub-agent."""
        async with self.fork("subagent", [Message(role="user", content="Well?")], **self.asks) as agent:
            return await agent.run()

    @ag.tool(root=False)
    async def look(self) -> str:
        """Look around."""
        return "a lamp"

    @ag.reward
    def one(self) -> float:
        return 1.0


def desk(**asks: Any) -> type[Desk]:
    return type("Desk", (Desk,), {"asks": asks})


SCRIPT = [call("ask"), say("root")]


async def test_a_sub_agent_runs_on_another_engine_and_none_of_its_tokens_is_trained(no_leaks: None) -> None:
    helper = Scripted([call("look"), say("a lamp, says the helper")])
    rollout = await ag.rollout(desk(engine="helper", tools=["look"]), TASK, Scripted(SCRIPT), models={"helper": helper})
    assert rollout.error is None
    root, agent = rollout.segments
    assert (root.model, root.trained, agent.model, agent.trained) == ("", True, "helper", False)
    assert "a lamp, says the helper" in root.turns[0].env_messages[0]["content"]
    assert rollout.sampled_tokens == rollout.trained_tokens == int(root.sampled.sum())
    assert rollout.metrics["untrained_tokens"] == int(agent.sampled.sum()) > 0
    assert helper._played == {}  # its sessions were released
    batch = build_samples([two_of(rollout)])
    assert {(sample.rollout_id, sample.segment) for sample in batch} == {("t/0", 0), ("t/1", 0)}
    assert sum(sample.weight for sample in batch if sample.rollout_id == "t/0") == pytest.approx(1.0)
    assert batch.metrics()["samples/untrained_tokens"] == int(agent.sampled.sum())
    assert [sample.segment for sample in demonstrations([rollout])] == [0]


def two_of(rollout: ag.Rollout) -> Group:
    """Return a group in which the rollout has a signal."""
    other = ag.Rollout(rollout_id="t/1", group_id="t", segments=rollout.segments[:1], reward=0.0, stop_reason="answer")
    return Group(group_id="t", rollouts=(rollout, other))


async def test_a_sub_agent_of_the_policy_may_be_excluded_from_training() -> None:
    rollout = await ag.rollout(desk(train=False), TASK, Scripted([call("ask"), say("helped"), say("root")]))
    assert [(s.model, s.trained) for s in rollout.segments] == [("", True), ("", False)]
    assert rollout.trained_tokens < rollout.sampled_tokens
    assert rollout.metrics["untrained_tokens"] == rollout.sampled_tokens - rollout.trained_tokens
    assert {sample.segment for sample in build_samples([two_of(rollout)])} == {0}


async def test_a_nested_agent_inherits_settings_from_the_agent_that_opens_it() -> None:
    class Nested(Desk):
        @ag.tool(root=False)
        async def deeper(self) -> str:
            """Ask further."""
            ask = [Message(role="user", content="?")]
            async with self.fork("subagent", ask) as same, self.fork("subagent", ask, engine="", train=True) as own:
                return await same.run() + await own.run()

    env = type("Nested", (Nested,), {"asks": {"engine": "helper", "role": "aide", "tools": ["deeper"]}})
    helper = Scripted([call("deeper"), say("same"), say("all")])
    policy = Scripted([call("ask"), say("own"), say("root")])
    rollout = await ag.rollout(env, TASK, policy, models={"helper": helper})
    assert rollout.failure is not None  # "own" is trained, and its role has no reward
    assert "no reward for role 'aide'" in str(rollout.error)
    assert [(s.role, s.model, s.trained) for s in rollout.segments] == [
        ("", "", True),
        ("aide", "helper", False),
        ("aide", "helper", False),
        ("aide", "", True),
    ]


async def test_a_non_root_tool_is_shown_and_allowed_only_to_sub_agents() -> None:
    texts: list[str] = []

    def policy(text: str) -> Message:
        texts.append(text)
        return deque([call("look"), call("ask"), call("look"), say("seen"), say("root")])[len(texts) - 1]

    rollout = await ag.rollout(desk(tools=["look"]), TASK, Scripted(policy))
    root, agent = rollout.segments
    assert '"name": "look"' not in texts[0]
    assert "unknown tool 'look'; the tools are: ask" in root.turns[0].env_messages[0]["content"]
    assert '"name": "look"' in texts[2]
    assert agent.turns[0].env_messages[0]["content"] == "a lamp"


async def test_a_fork_of_a_sub_agent_keeps_its_tools() -> None:
    class Splits(Desk):
        @ag.tool(root=False)
        async def split(self) -> str:
            """Try two ways."""
            async with self.fork("fork", [Message(role="tool", content="so", name="split")]) as agent:
                return await agent.run()

    env = type("Splits", (Splits,), {"asks": {"tools": ["split"]}})
    script = [call("ask"), call("split"), call("look"), say("fork"), say("agent"), say("root")]
    rollout = await ag.rollout(env, TASK, Scripted(script))
    fork = rollout.segments[2]
    assert fork.turns[0].env_messages[0]["content"].startswith("error: unknown tool 'look'; the tools are: split")


@pytest.mark.parametrize(
    ("asks", "said"),
    [
        ({"engine": "nobody"}, "there is no model 'nobody'; there are: helper"),
        ({"engine": "helper", "train": True}, "cannot be trained on tokens that the model 'helper' samples"),
        ({"role": "aide"}, "no reward for role 'aide', whose turns are trained; set self.role_rewards"),
    ],
)
async def test_invalid_sub_agents_raise_errors(asks: dict[str, Any], said: str) -> None:
    policy = Scripted([call("ask"), say("a"), say("b")])
    rollout = await ag.rollout(desk(**asks), TASK, policy, models={"helper": Scripted([say("x")])})
    assert said in (rollout.error or rollout.text(full=True))


async def test_a_fork_cannot_move_to_another_engine() -> None:
    class Moves(Desk):
        @ag.tool
        async def move(self) -> str:
            """Fork to another engine."""
            async with self.fork("fork", [Message(role="tool", content="so", name="move")], engine="helper") as agent:
                return await agent.run()

    rollout = await ag.rollout(Moves, TASK, Scripted([call("move"), say("so")]), models={"helper": Scripted([])})
    assert "engine: a fork continues its parent's token ids" in rollout.segments[0].turns[0].env_messages[0]["content"]


def test_the_policy_is_never_trained_on_tokens_of_another_model() -> None:
    with pytest.raises(ValueError, match="trained: the policy cannot be trained on tokens that 'judge' sampled"):
        Segment(
            index=0, parent=None, kind="root", token_ids=np.array([1]), sampled=np.array([False]),
            logprobs=np.array([0.0]), turns=(), model="judge",
        )  # fmt: skip


class Duel(ag.Env[ag.Task]):
    """An env in which two roles say a word each; the longer word wins."""

    other: dict[str, Any] = {"role": "black"}  # noqa: RUF012  set by the tests

    async def step(self, action: Message) -> ag.StepResult:
        async with self.fork("subagent", [Message(role="user", content="Your word?")], **self.other) as black:
            answer = await black.turn()
        word = "" if answer is None else answer["content"]
        won = float(np.sign(len(action["content"]) - len(word)))
        self.role_rewards["black"] = -won
        return ag.StepResult([], won, True, False, {"rewards": {"white": won}})


class Words(Scripted):
    """An engine that says the words of each rollout's white and black."""

    def __init__(self, **words: tuple[str, str]) -> None:
        super().__init__([])
        self.words = words

    def _next(self, token_ids: Any, session: str) -> Message:
        _, index, conversation = session.split("/")
        return say(self.words[f"r{index}"]["." in conversation])


WORDS = {"r0": ("aaa", "b"), "r1": ("a", "bb"), "r2": ("aaaa", "bb"), "r3": ("a", "bbb")}
"""White wins twice and black wins twice."""


def advantages_of(batch: Any, *, segment: int) -> dict[str, float]:
    found = {}
    for sample in batch:
        if sample.segment == segment:
            (found[sample.rollout_id],) = set(sample.advantages[sample.loss_mask].tolist())
    return found


@pytest.mark.parametrize("level", ["outcome", "turn"])
async def test_no_token_of_a_role_is_trained_on_the_other_roles_reward(level: Any) -> None:
    groups = await run_groups(Duel, [TASK], Words(**WORDS), n=4)
    assert [rollout.error for rollout in groups.rollouts] == [None] * 4
    assert groups.metrics()["role/black"] == 0.0
    for rollout in groups.rollouts:
        assert rollout.role_rewards == {"black": -(rollout.reward or 0.0)}
    batch = build_samples(groups, credit=level)
    white, black = (advantages_of(batch, segment=segment) for segment in (0, 1))
    assert white == {"t/0": 1.0, "t/1": -1.0, "t/2": 1.0, "t/3": -1.0}
    assert black == {"t/0": -1.0, "t/1": 1.0, "t/2": -1.0, "t/3": 1.0}
    for rollout in groups.rollouts:
        weights = [sample.weight for sample in batch if sample.rollout_id == rollout.rollout_id]
        assert len(weights) == 2
        assert sum(weights) == pytest.approx(1.0)


@pytest.mark.parametrize("level", ["outcome", "turn"])
async def test_each_role_has_its_own_baseline_in_the_group(level: Any) -> None:
    class Lopsided(Duel):
        async def step(self, action: Message) -> ag.StepResult:
            result = await super().step(action)
            self.role_rewards["black"] = 10.0 + (self.role_rewards["black"] > 0)
            return result

    groups = await run_groups(Lopsided, [TASK], Words(**WORDS | {"r3": ("aa", "b")}), n=4)
    batch = build_samples(groups, credit=level)
    assert advantages_of(batch, segment=0) == {"t/0": 0.5, "t/1": -1.5, "t/2": 0.5, "t/3": 0.5}
    assert advantages_of(batch, segment=1) == {"t/0": -0.25, "t/1": 0.75, "t/2": -0.25, "t/3": -0.25}


async def test_a_group_has_a_signal_if_one_of_its_roles_has_one() -> None:
    class Calm(Duel):
        async def step(self, action: Message) -> ag.StepResult:
            result = await super().step(action)
            return result._replace(reward=0.0, info={"rewards": {"white": 0.0}})

    groups = await run_groups(Calm, [TASK], Words(**WORDS), n=4)
    batch = build_samples(groups)
    assert batch.groups_without_signal == 0
    assert set(advantages_of(batch, segment=0).values()) == {0.0}
    assert set(advantages_of(batch, segment=1).values()) == {1.0, -1.0}
    schedule = Schedule(group_size=4, oversample=ag.OversampleConfig(replace=1))
    async with Scheduler(Calm, [TASK, ag.Task(id="u", prompt="?")], Words(**WORDS), schedule) as scheduler:
        assert [group.group_id for group in await scheduler.collect(1)] == ["t"]


async def test_either_role_may_be_frozen_or_on_another_engine() -> None:
    frozen = type("Frozen", (Duel,), {"other": {"role": "black", "train": False}})
    batch = build_samples(await run_groups(frozen, [TASK], Words(**WORDS), n=4))
    assert {sample.segment for sample in batch} == {0}

    class BlackLearns(Duel):
        other: dict[str, Any] = {"role": "black", "train": True}  # noqa: RUF012

        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.root_trained = False
            return await super().reset(seed=seed, options=options)

    batch = build_samples(await run_groups(BlackLearns, [TASK], Words(**WORDS), n=4))
    assert {sample.segment for sample in batch} == {1}
    assert advantages_of(batch, segment=1) == {"t/0": -1.0, "t/1": 1.0, "t/2": -1.0, "t/3": 1.0}

    class Champion(Duel):
        root_engine = "champion"
        other: dict[str, Any] = {"role": "black", "engine": "", "train": True}  # noqa: RUF012

    groups = await run_groups(Champion, [TASK], Words(**WORDS), n=4, models={"champion": Scripted([say("cccc")])})
    assert [rollout.reward for rollout in groups.rollouts] == [1.0] * 4
    assert [rollout.segments[0].model for rollout in groups.rollouts] == ["champion"] * 4
    assert [rollout.sampled_tokens for rollout in groups.rollouts] == [len(black) + 1 for _, black in WORDS.values()]


async def test_reward_methods_of_a_role_count_only_toward_that_role() -> None:
    class Deal(Desk):
        asks: dict[str, Any] = {"role": "seller"}  # noqa: RUF012

        @ag.reward(role="seller", weight=0.5)
        async def price(self) -> float:
            return 8.0

        @ag.reward(role="seller")
        def polite(self) -> float:
            return 1.0

    rollout = await ag.rollout(Deal, TASK, Scripted([call("ask"), say("eight"), say("deal")]))
    assert (rollout.reward, rollout.role_rewards) == (1.0, {"seller": 5.0})
    assert rollout.rewards == {"one": 1.0, "price": 8.0, "polite": 1.0}
    assert "rewards of roles: seller 5" in rollout.text()
    assert "segment 1: subagent of segment 0, role seller" in rollout.text()


async def test_roles_and_models_are_stored(tmp_path: Path) -> None:
    groups = await run_groups(
        type("Mixed", (Duel,), {"other": {"role": "black", "engine": "helper"}}),
        [TASK], Words(**WORDS), n=2, models={"helper": Scripted([say("bb")])},
    )  # fmt: skip
    with RolloutWriter(tmp_path) as writer:
        writer.add(groups, step=0)
    with RolloutStore(tmp_path) as store:
        found = [stored.rollout for stored in store.find()]
    assert [rollout.role_rewards for rollout in found] == [{"black": -1.0}, {"black": 1.0}]
    assert [(s.role, s.model, s.trained) for s in found[0].segments] == [("", "", True), ("black", "helper", False)]


async def test_a_teacher_scores_only_trained_tokens() -> None:
    rollout = await ag.rollout(
        desk(engine="helper"), TASK, Scripted(SCRIPT), models={"helper": Scripted([say("helped")])}
    )
    student = Scripted([])
    found = await teacher_advantages([rollout], Scripted([]), student, sampling=ag.Sampling())
    assert set(found) == {("t/0", 0)}
    assert divergence([rollout], found) == 0.0
    found["t/0", 0] = found["t/0", 0] + np.float32(1)
    assert {sample.segment for sample in teacher_samples([two_of(rollout)], found | {("t/1", 0): found["t/0", 0]})} == {
        0
    }


async def test_the_version_of_another_model_makes_no_group_stale() -> None:
    policy, helper = Scripted(SCRIPT), Scripted([say("helped")])
    policy.version = 5
    groups = await run_groups(desk(engine="helper"), [TASK], policy, n=1, models={"helper": helper})
    assert groups.batch_stats is not None
    assert groups.batch_stats.stalest == 0


async def test_a_sub_agent_on_a_real_model_uses_its_own_tokens() -> None:
    async with ag.TransformersEngine("tiny") as helper:
        env = type("Brief", (Desk,), {"asks": {"engine": "helper"}, "limits": ag.Limits(turn_tokens=80)})
        rollout = await ag.rollout(env, TASK, Scripted(SCRIPT), models={"helper": helper})
        root, agent = rollout.segments
        assert rollout.error is None
        opened = agent.token_ids[: agent.turns[0].start].tolist()
        assert "Well?" in helper.tokenizer.decode(opened)
        assert opened == helper.tokenizer.encode(helper.tokenizer.decode(opened))
        assert (root.model, agent.model, agent.trained) == ("", "helper", False)
