"""What a run, an evaluation and a game leave to chance, given the seeds that engines and envs get."""

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say
from agentgym.environments import GameTask
from agentgym.evals.kept import SUMMARY
from agentgym.evals.rescore import rescore
from agentgym.scheduling import run_groups
from agentgym.scheduling.oversampling import OversampleConfig
from agentgym.scheduling.run_groups import play_groups
from agentgym.scheduling.schedule import Schedule
from agentgym.scheduling.scheduler import Scheduler
from agentgym.scheduling.task_sampler import Sharding, TaskSampler
from agentgym.store.run_settings import SETTINGS, begun_eval_seed
from agentgym.store.writer import RolloutWriter
from agentgym.types.completion import Completion
from agentgym.types.messages import Message

RESETS: list[tuple[str, int]] = []
"""The task and the seed of each reset."""


@dataclass
class Recorder:
    """An engine that records the session and the seed of each request."""

    inner: Any
    asked: list[tuple[str, int]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, *values: Any, session: str, seed: int, **named: Any) -> Completion:
        self.asked.append((session, seed))
        completion: Completion = await self.inner.generate(*values, session=session, seed=seed, **named)
        return completion


JUDGE, SPEAKER = Recorder(Scripted(lambda text: say("yes"))), Scripted(lambda text: say("x"))


class Chances(ag.ToolEnv[ag.Task]):
    """Uses randomness of every kind: its own, the policy's, a sub-agent's and a model role's."""

    limits = ag.Limits(turns=3, turn_tokens=4)
    fallback_models = {"judge": JUDGE}  # noqa: RUF012

    @classmethod
    def tasks(cls, split: ag.Split) -> list[ag.Task]:
        return [ag.Task(id=f"{split}{number}", prompt="say") for number in range(2)]

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[Message], dict[str, Any]]:
        assert seed is not None
        RESETS.append((self.task.id, seed))
        return await super().reset(seed=seed, options=options)

    async def step(self, action: Message) -> ag.StepResult:
        async with self.fork("subagent", [Message(role="user", content="and you?")], turns=1) as other:
            await other.turn()
        await self.model("judge").ask("well?")
        return ag.StepResult([Message(role="user", content="more")], 0.0, False, False, {})

    async def score(self) -> dict[str, float]:
        return {"calls": float(self.model("judge").calls)}


class Judged(Chances):
    """Also has a group reward that asks a model."""

    @classmethod
    async def group_reward(cls, task: ag.Task, rollouts: Any, models: Any) -> list[float]:
        await models("judge").ask("all?")
        return [0.0] * len(rollouts)


@dataclass(frozen=True)
class Seen:
    """A run's requests to the policy's and the judge's engine, its resets, and its folder."""

    folder: Path
    asked: list[tuple[str, int]]
    resets: list[tuple[str, int]]

    def of(self, split: str) -> list[int]:
        """Return the seeds of all requests for a split's tasks."""
        return [seed for session, seed in self.asked if session.startswith(split)]

    def resets_of(self, split: str) -> list[tuple[str, int]]:
        return [(task, seed) for task, seed in self.resets if task.startswith(split)]


RUN = ag.RunConfig(
    recipe="seeds",
    env=f"{__name__}:Chances",
    model="tiny",
    max_steps=2,
    prompts_per_step=2,
    group_size=2,
    eval_tasks=2,
    eval_rollouts=2,
    eval_every=1,
    credit="branches",
    train=ag.TrainConfig(device="cpu", lr=0.0),
)


async def played(folder: Path) -> list[Seen]:
    found = []
    async with ag.TransformersEngine("tiny", ag.TransformersConfig(slots=8, device="cpu")) as engine:
        for seed in (0, 1):
            RESETS.clear()
            JUDGE.asked.clear()
            recorder, run = Recorder(engine), replace(RUN, seed=seed, output_dir=folder / str(seed))
            await engine.load_adapter(None, version=0)
            await ag.train_policy(run, engine=recorder)
            found.append(Seen(folder / str(seed), [*recorder.asked, *JUDGE.asked], [*RESETS]))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    """Complete two runs of neighboring seeds, with groups, branches, sub-agents, a model role and evaluations."""
    return asyncio.run(played(tmp_path_factory.mktemp("runs")))


async def test_no_two_training_requests_share_a_seed(runs: list[Seen]) -> None:
    for run in runs:
        sessions = {session for session, _ in run.asked if session.startswith("train")}
        assert any("+" in session for session in sessions)  # a branch's session
        assert any("model.judge" in session for session in sessions)
        assert len(run.of("train")) > 20
        assert max(Counter(run.of("train")).values()) == 1
        assert not set(run.of("train")) & set(run.of("test"))


