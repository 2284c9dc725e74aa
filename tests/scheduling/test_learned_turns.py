"""Batches whose branches are played where earlier batches have taught that they pay."""

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import agentgym as ag
from agentgym.advantages.learned_turns import seen_in
from agentgym.run.collector import DistributedScheduler, PlayedShare, joined
from agentgym.run.peers import Share
from agentgym.samples import build_samples
from agentgym.scheduling.accounting import Groups
from agentgym.scheduling.group_state import GroupSettings
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import Sharding, TaskSampler
from agentgym.types.branching import Branching
from agentgym.types.completion import Completion
from agentgym.types.messages import Message
from tests.advantages.test_played_values import LIKELY, Path3, exact_gradient, slope, within, worth
from tests.rollouts.test_branches import Delegates, Dice, Letters
from tests.support.virtual_time import run_in_virtual_time

BRANCHING = Branching(after="learned_turn", per_state=2, tokens=40)
SETTINGS = GroupSettings(n=4, branching=BRANCHING, seed=100)


def tasks() -> Iterator[ag.Task]:
    return (ag.Task(id=f"t{i}", prompt=(Message(role="user", content="Go."),)) for i in range(1 << 20))


def scheduler(sampler: TaskSampler[ag.Task] | None = None) -> Scheduler[ag.Task]:
    return Scheduler(Path3, sampler or TaskSampler(tasks()), Dice(likely=LIKELY), SETTINGS)


def turns(groups: Groups) -> list[tuple[str, list[int]]]:
    return [(r.rollout_id, [branch.turn for branch in r.branches]) for r in groups.rollouts]


def chosen(groups: Groups) -> set[float]:
    return {rollout.metrics["branch_turn"] for rollout in groups.rollouts}


def gradients(groups: Groups) -> list[float]:
    batch = build_samples(groups, advantage_level="branches", merge=False)
    rows = {(r.rollout_id, r.segment, r.step): float(r.advantages[0]) for r in batch}
    return [
        sum(
            slope(str(turn.message["content"])) * rows.get((rollout.rollout_id, place, step), 0.0)
            for place, segment in enumerate(rollout.segments)
            for step, turn in enumerate(segment.turns)
        )
        for rollout in groups.rollouts
    ]


async def test_the_gradient_stays_unbiased_where_earlier_batches_choose_the_states() -> None:
    found, plans, known = list[float](), list[set[float]](), set[float]()
    async with scheduler() as playing:
        for _ in range(24):
            groups = await playing.collect(8)
            plans.append(chosen(groups))
            known |= plans[-1]
            found += gradients(groups)
    assert within(found, exact_gradient()), (np.mean(found), exact_gradient())
    assert all(len(plan) == 1 for plan in plans)
    assert plans[0] == {0.0}
    assert known & {1.0, 2.0}, plans


async def test_a_batch_knows_those_before_it_each_for_a_tenth_less_and_each_of_its_rollouts_the_same() -> None:
    async with scheduler() as playing:
        before = playing.state_dict()["learned_turns"]
        first = await playing.collect(8)
        after = playing.state_dict()["learned_turns"]
        second = await playing.collect(8)
        last = playing.state_dict()["learned_turns"]
    assert before == {}
    rows, later = (sum((seen_in(g.rollouts) for g in groups), start=np.zeros((3, 6))) for groups in (first, second))
    assert np.allclose(after[""], rows)
    assert np.allclose(last[""], 0.9 * rows + later)
    assert first.rollouts[0].metrics["branch_signal"] == 1.0
    assert len({rollout.metrics["branch_signal"] for rollout in second.rollouts}) == 1


async def test_a_new_scheduler_goes_on_with_what_was_learned() -> None:
    async with scheduler() as playing:
        for _ in range(3):
            await playing.collect(8)
        state = json.loads(json.dumps(playing.state_dict()))
        wanted = [turns(await playing.collect(8)) for _ in range(2)]
    sampler: TaskSampler[ag.Task] = TaskSampler(tasks())
    sampler.load_state_dict([state])
    async with scheduler(sampler) as playing:
        assert [turns(await playing.collect(8)) for _ in range(2)] == wanted


async def test_rewards_whose_squares_are_no_numbers_teach_nothing_and_end_nothing() -> None:
    class Huge(Path3):
        async def score(self) -> dict[str, float]:
            return {"way": 1e200 * worth(self.way)}

    async with Scheduler(Huge, TaskSampler(tasks()), Dice(likely=LIKELY), SETTINGS) as playing:
        groups = await playing.collect(8)
        assert any(len({rollout.reward for rollout in group.scored}) > 1 for group in groups)
        known = np.array(playing.state_dict()["learned_turns"][""])
        assert np.isfinite(known).all()


