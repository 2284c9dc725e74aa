"""Branches: a rollout is continued from its states with copies of everything it has, and is itself unchanged."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest

import agentgym as ag
from agentgym.engines.scripted import ByteTokenizer, Scripted, call, say
from agentgym.errors import EngineError
from agentgym.run.metrics.batch import batch_metrics
from agentgym.samples import build_samples
from agentgym.sandboxes.fake.sandbox import FakeSandbox, FakeSandboxPool
from agentgym.scheduling.run_groups import run_groups
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.store.rows import rollout_row
from agentgym.types.branching import BranchingConfig
from agentgym.types.completion import Completion, Sampling
from agentgym.types.messages import Message
from agentgym.types.rollout import Group, Rollout, Segment
from agentgym.types.task import StepResult
from agentgym.view.timeline import timeline

TASK = ag.Task(id="t", prompt=(ag.Message(role="user", content="Go."),))
DECODE = ByteTokenizer().decode


class Dice(Scripted):
    """An engine that answers a or b with equal probability, by the turn's seed alone, and tracks open sessions."""

    def __init__(self, *, likely: float = 0.5) -> None:
        super().__init__([])
        self.likely, self.open, self.asked = likely, set[str](), list[str]()

    async def generate(
        self, token_ids: Sequence[int], *, session: str, max_tokens: int, sampling: Sampling, seed: int
    ) -> Completion:
        await asyncio.sleep(0)
        self.open.add(session)
        self.asked.append(session)
        first = random.Random(seed).random() < self.likely
        ids = self.tokenizer.encode(("a" if first else "b") + self.end)[:max_tokens]
        chance = self.likely if first else 1 - self.likely
        logprobs = np.array([math.log(chance), *[0.0] * (len(ids) - 1)], np.float32)
        return Completion(
            token_ids=np.array(ids), logprobs=logprobs, finish_reason="stop" if len(ids) > 1 else "length"
        )

    async def release(self, session: str) -> None:
        self.open.discard(session)


class Letters(ag.Env[ag.Task]):
    """An env that collects letters up to `length`.

    Each a is worth 1, and the env's own random numbers add to the reward.
    """

    length: ClassVar[int] = 4
    closed: ClassVar[list["Letters"]] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.closed = []

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        self.letters: list[str] = []
        self.random = random.Random(seed)
        return await super().reset(seed=seed)

    async def step(self, action: Message) -> StepResult:
        self.letters.append(action["content"])
        self.metrics["letters"] = float(len(self.letters))
        self.metrics["steps"] = self.metrics.get("steps", 0.0) + 1
        done = len(self.letters) == self.length
        return StepResult([Message(role="user", content="more")], 0.5 * (action["content"] == "a"), done, False, {})

    async def score(self) -> dict[str, float]:
        return {"a": 0.5 * self.letters.count("a"), "noise": self.random.random()}

    async def close(self) -> None:
        self.closed.append(self)


def letters(name: str = "Some", **given: Any) -> type[Letters]:
    return type(name, (Letters,), given)


async def play(env: type[ag.Env[Any]], branching: BranchingConfig | None = None, **given: Any) -> Rollout:
    return await ag.rollout(env, TASK, given.pop("engine", None) or Dice(), branching=branching, **given)


def said(segment: Segment) -> list[str]:
    return [DECODE(segment.token_ids[t.start : t.stop].tolist()).removesuffix("<|im_end|>") for t in segment.turns]


def facts(played: Rollout) -> Any:
    own = [s for s in played.segments if s.branch is None]
    counts = {k: v for k, v in played.metrics.items() if not k.startswith("branch") and "seconds" not in k}
    return (
        [(s.index, s.parent, s.kind, s.token_ids.tolist(), s.logprobs.tolist()) for s in own],
        [(t.number, t.reward, t.message, t.env_messages) for s in own for t in s.turns],
        (played.reward, played.rewards, played.role_rewards, played.stop_reason, counts),
    )


@pytest.mark.parametrize("seed", range(5))
async def test_branches_do_not_change_the_rollout_itself(seed: int) -> None:
    env = letters(limits=ag.Limits(turns=9), context=ag.Compact(at=None, turns=2), length=6)
    plain = await play(env, seed=seed)
    branched = await play(env, BranchingConfig(per_state=3), seed=seed)
    assert facts(branched) == facts(plain)
    assert len(branched.branches) == 15