async def test_neighboring_runs_share_no_seed(runs: list[Seen]) -> None:
    one, other = ({seed for _, seed in [*run.asked, *run.resets]} for run in runs)
    assert not one & other


async def test_a_groups_rollouts_share_their_env_seed_and_groups_do_not(runs: list[Seen]) -> None:
    for run in runs:
        shared = Counter(run.resets_of("train"))
        assert len(shared) == RUN.max_steps * RUN.prompts_per_step
        assert set(shared.values()) == {RUN.group_size}
        assert len({seed for _, seed in shared}) == len(shared)


async def test_each_attempt_of_an_evaluation_has_a_different_env_seed(runs: list[Seen]) -> None:
    for run in runs:
        assert len({seed for _, seed in run.resets_of("test")}) == RUN.eval_tasks * RUN.eval_rollouts


async def test_all_evaluations_of_a_run_use_the_same_seeds(runs: list[Seen]) -> None:
    for run in runs:
        assert set(Counter(run.resets_of("test")).values()) == {3}
        # The policy never changes (lr 0), so all three evaluations send the same requests.
        assert set(Counter(run.of("test")).values()) == {3}


async def test_an_evaluation_with_the_stored_eval_seed_gets_the_same_env_seeds(
    runs: list[Seen], tmp_path: Path
) -> None:
    for seed, run in enumerate(runs):
        said = json.loads((run.folder / SUMMARY).read_text())
        assert (said["seed"], said["eval_seed"]) == (seed, replace(RUN, seed=seed).held_out_seed)
        assert begun_eval_seed(run.folder) == said["eval_seed"]
        RESETS.clear()
        out = tmp_path / str(seed)
        await ag.evaluate(Chances, SPEAKER, n=2, k=2, seed=said["eval_seed"], output_dir=out)
        assert set(RESETS) == set(run.resets_of("test"))
        assert json.loads((out / SUMMARY).read_text())["seed"] == begun_eval_seed(out) == said["eval_seed"]


def test_eval_seed_sets_the_evaluation_seed_whatever_the_runs_seed_is() -> None:
    assert {replace(RUN, seed=seed, eval_seed=7).held_out_seed for seed in range(3)} == {7}
    assert len({replace(RUN, seed=seed).held_out_seed for seed in range(100)}) == 100
    with pytest.raises(ValueError, match="eval_seed"):
        replace(RUN, eval_seed=-1)


async def test_a_comparison_says_whether_both_sides_had_the_same_seeds(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        await ag.evaluate(Chances, SPEAKER, n=2, seed=seed, output_dir=tmp_path / name)
    alike = ag.compare(tmp_path / "one", tmp_path / "same")
    assert (alike.seeds, alike.luck) == ((3, 3), "seed 3 in both")
    found = ag.compare(tmp_path / "one", tmp_path / "other")
    assert (found.seeds, found.luck) == ((3, 4), "seeds 3 and 4: tasks are paired, but random draws are not")
    content = json.loads((tmp_path / "one" / SETTINGS).read_text())
    del content["seeds"]
    (tmp_path / "one" / SETTINGS).write_text(json.dumps(content))
    assert ag.compare(tmp_path / "one", tmp_path / "same").luck == (
        "seeds unknown and 3: tasks are paired, but random draws are not"
    )


async def test_evaluations_and_runs_with_another_seed_derivation_are_not_resumed(
    runs: list[Seen], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"n": 2, "output_dir": tmp_path / "old"}
    await ag.evaluate(Chances, SPEAKER, **given)
    for folder in (tmp_path / "old", runs[0].folder):
        content = json.loads((folder / SETTINGS).read_text())
        content["seeds"]["derivation"] = 1
        (folder / SETTINGS).write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"^resume: .*old was started by an agentgym version that derives seeds differently"
    ):
        await ag.evaluate(Chances, SPEAKER, resume=True, **given)
    with pytest.raises(
        ValueError, match=r"^resume: .* was started by an agentgym version that derives seeds differently"
    ):
        await ag.train_policy(replace(RUN, max_steps=3, resume=runs[0].folder))


async def test_group_rewards_and_rollout_rewards_ask_a_judge_with_different_seeds() -> None:
    tasks = [ag.Task(id=name, prompt="say") for name in ("a", "b")]
    JUDGE.asked.clear()
    await ag.evaluate(Judged, SPEAKER, tasks=tasks, k=2)
    await run_groups(Judged, tasks, SPEAKER, n=2)
    assert sum("group_reward" in session for session, _ in JUDGE.asked) == 4
    assert max(Counter(seed for _, seed in JUDGE.asked).values()) == 1