async def test_a_run_in_which_nothing_was_scored_so_far_is_resumed() -> None:
    class Fails(Path3):
        async def score(self) -> dict[str, float]:
            raise ValueError("it is broken")

    async with Scheduler(Fails, TaskSampler(tasks()), Dice(likely=LIKELY), SETTINGS) as playing:
        await playing.collect(2)
        state = json.loads(json.dumps(playing.state_dict()))
    sampler: TaskSampler[ag.Task] = TaskSampler(tasks())
    sampler.load_state_dict([state])
    async with scheduler(sampler) as playing:
        groups = await playing.collect(2)
        assert np.allclose(playing.state_dict()["learned_turns"][""], sum(seen_in(g.rollouts) for g in groups))


def test_a_state_without_or_with_a_wrong_table_is_what_it_says() -> None:
    sampler: TaskSampler[ag.Task] = TaskSampler(tasks())
    old = {name: value for name, value in sampler.state_dict().items() if name != "learned_turns"}
    TaskSampler(tasks()).load_state_dict([old])
    with pytest.raises(ValueError, match=r"learned_turns: each row must have 6 numbers"):
        TaskSampler(tasks()).load_state_dict([old | {"learned_turns": {"": [[1.0]]}}])
    for number in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"learned_turns: .* finite and at least 0"):
            TaskSampler(tasks()).load_state_dict([old | {"learned_turns": {"": [[1.0] * 5 + [number]]}}])


async def test_two_processes_choose_what_one_chooses() -> None:
    shards = [Sharding(prompts=8, rank=rank, world=2) for rank in range(2)]
    pair = [scheduler(TaskSampler(tasks(), sharding)) for sharding in shards]
    async with scheduler() as alone, pair[0], pair[1]:
        for _ in range(5):
            one = await DistributedScheduler(alone, Share(), wanted=8).collect()
            shares: list[PlayedShare] = [
                await DistributedScheduler(each, Share(), wanted=4).play_share() for each in pair
            ]
            both = joined(shares)
            assert both.batch_stats is not None
            for each in pair:
                each.learn(both.batch_stats)
            assert turns(both) == turns(one)
        known = [each.state_dict()["learned_turns"] for each in (alone, *pair)]
    assert np.allclose(known[0][""], known[1][""])
    assert known[1] == known[2]


async def test_one_batch_alone_draws_its_states() -> None:
    groups = await ag.run_groups(Path3, list(_first(16)), Dice(likely=LIKELY), n=4, branching=BRANCHING)
    assert 0 < sum(bool(rollout.branches) for rollout in groups.rollouts) < 64
    assert chosen(groups) == {0.0}


def _first(count: int) -> Sequence[ag.Task]:
    given = tasks()
    return [next(given) for _ in range(count)]


async def test_other_branches_learn_nothing() -> None:
    settings = GroupSettings(n=2, branching=Branching())
    async with Scheduler(Path3, tasks(), Dice(), settings) as playing:
        groups = await playing.collect(4)
        assert playing.state_dict()["learned_turns"] == {}
    assert groups.batch_stats is not None
    assert groups.batch_stats.turns_seen == {}
    assert "branch_turn" not in groups.rollouts[0].metrics


async def test_the_members_of_a_mixture_are_learned_apart() -> None:
    class Member(Path3):
        @classmethod
        def tasks(cls, split: ag.Split) -> Sequence[ag.Task]:
            return list(_first(64))

    env = ag.mix({"one": ag.Member(Member, 1.0), "two": ag.Member(Member, 1.0)})
    async with Scheduler(env, env.tasks("train"), Dice(likely=LIKELY), SETTINGS) as playing:
        await playing.collect(8)
        known = playing.state_dict()["learned_turns"]
    assert {name: rows[0][0] for name, rows in known.items()} == {"one": 16, "two": 16}


async def test_each_sampled_token_is_trained_once_and_a_rollout_counts_once() -> None:
    async with scheduler() as playing:
        for _ in range(6):
            groups = await playing.collect(8)
            batch = build_samples(groups, advantage_level="branches")
            with_signal = {sample.rollout_id for sample in batch}
            sampled = [r.sampled_tokens for r in groups.rollouts if r.rollout_id in with_signal]
            assert batch.trained_tokens == sum(sampled)
            for name in with_signal:
                assert sum(s.weight for s in batch if s.rollout_id == name) == pytest.approx(1)