@pytest.mark.parametrize("seed", range(4))
async def test_a_branch_continues_from_its_state_and_is_scored_over_its_whole_path(seed: int) -> None:
    played = await play(letters(), BranchingConfig(per_state=2), seed=seed)
    root, *others = played.segments
    assert [branch.turn for branch in played.branches] == [1, 1, 2, 2, 3, 3]
    assert played.metrics["branches"] == 6
    for place, (segment, branch) in enumerate(zip(others, played.branches, strict=True)):
        assert (segment.kind, segment.parent, segment.branch) == ("branch", 0, place)
        assert [turn.number for turn in segment.turns] == list(range(branch.turn, 4))
        taken = root.turns[branch.turn].start
        assert segment.token_ids[:taken].tolist() == root.token_ids[:taken].tolist()
        assert not segment.sampled[:taken].any()
        way = said(root)[: branch.turn] + said(segment)
        assert branch.rewards["a"] == 0.5 * way.count("a")
        # The env's own random numbers equal the rollout's: the copy has its generator in the same state.
        assert branch.rewards["noise"] == played.rewards["noise"]
        assert branch.reward == pytest.approx(way.count("a") + branch.rewards["noise"])
        assert branch.metrics["turns"] == len(segment.turns)
        assert branch.metrics["letters"] == 4
    assert sum(branch.metrics["tokens"] for branch in played.branches) == played.metrics["branch_tokens"]


async def test_every_sample_has_its_own_seed() -> None:
    engine = Dice()
    await play(letters(length=8), BranchingConfig(per_state=3), engine=engine)
    assert max(Counter(engine.asked).values()) == 8  # the rollout's own session, one seed per turn
    assert len(set(engine.asked)) == 1 + 3 * 7


async def test_envs_and_sessions_are_closed_however_the_rollout_ends() -> None:
    env, engine = letters(), Dice()
    played = await play(env, BranchingConfig(per_state=2), engine=engine)
    assert engine.open == set()
    assert len(env.closed) == len({id(each) for each in env.closed}) == 1 + len(played.branches)


async def test_with_branches_each_sampled_token_is_trained_once() -> None:
    env = letters(limits=ag.Limits(turns=9), context=ag.Compact(at=None, turns=2), length=6)
    rollouts = tuple([await play(env, BranchingConfig(per_state=2), seed=i, rollout_id=f"t/{i}") for i in range(3)])
    batch = build_samples([Group(group_id="t", rollouts=rollouts)], credit="branches")
    assert batch.trained_tokens == sum(rollout.sampled_tokens for rollout in rollouts)
    assert batch.untrained_tokens == 0
    for rollout in rollouts:
        assert sum(s.weight for s in batch if s.rollout_id == rollout.rollout_id) == pytest.approx(1)


async def test_a_branch_compacts_at_the_same_turns_as_the_rollout() -> None:
    env = letters(limits=ag.Limits(turns=9), context=ag.Compact(at=None, turns=3), length=5)
    played = await play(env, BranchingConfig(per_state=1))
    for place, branch in enumerate(played.branches):
        own = [s for s in played.segments if s.branch == place]
        sampled = [len(s.turns) for s in own]
        # Turns 0, 1, 2, the summary as turn 3, then two more in the next segment; a branch starts in between.
        assert sampled == {1: [3, 2], 2: [2, 2], 4: [2], 5: [1]}[branch.turn]
        assert [s.kind for s in own] == ["branch", *["compaction"] * (len(own) - 1)]
        assert all(s.parent == own[0].index for s in own[1:])


async def test_a_branch_gets_the_limits_that_the_rollout_had_left() -> None:
    turns = await play(letters(length=9, limits=ag.Limits(turns=3)), BranchingConfig(per_state=1))
    assert [(b.turn, b.metrics["turns"], b.stop_reason) for b in turns.branches] == [(1, 2, "turns"), (2, 1, "turns")]
    tokens = await play(letters(length=9, limits=ag.Limits(tokens=6)), BranchingConfig(per_state=2))
    assert [(b.turn, b.metrics["tokens"], b.stop_reason) for b in tokens.branches] == [
        (1, 4, "tokens"),
        (1, 4, "tokens"),
        (2, 2, "tokens"),
        (2, 2, "tokens"),
    ]
    assert (tokens.stop_reason, tokens.metrics["turns"]) == ("tokens", 3)