async def test_a_rescores_judge_has_a_different_seed_for_each_rollout_of_each_step(tmp_path: Path) -> None:
    groups = [await run_groups(Judged, Judged.tasks("train"), SPEAKER, n=2, seed=seed) for seed in (0, 1)]
    with RolloutWriter(tmp_path / "run") as store:
        for step, played in enumerate(groups):
            store.add(list(played), phase="train", step=step)
    JUDGE.asked.clear()
    await rescore(tmp_path / "run", Judged, tmp_path / "again")
    assert len(JUDGE.asked) == 4  # one per group
    assert max(Counter(seed for _, seed in JUDGE.asked).values()) == 1


async def test_a_repeated_task_gets_new_seeds_even_within_a_batch() -> None:
    RESETS.clear()
    tasks = (ag.Task(id=f"{number % 2}", prompt="say") for number in range(64))
    schedule = Schedule(group_size=2, seed=3, oversample=OversampleConfig(replace=3))
    async with Scheduler(Chances, tasks, SPEAKER, schedule) as scheduler:
        batches = [await scheduler.collect(1) for _ in range(3)]
    assert sum(len(batch) for batch in batches) == 3
    assert len(RESETS) > 6  # groups without a signal were replaced
    assert set(Counter(RESETS).values()) == {2}
    assert len({seed for _, seed in RESETS}) == len(RESETS) / 2


@pytest.mark.parametrize("same_instance", [True, False])
async def test_a_subset_of_tasks_gets_the_same_seeds_as_within_all_tasks(same_instance: bool) -> None:
    tasks = [ag.Task(id=f"{number}", prompt="say") for number in range(5)]
    found = []
    for shares in ([tasks], [tasks[0::2], tasks[1::2]]):
        RESETS.clear()
        for share in shares:
            await play_groups(Chances, share, SPEAKER, Schedule(group_size=2, seed=3, same_instance=same_instance))
        found.append(set(RESETS))
    assert found[0] == found[1]
    assert len(found[0]) == (5 if same_instance else 10)


async def test_a_runs_batches_have_the_same_seeds_on_any_number_of_processes() -> None:
    found = []
    for world in (1, 2):
        RESETS.clear()
        for rank in range(world):
            sharding = Sharding(prompts=2, rank=rank, world=world)
            sampler: TaskSampler[ag.Task] = TaskSampler.for_training(Chances, sharding, seed=3)
            async with Scheduler(Chances, sampler, SPEAKER, Schedule(group_size=2, seed=3)) as scheduler:
                for _ in range(3):
                    await scheduler.collect(sharding.share)
        found.append(sorted(RESETS))
    assert found[0] == found[1]
    assert len(set(found[0])) == 6  # three rounds of two tasks


class Dice(ag.Game):
    """A game in which the opponent and a die say a number; the model's move ends it."""

    rules = "Roll."

    def start(self, seed: int) -> None:
        self.begun, self.rolls, self.over = seed, list[str](), False

    def play(self, action: str, player: int) -> None:
        self.rolls.append(f"{action} {self.luck.random()}")
        self.over = player == self.task.seat

    def observe(self, player: int) -> str:
        return ", ".join(self.rolls)

    def to_move(self) -> int | None:
        return None if self.over else len(self.rolls) % 2

    def returns(self) -> list[float]:
        return [0.0, 0.0]

    def opponent(self, observation: str, rng: Any) -> str:
        return str(rng.random())


async def test_attempts_at_a_game_differ_in_opponent_and_dice_and_groups_do_not() -> None:
    task, engine = GameTask(id="g", prompt="Roll.", seed=4, seat=1), Scripted([call("move", action="roll")])
    apart = await ag.evaluate(Dice, engine, tasks=[task], k=8)
    together = await run_groups(Dice, [task], engine, n=8)
    said = [[_said(rollout) for rollout in played.rollouts] for played in (apart, together)]
    assert [len({tuple(words) for words in of}) for of in said] == [8, 1]
    opponents, dice, _, later = zip(*said[0], strict=True)
    assert [len(set(each)) for each in (opponents, dice, later)] == [8, 8, 8]


def _said(rollout: ag.Rollout) -> list[str]:
    """Return the words of the opponent and the die, and of the model and the die."""
    return str(rollout.segments[0].turns[0].env_messages[0]["content"]).replace(",", "").split()
