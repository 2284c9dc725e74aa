"""The scheduler: what is started beyond need, cut, carried, replaced or overlapped, and that all of it adds up."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, raw, say
from agentgym.engines.transformers.engine import LocalConfig, LocalEngine
from agentgym.errors import AgentGymError
from agentgym.sandboxes.fake import FakeBoxes
from agentgym.scheduling.accounting import BatchStats, Groups, LifecycleCounts, raise_if_all_failed
from agentgym.scheduling.group_state import GroupSettings
from agentgym.scheduling.oversampling import Oversample, share_of
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import TaskSampler
from agentgym.types import Completion
from benchmarks.virtual import run_in_virtual_time

MODEL = Path(__file__).parents[2] / "recipes" / "checkpoints" / "chase"


def task(number: int) -> ag.Task:
    return ag.Task(id=f"t{number}", prompt=(ag.Message(role="user", content=f"Say {number}."),))


def tasks(count: int = 1 << 20) -> Iterator[ag.Task]:
    return map(task, range(count))


class Say(ag.ToolEnv[ag.Task]):
    """Worth what the model says."""

    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "seen"

    @ag.reward
    def said(self) -> float:
        return float(self.answer or 0)


class Held(Scripted):
    """Plays a script in every rollout, but holds the turns that `holds` (rollout id, turn) names until `let` is set."""

    def __init__(self, holds: Callable[[str, int], bool], *replies: ag.Message) -> None:
        super().__init__(replies or (say("1"),))
        self.holds, self.let = holds, asyncio.Event()
        self.held: set[str] = set()
        self.cancelled: set[str] = set()

    async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
        rollout_id = session.rpartition("/")[0]
        if self.holds(rollout_id, self._played.get(rollout_id, 0)):
            self.held.add(rollout_id)
            try:
                await self.let.wait()
            except asyncio.CancelledError:
                self.cancelled.add(rollout_id)
                raise
            finally:
                self.held.discard(rollout_id)
        return await super().generate(token_ids, session=session, **given)


def ids(groups: Groups) -> list[str]:
    return [group.group_id for group in groups]


def batch_stats(groups: Groups) -> BatchStats:
    assert groups.batch_stats is not None
    return groups.batch_stats


def cut(**settings: Any) -> Oversample:
    return Oversample(**{"stop": "target", **settings})


async def settle() -> None:
    """Whatever can run without an event from outside has run."""
    for _ in range(50):
        await asyncio.sleep(0)


# Settings


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("extra_groups", {"stop": "target", "extra_groups": -1}),
        ("replace", {"replace": -1}),
        ("stop", {"stop": "soon"}),
        ("stop", {"stop": "target"}),
        ("extra_groups", {"extra_groups": 2}),
        ("extra_rollouts", {"extra_rollouts": 2}),
        ("carry", {"carry": 1}),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(field: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        Oversample(**settings)


@pytest.mark.parametrize(
    ("field", "settings", "staleness"),
    [
        ("extra_groups", cut(extra_groups=1), 1),
        ("carry", cut(extra_rollouts=1, carry=1), 1),
        ("stop", Oversample(stop="deadline"), 1),
        ("staleness", Oversample(), -1),
        ("replace", Oversample(replace=1), 0),
    ],
)
def test_settings_that_do_not_fit_the_run_are_refused_by_name(field: str, settings: Any, staleness: int) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        Scheduler(Say, tasks(), Scripted([]), GroupSettings(n=1), oversample=settings, staleness=staleness)


def test_shares_are_rounded_before_they_are_cut() -> None:
    assert [share_of(10, 1 - 0.2), share_of(128, 1 - 0.2)] == [8, 102]
    assert [share_of(10, 1 - 0.9), share_of(1000, 1 - 0.9)] == [1, 100]


def test_counts_that_do_not_add_up_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="counts"):
        LifecycleCounts(started=3, finished=1, dropped=1)
    with pytest.raises(ValueError, match="counts"):
        LifecycleCounts(started=1, finished=2, dropped=-1)


# Cutting


@pytest.mark.parametrize(("wanted", "extra"), [(8, 2), (102, 26)])
async def test_a_batch_stops_at_its_target_and_drops_the_rest(wanted: int, extra: int) -> None:
    stuck = {f"t{i}/0" for i in range(extra)}
    engine = Held(lambda name, turn: name in stuck)
    async with Scheduler(
        Say, tasks(), engine, GroupSettings(n=1, concurrency=200), oversample=cut(extra_groups=extra)
    ) as scheduler:
        groups = await scheduler.collect(wanted)
        assert ids(groups) == [f"t{i}" for i in range(extra, extra + wanted)]
        counts = LifecycleCounts(started=wanted + extra, finished=wanted, dropped=extra)
        assert (batch_stats(groups).rollouts, batch_stats(groups).groups, batch_stats(groups).requests) == (counts,) * 3
        await settle()
        assert engine.cancelled == stuck


async def test_a_group_is_whole_with_its_first_scored_rollouts_and_cancels_the_others() -> None:
    engine = Held(lambda name, turn: name.endswith(("/0", "/3")))
    async with Scheduler(Say, tasks(), engine, GroupSettings(n=3), oversample=cut(extra_rollouts=2)) as scheduler:
        groups = await scheduler.collect(2)
        await settle()
        assert engine.cancelled == {"t0/0", "t0/3", "t1/0", "t1/3"}
    assert [[r.rollout_id[-1] for r in group.rollouts] for group in groups] == [["1", "2", "4"]] * 2
    assert batch_stats(groups).rollouts == LifecycleCounts(started=10, finished=6, dropped=4)


async def test_a_failed_rollout_does_not_make_a_group_whole_where_another_can() -> None:
    class Bad(Say):
        async def setup(self) -> None:
            if next(made) == 0:
                raise ValueError("broken")

    made = iter(range(100))
    async with Scheduler(
        Bad, tasks(), Scripted([say("1")]), GroupSettings(n=2), oversample=cut(extra_rollouts=1)
    ) as scheduler:
        groups = await scheduler.collect(1)
    assert [r.reward for r in groups.rollouts] == [None, 1.0, 1.0]
    assert batch_stats(groups).rollouts == LifecycleCounts(started=3, finished=2, failed=1)


async def test_groups_that_can_not_become_whole_end_the_batch_all_the_same() -> None:
    class Bad(Say):
        async def setup(self) -> None:
            if self.task.id == "t0":
                raise ValueError("broken")

    async with Scheduler(Bad, tasks(), Scripted([say("1")]), GroupSettings(n=2)) as scheduler:
        groups = await scheduler.collect(2)
    assert batch_stats(groups).groups == LifecycleCounts(started=2, finished=1, failed=1)
    assert batch_stats(groups).rollouts == LifecycleCounts(started=4, finished=2, failed=2)


async def test_a_cut_reaches_the_engine_the_tool_and_the_box(boxes: FakeBoxes) -> None:
    in_tool, cancelled, closed = asyncio.Event(), list[str](), list[str]()

    class Boxed(Say):
        sandbox = ag.AnyBox()

        @ag.tool
        async def look(self) -> str:
            """Look for ever."""
            in_tool.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(self.task.id)
                raise
            raise AssertionError

        async def close(self) -> None:
            closed.append(self.task.id)

    class Mixed(Held):
        def _next(self, token_ids: Sequence[int], session: str) -> Any:
            return call("look") if session.startswith("t0") else say("1")

    engine = Mixed(lambda name, turn: name.startswith("t1"))
    async with Scheduler(
        Boxed, tasks(), engine, GroupSettings(n=1), oversample=cut(extra_groups=2), boxes=boxes
    ) as scheduler:
        groups = await scheduler.collect(1)
        await settle()
        assert (ids(groups), cancelled, engine.cancelled) == (["t2"], ["t0"], {"t1/0"})
        assert (boxes.leased, sorted(closed)) == ([], ["t0", "t1", "t2"])
        assert batch_stats(groups).requests == LifecycleCounts(started=3, finished=2, dropped=1)


async def test_a_cut_frees_the_slots_of_the_local_engine() -> None:
    class Chatty(Say):
        limits = ag.Limits(context_tokens=512, turn_tokens=300)

        async def score(self) -> dict[str, float]:
            return {"said": 1.0}

    settings, sampling = cut(extra_groups=3), ag.Sampling(temperature=2.0, max_tokens=300)
    async with (
        LocalEngine(MODEL, LocalConfig(slots=4)) as engine,
        Scheduler(Chatty, tasks(), engine, GroupSettings(n=1, sampling=sampling), oversample=settings) as scheduler,
    ):
        for _ in range(3):
            groups = await scheduler.collect(1)
            counts = batch_stats(groups)
            assert counts.rollouts.dropped == 3
            # A request may have ended in the same tick as the one that made the batch whole.
            assert counts.requests.finished + counts.requests.dropped == 4
            assert counts.requests.finished >= 1
            await settle()
            await engine.score([1, 2], sampling=sampling)  # answered behind what was asked before
            assert not engine._opened().busy


def test_a_deadline_is_half_again_the_time_that_most_took() -> None:
    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep(int(session.split("/")[0][1:]))
            return await super().generate(token_ids, session=session, **given)

    async def play() -> tuple[float, Groups]:
        async with Scheduler(
            Say,
            map(task, (1, 2, 3, 4, 5, 6, 7, 8, 11, 13)),
            Slow([say("1")]),
            GroupSettings(n=1),
            oversample=Oversample(stop="deadline"),
        ) as scheduler:
            groups = await scheduler.collect(10)
            return asyncio.get_running_loop().time(), groups

    seconds, groups = run_in_virtual_time(play())
    assert seconds == pytest.approx(12.0)  # 8 of 10 are done after 8 seconds
    assert batch_stats(groups).rollouts == LifecycleCounts(started=10, finished=9, dropped=1)


def test_the_kept_ones_being_shorter_is_measured() -> None:
    class Uneven(Scripted):
        """Two answer after .4 and 1.2 seconds; the third looks every half second."""

        def _next(self, token_ids: Sequence[int], session: str) -> Any:
            return call("look") if session.startswith("t2/") else say("1")

        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep({"t0": 0.4, "t1": 1.2, "t2": 0.5}[session.split("/")[0]])
            return await super().generate(token_ids, session=session, **given)

    async def play() -> Groups:
        async with Scheduler(Say, tasks(), Uneven([]), GroupSettings(n=1), oversample=cut(extra_groups=1)) as scheduler:
            return await scheduler.collect(2)

    numbers = run_in_virtual_time(play()).metrics()
    look = len('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>') + 1
    assert (numbers["tokens/sampled"], numbers["oversample/dropped_tokens"]) == (2, 2 * look)
    assert numbers["oversample/length_bias"] == pytest.approx(((0.4 + 1.2) / 2) / ((0.4 + 1.2 + 1.2) / 3))


# Carrying over


class Boxed(Say):
    sandbox = ag.AnyBox()


async def test_what_is_cut_goes_on_with_its_box_and_its_segment_under_the_next_policy(boxes: FakeBoxes) -> None:
    engine = Held(lambda name, turn: name == "t0/1" and turn == 1, call("look"), call("look"), say("1"))
    async with Scheduler(
        Boxed, tasks(), engine, GroupSettings(n=2), oversample=cut(extra_groups=1, carry=1), boxes=boxes
    ) as scheduler:
        first = await scheduler.collect(1)
        assert ids(first) == ["t1"]
        assert batch_stats(first).rollouts == LifecycleCounts(started=4, finished=2, carried=2)
        assert batch_stats(first).groups == LifecycleCounts(started=2, finished=1, carried=1)
        assert batch_stats(first).requests == LifecycleCounts(started=11, finished=10, carried=1)
        (box,) = boxes.leased
        engine.let.set()
        await settle()
        assert engine._played["t0/1"] == 2  # the turn in flight has ended; the next one waits at the door
        await engine.load_adapter(None, version=1)
        second = await scheduler.collect(1)
        assert ids(second) == ["t0"]
        assert batch_stats(second).rollouts == LifecycleCounts(started=2, resumed=2, finished=2, carried=2)
        assert box not in boxes.leased
    (segment,) = second.rollouts[1].segments
    assert [v.version for turn in segment.turns for v in turn.versions] == [0, 0, 1]
    assert second.metrics()["staleness/max"] == 1


async def test_a_group_that_has_come_to_the_bound_is_waited_for() -> None:
    engine = Held(lambda name, turn: name == "t0/0")
    async with Scheduler(
        Say, tasks(), engine, GroupSettings(n=1), oversample=cut(extra_groups=1, carry=1)
    ) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t1"]
        await engine.load_adapter(None, version=1)
        second = asyncio.create_task(scheduler.collect(1))
        await settle()
        assert not second.done()
        engine.let.set()
        assert ids(await second) == ["t0"]


async def test_a_group_that_is_older_than_the_bound_is_dropped() -> None:
    engine = Held(lambda name, turn: name == "t0/0")
    async with Scheduler(
        Say, tasks(), engine, GroupSettings(n=1), oversample=cut(extra_groups=1, carry=1)
    ) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t1"]
        await engine.load_adapter(None, version=2)
        second = await scheduler.collect(1)
        assert ids(second) == ["t2"]
        assert batch_stats(second).groups == LifecycleCounts(started=2, resumed=1, finished=1, dropped=1, carried=1)


def test_a_rollouts_time_limit_stands_still_while_it_waits_for_the_next_batch() -> None:
    class Limited(Say):
        limits = ag.Limits(seconds=10)

    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep(4 if session.startswith("t0") else 1)
            return await super().generate(token_ids, session=session, **given)

    async def play() -> Groups:
        engine = Slow([call("look"), say("1")])
        async with Scheduler(
            Limited, tasks(), engine, GroupSettings(n=1), oversample=cut(extra_groups=1, carry=1)
        ) as scheduler:
            await scheduler.collect(1)
            await asyncio.sleep(1000)
            await engine.load_adapter(None, version=1)
            return await scheduler.collect(1)

    groups = run_in_virtual_time(play())
    assert [(r.group_id, r.stop_reason) for r in groups.rollouts] == [("t0", "answer")]


async def test_leaving_cancels_what_is_in_play(boxes: FakeBoxes) -> None:
    engine = Held(lambda name, turn: name == "t0/0")
    async with Scheduler(
        Boxed, tasks(), engine, GroupSettings(n=1), oversample=cut(extra_groups=1, carry=1), boxes=boxes
    ) as scheduler:
        await scheduler.collect(1)
        assert len(boxes.leased) == 1
    assert (boxes.leased, engine.cancelled) == ([], {"t0/0"})


async def test_an_error_of_the_block_comes_out_as_it_is() -> None:
    async def play() -> None:
        async with Scheduler(
            Say, tasks(), Held(lambda name, turn: name != "t0/0"), GroupSettings(n=1), staleness=1
        ) as scheduler:
            await scheduler.collect(1)
            raise KeyError

    with pytest.raises(KeyError):
        await play()


async def test_an_error_of_a_caller_ends_everything_and_comes_out(boxes: FakeBoxes) -> None:
    def refuse(done: ag.Rollout) -> None:
        raise LookupError(done.rollout_id)

    engine = Held(lambda name, turn: name != "t1/0")
    with pytest.raises(ExceptionGroup) as raised:
        async with Scheduler(Boxed, tasks(), engine, GroupSettings(n=1), boxes=boxes, on_rollout=refuse) as scheduler:
            await scheduler.collect(3)
    assert [repr(error) for error in raised.value.exceptions] == ["LookupError('t1/0')"]
    assert (boxes.leased, engine.cancelled) == ([], {"t0/0", "t2/0"})


# Groups without signal


class Signals(Scripted):
    """Tasks with an even number always score 1; the others 0 or 1 by turns."""

    def __init__(self) -> None:
        super().__init__([])

    def _next(self, token_ids: Sequence[int], session: str) -> Any:
        name, index, _ = session.split("/")
        return say(str(int(index) % 2 if int(name[1:]) % 2 else 1))


async def test_groups_without_signal_are_replaced_and_counted() -> None:
    async with Scheduler(Say, tasks(), Signals(), GroupSettings(n=2), oversample=Oversample(replace=10)) as scheduler:
        groups = await scheduler.collect(3)
    assert ids(groups) == ["t1", "t3", "t5"]
    assert batch_stats(groups).groups == LifecycleCounts(started=6, finished=3, dropped=3)
    assert batch_stats(groups).rollouts == LifecycleCounts(started=12, finished=6, dropped=6)
    numbers = groups.metrics()
    assert (numbers["reward"], numbers["oversample/reward_of_all"]) == (0.5, 0.75)
    assert numbers["groups/without_signal_replaced"] == 3


async def test_no_more_groups_are_replaced_than_the_bound_and_the_next_batch_has_a_bound_of_its_own() -> None:
    async with Scheduler(Say, tasks(), Signals(), GroupSettings(n=2), oversample=Oversample(replace=1)) as scheduler:
        first, second = [await scheduler.collect(3) for _ in range(2)]
    assert [batch_stats(g).without_signal for g in (first, second)] == [1, 1]
    assert (ids(first), ids(second)) == (["t1", "t2", "t3"], ["t5", "t6", "t7"])
    assert batch_stats(second).groups == LifecycleCounts(started=4, finished=3, dropped=1)


# Overlap


async def test_no_more_groups_are_accepted_than_the_bound_lets_in_and_a_filtered_one_gives_its_place_back() -> None:
    started: set[str] = set()

    class Watched(Say):
        async def setup(self) -> None:
            started.add(self.task.id)

    class Some(Signals):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            if not session.startswith("t0/"):
                await asyncio.Event().wait()
            return await super().generate(token_ids, session=session, **given)

    for replace, accepted in ((0, 4), (1, 5)):
        started.clear()
        async with Scheduler(
            Watched, tasks(), Some(), GroupSettings(n=2), staleness=1, oversample=Oversample(replace=replace)
        ) as scheduler:
            collecting = asyncio.create_task(scheduler.collect(2))
            await settle()
            assert len(started) == accepted
            collecting.cancel()
            await asyncio.gather(collecting, return_exceptions=True)


async def test_the_next_batch_is_played_while_this_one_is_trained_on() -> None:
    engine = Scripted([say("1")])
    async with Scheduler(Say, tasks(), engine, GroupSettings(n=1), staleness=1) as scheduler:
        first = await scheduler.collect(2)
        await settle()  # training
        await engine.load_adapter(None, version=1)
        second = await scheduler.collect(2)
    assert (ids(first), ids(second)) == (["t0", "t1"], ["t2", "t3"])
    assert {v.version for r in second.rollouts for s in r.segments for t in s.turns for v in t.versions} == {0}
    assert second.metrics()["staleness/max"] == 1


@pytest.mark.parametrize("staleness", [1, 2, 3])
async def test_no_group_is_ever_staler_than_the_bound_and_none_is_lost(staleness: int) -> None:
    dice = random.Random(staleness)

    class Uneven(Scripted):
        async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
            for _ in range(int(dice.paretovariate(0.6)) % 500):
                await asyncio.sleep(0)
            return await super().generate(token_ids, **given)

    engine, seen, stalest = Uneven([call("look"), call("look"), say("1")]), list[str](), 0
    async with Scheduler(Say, tasks(), engine, GroupSettings(n=3), staleness=staleness) as scheduler:
        for version in range(1, 40):
            groups = await scheduler.collect(2)
            versions = [v.version for r in groups.rollouts for s in r.segments for t in s.turns for v in t.versions]
            assert engine.version - min(versions) == groups.metrics()["staleness/max"] <= staleness
            stalest = max(stalest, engine.version - min(versions))
            seen += ids(groups)
            assert (len(groups), batch_stats(groups).rollouts.dropped) == (2, 0)
            for _ in range(dice.randrange(100)):
                await asyncio.sleep(0)
            await engine.load_adapter(None, version=version)
    assert stalest == staleness
    assert len(set(seen)) == len(seen) == 78


async def test_nothing_is_played_ahead_of_the_last_batch() -> None:
    async with Scheduler(Say, tasks(), Scripted([say("1")]), GroupSettings(n=1), staleness=2) as scheduler:
        batches = [await scheduler.collect(2, to_come=to_come) for to_come in (3, 2, 1, 0)]
    assert [batch_stats(groups).rollouts.started for groups in batches] == [6, 2, 0, 0]
    assert [batch_stats(groups).rollouts.carried for groups in batches] == [4, 4, 2, 0]


# Tasks


async def test_a_task_is_not_drawn_again_while_it_is_in_play() -> None:
    engine = Held(lambda name, turn: name == "t0/0" and not engine.let.is_set())
    names = [0, 1, 2, 0, 1, 2]
    async with Scheduler(
        Say, map(task, names), engine, GroupSettings(n=1), oversample=cut(extra_groups=1, carry=5)
    ) as scheduler:
        first, second = [await scheduler.collect(1) for _ in range(2)]
        assert (ids(first), ids(second)) == (["t1"], ["t2"])
        engine.let.set()
        third, fourth = [await scheduler.collect(1) for _ in range(2)]
        assert sorted(ids(third) + ids(fourth)) == ["t0", "t1"]


async def test_more_groups_at_once_than_there_are_tasks_is_an_error() -> None:
    def again() -> Iterator[ag.Task]:
        while True:
            yield from tasks(2)

    async with Scheduler(Say, again(), Scripted([say("1")]), GroupSettings(n=1)) as scheduler:
        with pytest.raises(ValueError, match=r"^tasks: all of them are in play \(2\)"):
            await scheduler.collect(3)


async def test_where_the_tasks_run_out_the_batch_is_smaller() -> None:
    async with Scheduler(Say, tasks(3), Scripted([say("1")]), GroupSettings(n=1)) as scheduler:
        assert [len(await scheduler.collect(2)) for _ in range(3)] == [2, 1, 0]


# Everything at once


class Faulty(Held):
    """Tools, faults and waits by the dice."""

    def __init__(self, seed: int) -> None:
        super().__init__(lambda name, turn: False)
        self.dice = random.Random(seed)

    def _next(self, token_ids: Sequence[int], session: str) -> Any:
        return self.dice.choice([call("look"), call("lok"), raw("<tool_call>\n{"), say("0"), say("1"), say("1")])

    async def generate(self, token_ids: Sequence[int], **given: Any) -> Completion:
        for _ in range(int(self.dice.paretovariate(0.7)) % 300):
            await asyncio.sleep(0)
        if self.dice.random() < 0.05:
            raise ConnectionError("gone")
        return await super().generate(token_ids, **given)


SETTINGS = {
    "all": (Oversample(), 0),
    "target": (cut(extra_groups=3, extra_rollouts=2), 0),
    "carry": (cut(extra_groups=3, extra_rollouts=1, carry=2), 0),
    "replace": (cut(extra_groups=2, carry=1, replace=4), 0),
    "stale": (Oversample(replace=3), 2),
}


@pytest.mark.parametrize("name", SETTINGS)
async def test_under_faults_everything_that_was_started_is_in_one_count(name: str, boxes: FakeBoxes) -> None:
    settings, staleness = SETTINGS[name]
    engine, seen = Faulty(7), list[str]()
    async with Scheduler(
        Boxed,
        tasks(),
        engine,
        GroupSettings(n=4, concurrency=16),
        oversample=settings,
        staleness=staleness,
        boxes=boxes,
    ) as scheduler:
        totals: dict[str, int] = {}
        for version in range(1, 25):
            groups = await scheduler.collect(4)
            seen += ids(groups)
            for kind in ("rollouts", "groups", "requests"):
                counts = getattr(batch_stats(groups), kind)
                for field in ("started", "finished", "dropped", "failed"):
                    totals[f"{kind} {field}"] = totals.get(f"{kind} {field}", 0) + getattr(counts, field)
                totals[f"{kind} carried"] = counts.carried
            finished = sum(len(group.scored) for group in groups)
            assert batch_stats(groups).rollouts.finished == finished
            assert batch_stats(groups).rollouts.failed == len(groups.rollouts) - finished
            await engine.load_adapter(None, version=version)
        for kind in ("rollouts", "groups", "requests"):
            ended = [totals[f"{kind} {field}"] for field in ("finished", "dropped", "failed", "carried")]
            assert totals[f"{kind} started"] == sum(ended) > 0
    assert len(set(seen)) == len(seen) >= 96
    assert boxes.leased == []


# Going on in another process


def resumed(state: dict[str, Any]) -> TaskSampler[ag.Task]:
    """The sampler of another process, from a state that was written to a file and read again."""
    sampler = TaskSampler(tasks())
    sampler.load_state_dict([json.loads(json.dumps(state))])
    return sampler


async def test_what_was_carried_when_a_run_stopped_is_dropped_by_the_next_one_and_its_tasks_are_played() -> None:
    engine = Held(lambda name, turn: name.startswith(("t1/", "t3/")))
    settings = cut(extra_groups=2, carry=5)
    async with Scheduler(Say, tasks(), engine, GroupSettings(n=2), oversample=settings) as scheduler:
        first = await scheduler.collect(2)
        state = scheduler.state_dict()
    assert (batch_stats(first).groups.carried, batch_stats(first).requests.carried) == (2, 4)
    assert (state["drawn"], state["unplayed"], state["batches"]) == (4, [1, 3], 1)
    async with Scheduler(
        Say, resumed(state), Scripted([say("1")]), GroupSettings(n=2), oversample=settings
    ) as scheduler:
        second = await scheduler.collect(2)
        third = await scheduler.collect(2)
    assert ids(second) == ["t1", "t3"]
    assert batch_stats(second).groups == LifecycleCounts(resumed=2, dropped=2, started=4, finished=2, carried=2)
    assert batch_stats(second).rollouts == LifecycleCounts(resumed=4, dropped=4, started=8, finished=4, carried=4)
    assert (batch_stats(second).requests.resumed, batch_stats(second).requests.dropped) == (4, 4)
    assert batch_stats(third).groups.resumed == 2
    assert batch_stats(third).groups.dropped == 0


async def test_what_was_played_ahead_when_a_run_stopped_is_counted_as_started_and_dropped() -> None:
    async with Scheduler(Say, tasks(), Scripted([say("1")]), GroupSettings(n=2), staleness=1) as scheduler:
        first = await scheduler.collect(3)
        await settle()
        state = scheduler.state_dict()
    assert batch_stats(first).groups.carried == 3
    assert state["in_play"]["tokens"] > 0
    async with Scheduler(Say, resumed(state), Scripted([say("1")]), GroupSettings(n=2), staleness=1) as scheduler:
        second = batch_stats(await scheduler.collect(3))
    assert second.groups.resumed + second.groups.started == 3 + 6
    assert (second.groups.finished, second.groups.dropped, second.groups.carried) == (3, 3, 3)
    assert second.dropped_tokens == state["in_play"]["tokens"]


async def test_the_draws_of_a_run_that_goes_on_are_those_of_one_that_did_not_stop() -> None:
    seeds: list[int | None] = []

    class Seeded(Say):
        async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(seed)
            return await super().reset(seed=seed, options=options)

    async with Scheduler(Seeded, tasks(), Scripted([say("1")]), GroupSettings(n=1, seed=5)) as scheduler:
        await scheduler.collect(2)
        state = scheduler.state_dict()
        await scheduler.collect(2)
    async with Scheduler(Seeded, resumed(state), Scripted([say("1")]), GroupSettings(n=1, seed=5)) as scheduler:
        await scheduler.collect(2)
    assert seeds == [5, 5, 6, 6, 6, 6]


# Cancelling


class Stubborn(Say):
    """Its rollouts, but for task t0, end only when they are let go, although they were cancelled."""

    let: asyncio.Event
    closing: set[str]

    async def close(self) -> None:
        if self.task.id != "t0":
            self.closing.add(self.task.id)
            try:
                await self.let.wait()
            except asyncio.CancelledError:
                await self.let.wait()


def stubborn() -> type[Stubborn]:
    return type("Stubborn", (Stubborn,), {"let": asyncio.Event(), "closing": set()})


async def test_a_rollout_that_ends_while_it_is_being_cancelled_does_not_count() -> None:
    env, seen = stubborn(), list[str]()
    engine = Scripted([say("1")])
    async with Scheduler(
        env,
        tasks(),
        engine,
        GroupSettings(n=1),
        oversample=cut(extra_groups=1),
        on_rollout=lambda done: seen.append(done.rollout_id),
    ) as scheduler:
        groups = await scheduler.collect(1)
        env.let.set()
        await settle()
        assert (ids(groups), seen, env.closing) == (["t0"], ["t0/0"], {"t1"})
        assert batch_stats(groups).rollouts == LifecycleCounts(started=2, finished=1, dropped=1)


async def test_a_task_is_not_drawn_again_while_its_cancelled_rollout_closes() -> None:
    env = stubborn()
    names = map(task, [0, 1, 1, 2, 3])
    async with Scheduler(
        env, names, Scripted([say("1")]), GroupSettings(n=1), oversample=cut(extra_groups=1)
    ) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t0"]
        second = asyncio.create_task(scheduler.collect(1))
        await settle()
        assert [group.task.id for group in scheduler._groups] == ["t2", "t3"]  # t1 still closes
        env.let.set()
        assert ids(await second) == ["t2"]


async def test_a_turn_of_a_dropped_rollout_is_not_asked_of_the_engine() -> None:
    asked: list[str] = []

    class Spy(Held):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            asked.append(session)
            return await super().generate(token_ids, session=session, **given)

    class Deaf(Say):
        """Does not hear that it was cancelled in its tool."""

        @ag.tool
        async def look(self) -> str:
            """Look until somebody cancels."""
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                async with self.fork("subagent", [ag.Message(role="user", content="?")]) as agent:
                    await agent.run()
            return "seen"

    class Mixed(Spy):
        def _next(self, token_ids: Sequence[int], session: str) -> Any:
            return call("look") if session.startswith("t0") else say("1")

    engine = Mixed(lambda name, turn: False)
    async with Scheduler(Deaf, tasks(), engine, GroupSettings(n=1), oversample=cut(extra_groups=1)) as scheduler:
        groups = await scheduler.collect(1)
        await settle()
    assert (ids(groups), asked) == (["t1"], ["t0/0/0", "t1/0/0"])
    assert batch_stats(groups).requests == LifecycleCounts(started=2, finished=2)


def test_the_time_at_the_shut_door_is_no_time_of_play() -> None:
    class Slow(Scripted):
        async def generate(self, token_ids: Sequence[int], *, session: str, **given: Any) -> Completion:
            await asyncio.sleep(4 if session.startswith("t0") else 1)
            return await super().generate(token_ids, session=session, **given)

    async def play() -> Groups:
        engine = Slow([call("look"), say("1")])
        async with Scheduler(
            Say, tasks(), engine, GroupSettings(n=1), oversample=cut(extra_groups=1, carry=1)
        ) as scheduler:
            await scheduler.collect(1)
            await asyncio.sleep(1000)
            await engine.load_adapter(None, version=1)
            return await scheduler.collect(1)

    groups = run_in_virtual_time(play())
    assert ids(groups) == ["t0"]
    assert batch_stats(groups).kept_s == pytest.approx(8.0)


async def test_more_groups_come_than_were_wanted_where_they_would_be_too_old_for_the_next_batch() -> None:
    engine = Held(lambda name, turn: False)
    async with Scheduler(Say, tasks(), engine, GroupSettings(n=1), staleness=2) as scheduler:
        assert ids(await scheduler.collect(1)) == ["t0"]
        await settle()  # two more are ready, sampled under version 0
        await engine.load_adapter(None, version=2)
        second = await scheduler.collect(1)
    assert ids(second) == ["t1", "t2"]
    assert second.metrics()["staleness/max"] == 2


async def test_a_batch_in_which_all_fail_is_left_to_the_caller_to_judge() -> None:
    class Bad(Say):
        async def setup(self) -> None:
            raise ValueError("broken")

    async with Scheduler(Bad, tasks(), Scripted([]), GroupSettings(n=2)) as scheduler:
        groups = await scheduler.collect(1)
    assert batch_stats(groups).rollouts == LifecycleCounts(started=2, failed=2)
    with pytest.raises(AgentGymError, match=r"^all 2 rollouts failed; the first one: EnvError: Bad.setup: ValueError"):
        raise_if_all_failed(groups)
    raise_if_all_failed(Groups([]))