async def test_the_clock_of_the_rollout_is_paused_while_its_branches_run() -> None:
    class Waits(Letters):
        """The second path to step 2 never answers: it is a branch and has the remaining seconds."""

        async def step(self, action: Message) -> StepResult:
            answer = await super().step(action)
            if len(self.letters) == 2 and not self.closed and self.is_branch:
                await asyncio.Event().wait()
            return answer

        is_branch = False

        async def branch(self, memo: dict[int, Any]) -> Self:
            twin = await super().branch(memo)
            twin.is_branch = True
            return twin

    Waits.limits = ag.Limits(seconds=0.2)
    played = await play(Waits, BranchingConfig(per_state=1, every=1))
    assert played.stop_reason == "done"
    assert [branch.stop_reason for branch in played.branches] == ["seconds", "done", "done"]
    whole = played.metrics["seconds"] + played.metrics["branch_seconds"]
    assert played.metrics["seconds"] < 0.2 < whole
    (*_, score), exact = timeline(played)
    assert exact
    assert (score["what"], score["to_s"]) == ("score", pytest.approx(whole, abs=1e-5))


async def test_a_failed_branch_is_counted_and_gives_no_sample() -> None:
    class Fails(Dice):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            if "+1/" in session:
                raise EngineError("it is gone")
            return await super().generate(token_ids, session=session, **given)

    played = await play(letters(), BranchingConfig(per_state=2), engine=Fails())
    assert played.reward is not None
    assert [branch.reward is None for branch in played.branches] == [False, True] * 3
    assert "it is gone" in str(played.branches[1].failure)
    assert played.metrics["branches_failed"] == 3
    batch = build_samples(
        [Group(group_id="t", rollouts=(played, await play(letters(), rollout_id="t/1", seed=9)))],
        credit="branches",
    )
    assert {sample.segment for sample in batch if sample.rollout_id == "t/0"} == {0, 1, 3, 5}


async def test_a_cancelled_rollout_closes_its_branches() -> None:
    class Hangs(Letters):
        reached: ClassVar[asyncio.Event]

        async def step(self, action: Message) -> StepResult:
            if len(self.letters) == 2:
                self.reached.set()
                await asyncio.Event().wait()
            return await super().step(action)

    Hangs.reached, engine = asyncio.Event(), Dice()
    running = asyncio.create_task(play(Hangs, BranchingConfig(per_state=3), engine=engine))
    await Hangs.reached.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(Hangs.closed) == 4
    assert engine.open == set()


class Counting(ag.ToolEnv[ag.Task]):
    """An env that counts in the sandbox, in this process, and in a helper that holds the sandbox."""

    sandbox_spec = ag.AnySandbox()
    ends: ClassVar[list[tuple[int, int, int]]] = []

    async def setup(self) -> None:
        self.count = [0]
        self.helper: dict[str, Any] = {"sandbox": self.sandbox, "of": self.count}
        await self.sandbox.python("n = 0")

    @ag.tool
    async def add(self) -> str:
        """Add one everywhere."""
        self.count[0] += 1
        await self.helper["sandbox"].python("n += 1")
        if self.count[0] == 2:
            raise RuntimeError("a tool error")
        return "added"

    @ag.reward
    async def total(self) -> float:
        in_sandbox = int((await self.sandbox.python("print(n)")).text(limit=20))
        assert self.helper["of"] is self.count
        self.ends.append((in_sandbox, self.count[0], len(self.answer or "")))
        return float(in_sandbox)


async def test_each_branch_has_a_branch_of_the_sandbox_and_returns_it() -> None:
    forked: list[FakeSandbox] = []
    fork, close = FakeSandbox.fork, FakeSandbox.close
    closed: list[FakeSandbox] = []

    async def counted(self: FakeSandbox, **given: Any) -> FakeSandbox:
        forked.append(await fork(self, **given))
        assert len(forked) - len(closed) <= 2
        return forked[-1]

    async def ended(self: FakeSandbox) -> None:
        closed.append(self)
        await close(self)

    Counting.ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeSandbox, "fork", counted)
        patch.setattr(FakeSandbox, "close", ended)
        engine = Scripted(lambda text: say("end") if text.count("|>tool\n") >= 3 else call("add"))
        played = await ag.rollout(
            Counting, TASK, engine, sandboxes=FakeSandboxPool(), branching=BranchingConfig(per_state=2)
        )
    assert played.reward == 3.0, played
    assert [branch.reward for branch in played.branches] == [3.0] * 6
    assert Counting.ends == [(3, 3, 3)] * 7
    assert len(forked) == 6
    assert {id(branch) for branch in closed} == {id(branch) for branch in forked}