async def test_a_sub_agent_has_no_states_and_a_role_has_a_noise_of_its_own() -> None:
    task = next(tasks())
    played = [await ag.rollout(Delegates, task, Dice(), seed=i, rollout_id=f"t0/{i}") for i in range(2)]
    rows = seen_in(played)
    aides = [turn.number for s in played[0].segments if s.role == "aide" for turn in s.turns]
    assert [bool(reached) for reached in rows[:, 0]] == [number not in aides for number in range(len(rows))]
    own = [(r.reward or 0.0) - (played[1 - i].reward or 0.0) for i, r in enumerate(played)]
    theirs = [r.role_rewards["aide"] - played[1 - i].role_rewards["aide"] for i, r in enumerate(played)]
    # Each turn is one letter, as likely as the other: its weight is 1 / 4; the token that ends it is certain.
    assert rows[0, 2] == pytest.approx(sum(len(aides) / 4 * (a**2 + b**2) for a, b in zip(own, theirs, strict=True)))


async def test_a_role_that_no_other_rollout_has_a_reward_for_has_no_noise() -> None:
    aided = await ag.rollout(Delegates, next(tasks()), Dice(), rollout_id="t0/0")
    alone = await ag.rollout(Letters, next(tasks()), Dice(), seed=1, rollout_id="t0/1")
    # Each has four turns of its own, of a weight of 1 / 4.
    assert seen_in([aided, alone])[0, 2] == pytest.approx(2 * ((aided.reward or 0.0) - (alone.reward or 0.0)) ** 2)


async def test_no_branches_are_planned_where_a_summary_is_written() -> None:
    class Compacted(Path3):
        context = ag.Compact(turns=2)

    always = [
        await ag.rollout(Compacted, next(tasks()), Dice(), seed=i, branching=Branching(), rollout_id=f"t0/{i}")
        for i in range(8)
    ]
    assert any(segment.kind == "compaction" for rollout in always for segment in rollout.segments)
    begun = {branch.turn for rollout in always for branch in rollout.branches}
    assert {int(number) for number in np.flatnonzero(seen_in(always)[:, 0])} == {0} | begun


async def one_of_each_worth() -> dict[float | None, ag.Rollout]:
    """Ways of three turns by what they are worth; each turn is one letter of two, as likely: its weight is 1 / 4."""
    played = [await ag.rollout(Path3, next(tasks()), Dice(), seed=i, rollout_id=f"t0/{i}") for i in range(32)]
    return {rollout.reward: rollout for rollout in played if rollout.metrics["turns"] == 3}


async def test_a_reward_of_0_is_one_as_any_other_and_a_rollout_alone_says_nothing() -> None:
    ways = await one_of_each_worth()
    rows = seen_in([ways[0.0], ways[0.4]])
    assert rows[:, 2].tolist() == pytest.approx([2 * turns * 0.25 * 0.4**2 for turns in (3, 2, 1)])
    assert not seen_in([ways[0.4]]).size


async def test_what_a_named_model_samples_is_no_cost_and_no_noise() -> None:
    class Advised(Path3):
        async def step(self, action: Message) -> ag.StepResult:
            async with self.fork("subagent", [Message(role="user", content="?")], engine="adviser") as adviser:
                await adviser.turn()
            return await super().step(action)

    models = {"adviser": Dice()}
    advised = [
        await ag.rollout(Advised, next(tasks()), Dice(), seed=i, rollout_id=f"t0/{i}", models=models) for i in range(2)
    ]
    alone = [await ag.rollout(Path3, next(tasks()), Dice(), seed=i, rollout_id=f"t0/{i}") for i in range(2)]
    assert any(segment.model for segment in advised[0].segments)
    assert seen_in(advised)[0, 1] == seen_in(alone)[0, 1] == sum(rollout.sampled_tokens for rollout in alone)
    assert seen_in(advised)[0, 2] == pytest.approx(seen_in(alone)[0, 2])


def test_branches_of_a_state_in_which_the_rollout_itself_ran_out_of_time_are_none_of_its_turns() -> None:
    class Limited(Path3):
        limits = ag.Limits(seconds=10)

    class Late(Dice):
        """Takes long for the third turn of the rollout itself."""

        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            done = await super().generate(token_ids, session=session, **given)
            await asyncio.sleep(60 if self.asked.count(session) == 3 else 0)
            return done

    async def play() -> ag.Rollout:
        return await ag.rollout(Limited, next(tasks()), Late(), seed=1, branching=Branching(per_state=2))

    late, other = (run_in_virtual_time(play()) for _ in range(2))
    assert (late.stop_reason, late.metrics["turns"]) == ("seconds", 2)
    assert {branch.turn for branch in late.branches} == {1, 2}
    assert seen_in([late, other])[:, 3].tolist() == [0, 2]