async def test_states_are_chosen_by_the_given_criteria() -> None:
    seven = letters(length=7)

    async def turns(branching: BranchingConfig, env: type[ag.Env[Any]] = seven, **given: Any) -> list[int]:
        played = await play(env, branching, **given)
        return sorted({branch.turn for branch in played.branches})

    assert await turns(BranchingConfig()) == [1, 2, 3, 4, 5, 6]
    assert await turns(BranchingConfig(every=3)) == [3, 6]
    # At least four tokens are spent after the first state: its two branches have six turns each.
    assert await turns(BranchingConfig(tokens=1)) == [1]
    engine = Scripted(lambda text: say("end") if text.count("|>tool\n") >= 3 else call("add"))
    assert await turns(BranchingConfig(after="tool_error"), Counting, engine=engine, sandboxes=FakeSandboxPool()) == [2]
    for seed in range(4):
        plain = await play(letters(length=7), engine=Dice(likely=0.8), seed=seed)
        means = [float(turn.logprobs.mean()) for turn in _logprobs(plain)]
        unlikely = [i + 1 for i in range(1, 6) if means[i] < sum(means[:i]) / i]
        found = await turns(BranchingConfig(after="unlikely_turn"), engine=Dice(likely=0.8), seed=seed)
        assert found == unlikely


def _logprobs(played: Rollout) -> list[Any]:
    (segment,) = played.segments

    class _Turn:
        def __init__(self, start: int, stop: int) -> None:
            self.logprobs = segment.logprobs[start:stop]

    return [_Turn(turn.start, turn.stop) for turn in segment.turns]


class Holds(Letters):
    """An env with a member that no copy may share."""

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        self.held = self.make()
        return await super().reset(seed=seed)

    def make(self) -> Any:
        return asyncio.Lock()


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda env: lambda: env.letters, "refers to this env in its closure"),
        (lambda env: [env.score, lambda: env], "refers to this env in its closure"),
        (lambda env: (i for i in range(3)), "cannot pickle 'generator' object"),
        (lambda env: asyncio.Lock(), "a Lock may be open"),
        (lambda env: {"file": Path(__file__).open()}, "a TextIOWrapper may be open"),  # noqa: SIM115
    ],
)
async def test_an_env_that_cannot_be_copied_is_refused_by_name_with_advice(made: Any, why: str) -> None:
    env = type("Held", (Holds,), {"make": made})
    plain = await play(env)
    assert plain.failure is None
    played = await play(env, BranchingConfig())
    assert played.reward is None
    message = str(played.failure)
    assert "Held.branch: self.held" in message
    assert why in message
    assert "override `async def branch(self, memo)`" in message


async def test_an_env_may_copy_itself() -> None:
    class Own(Holds):
        async def branch(self, memo: dict[int, Any]) -> Self:
            twin = copy(self)
            twin.letters, twin.random = list(self.letters), copy(self.random)
            twin.held = asyncio.Lock()
            return twin

    played = await play(Own, BranchingConfig(per_state=1))
    assert [branch.reward is not None for branch in played.branches] == [True] * 3
    assert facts(played) == facts(await play(Own))

    class Same(Letters):
        async def branch(self, memo: dict[int, Any]) -> Self:
            return self

    assert "Same.branch: TypeError: it must return another instance of Same" in str(
        (await play(Same, BranchingConfig())).failure
    )


class Asks(Letters):
    """An env that keeps the judge it queries."""

    fallback_models: ClassVar[dict[str, Any]] = {"judge": Scripted(lambda text: say("fine"))}

    async def step(self, action: Message) -> StepResult:
        if not hasattr(self, "judge"):
            self.judge = self.model("judge")
        await self.judge.ask("Well?")
        return await super().step(action)


async def test_a_branch_makes_its_own_model_calls() -> None:
    played = await play(Asks, BranchingConfig(per_state=2))
    assert facts(played) == facts(await play(Asks))
    assert played.metrics["model_calls/judge"] == 4
    assert [branch.metrics["model_calls/judge"] for branch in played.branches] == [3, 3, 2, 2, 1, 1]


class Delegates(Letters):
    """An env that queries a sub-agent with a separate role in each turn."""

    async def step(self, action: Message) -> StepResult:
        async with self.fork("subagent", [Message(role="user", content="?")], role="aide") as aide:
            heard = await aide.turn()
        self.heard = [*getattr(self, "heard", []), str(heard["content"] if heard else "")]
        self.role_rewards["aide"] = float(self.heard.count("a"))
        return await super().step(action)


class Aided(Delegates):
    """The same for three turns."""

    limits = ag.Limits(turns=20)
    length = 3


async def test_sub_agents_belong_to_their_branch_and_get_their_roles_rewards() -> None:
    played = await play(Aided, BranchingConfig(per_state=2))
    assert facts(played) == facts(await play(Aided))
    for place, branch in enumerate(played.branches):
        own = [s for s in played.segments if s.branch == place]
        aides = [s for s in own if s.role == "aide"]
        assert len(aides) == 3 - branch.turn // 2
        assert {s.parent for s in aides} == {own[0].index}
        before = [s for s in played.segments if s.branch is None and s.role == "aide"][: branch.turn // 2]
        assert branch.role_rewards["aide"] == sum(said(s) == ["a"] for s in [*before, *aides])
    other = await play(Aided, seed=1, rollout_id="t/1")
    batch = build_samples([Group(group_id="t", rollouts=(played, other))], credit="branches")
    assert batch.trained_tokens == played.sampled_tokens + other.sampled_tokens


async def test_untrained_branches_only_estimate() -> None:
    played = await play(letters(), BranchingConfig(per_state=2, train=False))
    assert [s.trained for s in played.segments] == [True] + [False] * 6
    batch = build_samples([Group(group_id="t", rollouts=(played,))], credit="branches")
    assert {sample.segment for sample in batch} == {0}
    assert batch.untrained_tokens == played.metrics["branch_tokens"]


async def test_reward_metrics_exclude_branches_and_token_metrics_include_them() -> None:
    groups = [
        await run_groups(letters(), [TASK], Dice(), n=2, branching=branching) for branching in (None, BranchingConfig())
    ]
    plain, branched = (each.metrics() | batch_metrics(each) for each in groups)
    apart = {name for name, value in plain.items() if branched[name] != value and "seconds" not in name}
    assert apart <= {"tokens/sampled", "tokens/total", "oversample/length_bias"} | {
        name for name in plain if name.startswith("requests/")
    }
    assert branched["length/rollout_max"] < branched["tokens/sampled"]
    taken = branched["tokens/sampled"] - plain["tokens/sampled"]
    assert branched["rollout/branch_tokens"] == pytest.approx(taken)


async def test_the_repr_lists_the_rollouts_size_and_its_branches_size_separately() -> None:
    played = await play(letters(), BranchingConfig(per_state=1), seed=1)
    assert repr(played).endswith(
        "stopped by done, 4 turns, 8 sampled tokens, 1 segment, and in 3 branches 6 turns, 12 sampled tokens, "
        "3 segments>"
    )
    assert rollout_row(played, phase="train", step=0)[7] == 4


async def test_branches_of_a_scheduled_rollout_are_counted_with_it() -> None:
    settings = Schedule(group_size=2, branching=BranchingConfig(per_state=2))
    async with Scheduler(letters(), [TASK], Dice(), settings) as scheduler:
        groups = await scheduler.collect(1)
    rollouts = groups.rollouts
    assert [len(rollout.branches) for rollout in rollouts] == [6, 6]
    assert groups.batch_stats is not None
    assert groups.batch_stats.kept_tokens == sum(rollout.sampled_tokens for rollout in rollouts)
    assert groups.batch_stats.requests.finished == sum(len(s.turns) for r in rollouts for s in r.segments)


class Program(ag.AgentEnv[ag.Task]):
    """An env that runs its own agent program."""

    command = "true"


class Compares(Letters):
    """An env that rewards a group."""

    @classmethod
    async def group_reward(cls, task: Any, rollouts: Any, model: Any) -> list[float]:
        return [1.0] * len(rollouts)


@pytest.mark.parametrize(
    ("env", "branching", "message"),
    [
        (Program, BranchingConfig(), "branching: Program starts a separate program"),
        (Compares, BranchingConfig(), "branching: Compares.group_reward compares whole rollouts"),
        (Letters, BranchingConfig(after="tool_error"), "branching.after: Letters is not a ToolEnv"),
    ],
)
async def test_an_env_whose_rollouts_cannot_branch_is_refused(
    env: Any, branching: BranchingConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await play(env, branching)


@pytest.mark.parametrize("wrong", [{"every": 2}, True])
async def test_an_invalid_branching_is_refused_by_name_everywhere(wrong: Any) -> None:
    said = r"^branching: must be an instance of BranchingConfig, got"
    with pytest.raises(ValueError, match=said):
        await play(letters(), wrong)
    with pytest.raises(ValueError, match=said):
        await run_groups(letters(), [TASK], Dice(), n=2, branching=wrong)
    with pytest.raises(ValueError, match=said):
        Schedule(group_size=2, branching=wrong)


@pytest.mark.parametrize("field", ["per_state", "every", "tokens"])
def test_invalid_settings_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        BranchingConfig(**{field: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="after"):
        BranchingConfig(after="entropy")  # type: ignore[arg-type]
