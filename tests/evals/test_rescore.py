"""Recomputed rewards: they stay the same if nothing changed; state that only a live rollout has is refused by name."""

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentgym as ag
from agentgym.cli import main as cli
from agentgym.engines.scripted import Scripted, call, say
from agentgym.errors import EnvError, Failure
from agentgym.evals.rescore import rescore
from agentgym.store.reader import RolloutStore
from agentgym.store.writer import RolloutWriter
from agentgym.types.completion import Completion
from agentgym.types.rollout import Group, Rollout
from tests.store.test_store import same


class Word(ag.Task):
    """Asks for a word."""

    word: str


class Words(ag.ToolEnv[Word]):
    """Rewards the word, and at half weight short answers and tool calls; a group's longest answer gets a bonus."""

    bonus: ClassVar[float] = 0.5
    context = ag.Compact(at=None, turns=1)

    @classmethod
    def tasks(cls, split: str) -> list[Word]:
        return [Word(id=str(i), prompt=f"Say {word}.", word=word) for i, word in enumerate(["moon", "noon", "soon"])]

    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "nothing"

    @ag.reward
    def right(self) -> float:
        return float(self.answer == self.task.word)

    @ag.reward(weight=0.5)
    async def short(self) -> float:
        return float(len(self.answer or "") < 5) + self.metrics["tool_calls"]

    @classmethod
    async def group_reward(cls, task: Word, rollouts: Any, model: Any) -> list[float]:
        longest = max(len(played.messages[-1]["content"]) for played in rollouts)
        return [cls.bonus * (len(played.messages[-1]["content"]) == longest) for played in rollouts]


class Lenient(Words):
    """Accepts any word with the same last three letters."""

    bonus = 0.0

    @ag.reward
    def right(self) -> float:
        return float((self.answer or "").endswith(self.task.word[-3:]))


def answers(text: str) -> ag.Message:
    if "Say noon" not in text:
        return say("moon" if "Say moon" in text else "a moon")
    if "Summarise" in text:
        return say("seen")
    return say("noon") if "seen" in text else call("look")


async def played_in(folder: Path) -> Path:
    await ag.evaluate(Words, Scripted(answers), k=2, output_dir=folder / "played")
    return folder / "played"


def stored(folder: Path) -> dict[str, Rollout]:
    with RolloutStore(folder) as store:
        return {found.rollout.rollout_id: found.rollout for found in store.find()}


async def test_unchanged_rewards_are_recomputed_as_they_were(tmp_path: Path) -> None:
    played = await played_in(tmp_path)
    done = await rescore(played, Words, tmp_path / "again")
    assert (done.rollouts, done.reward.changed, done.kept, done.failures) == (6, 0, 0, [])
    assert len({rollout.reward for rollout in stored(played).values()}) > 1
    assert all(same(stored(tmp_path / "again")[name], rollout) for name, rollout in stored(played).items())


async def test_a_rescore_copies_the_token_bytes(tmp_path: Path) -> None:
    played = await played_in(tmp_path)
    await rescore(played, Words, tmp_path / "again")
    with RolloutStore(played) as before, RolloutStore(tmp_path / "again") as after:
        assert before.token_bytes("", range(300)) == after.token_bytes("", range(300))
        assert after.token_bytes("", [ord("n"), 256]) == {ord("n"): b"n", 256: b"<|im_start|>"}


async def test_changed_rewards_are_reported_and_stored_next_to_the_old_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played = await played_in(tmp_path)
    before = stored(played)
    assert (
        await asyncio.to_thread(
            cli.main, ["rescore", str(played), "--env", f"{__file__}:Lenient", "--output-dir", str(tmp_path / "new")]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["reward", "1.667", "before,", "1.500", "after,", "6", "of", "6", "changed"]
    assert lines[1].split() == ["right", "0.667", "before,", "1.000", "after,", "2", "of", "6", "changed"]
    assert lines[2].split()[-5:] == ["after,", "0", "of", "6", "changed"]
    assert lines[3].split()[0] == "group_reward"
    assert lines[4].split() == ["rollouts", "6,", "6", "of", "them", "rescored"]
    assert {name: same(rollout, before[name]) for name, rollout in stored(played).items()} == dict.fromkeys(
        before, True
    )
    assert ag.compare(played, tmp_path / "new").difference == pytest.approx(-1 / 6)
    assert await asyncio.to_thread(cli.main, ["show", str(tmp_path / "new")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("env Lenient: ")
    assert said[1] == f"rescored from {played}"
    assert json.loads((tmp_path / "new/settings.json").read_text())["env"].endswith(":Words")


async def test_a_failed_rollout_stays_unscored_and_a_raising_reward_removes_the_score(
    tmp_path: Path,
) -> None:
    played = stored(await played_in(tmp_path))
    (tmp_path / "mixed").mkdir()
    failed = replace(played["0/0"], reward=None, failure=Failure(type="EnvError", message="m"), rewards={})
    with RolloutWriter(tmp_path / "mixed") as writer:
        for rollout, task in (
            (failed, Words.tasks("test")[0]),
            (played["1/0"], Words.tasks("test")[1]),
            (played["2/0"], Words.tasks("test")[2]),
        ):
            writer.add([Group(group_id=task.id, rollouts=(rollout,), task=task)], phase="train", step=3)

    class Raising(Words):
        @ag.reward
        def right(self) -> float:
            return 1 / len(self.task.word.removeprefix("soon"))

    done = await rescore(tmp_path / "mixed", Raising, tmp_path / "again")
    assert (done.rollouts, done.kept, len(done.reward.after)) == (3, 1, 1)
    assert "reward 'right' raised ZeroDivisionError" in done.failures[0]
    again = stored(tmp_path / "again")
    assert same(again["0/0"], failed)
    assert again["2/0"].failure is not None
    with RolloutStore(tmp_path / "again") as store:
        assert [(row.phase, row.step) for row in store.summaries()] == [("train", 3)] * 3


class Counting(Words):
    """Counts its looks in an attribute."""

    looks = 0

    @ag.tool
    async def look(self) -> str:
        """Look."""
        self.looks += 1
        return "nothing"

    @ag.reward
    def few(self) -> float:
        return float(self.looks < 1)


class InSetup(Words):
    async def setup(self) -> None:
        self.letters = list(self.task.word)

    @ag.reward
    def few(self) -> float:
        try:
            return float(len(self.letters))
        except Exception:
            return 0.0


class InInit(Words):
    def __init__(self, task: Word) -> None:
        super().__init__(task)
        self.seen: list[str] = []

    @ag.reward
    async def few(self) -> float:
        return float(len(self.seen))


class InBox(Words):
    sandbox_spec = ag.AnySandbox()

    @ag.reward
    async def few(self) -> float:
        return float(len((await self.sandbox.python("1")).text()))


class Answers(Words):
    async def step(self, action: ag.Message) -> ag.StepResult:
        self.answer = action["content"]
        return await super().step(action)


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (Counting, r"^Counting: reward 'few' reads self\.looks, which is only set while the env runs; define `def"),
        (InSetup, r"^InSetup: reward 'few' reads self\.letters, "),
        (InInit, r"^InInit: reward 'few' reads self\.seen, "),
        (InBox, r"^InBox: reward 'few' reads self\.sandbox, but a rollout's sandbox is gone"),
        (Answers, r"^Answers: reward 'right' reads self\.answer, "),
    ],
)
async def test_a_reward_that_reads_live_state_is_refused_by_name(tmp_path: Path, env: type[Words], told: str) -> None:
    played = await played_in(tmp_path)
    with pytest.raises(EnvError, match=told):
        await rescore(played, env, tmp_path / "again")
    assert os.listdir(tmp_path) == ["played"]  # noqa: PTH208


async def test_restore_played_can_restore_the_state_that_rewards_read(tmp_path: Path) -> None:
    class Restored(Counting):
        def restore_played(self, rollout: Rollout) -> None:
            self.looks = sum(len(message.get("tool_calls", ())) for message in rollout.messages)

    await ag.evaluate(Restored, Scripted(answers), output_dir=tmp_path / "played")
    done = await rescore(tmp_path / "played", Restored, tmp_path / "again")
    assert (done.rollouts, done.reward.changed) == (3, 0)
    assert set(done.rewards["few"].after) == {0.0, 1.0}


async def test_a_rescore_draws_from_the_seed_of_the_original_rollouts(tmp_path: Path) -> None:
    class Noted(Scripted):
        def __init__(self) -> None:
            super().__init__(lambda text: say("1"))
            self.seeds: list[int] = []

        async def generate(self, token_ids: Sequence[int], *, seed: int = 0, **given: Any) -> Completion:
            self.seeds.append(seed)
            return await super().generate(token_ids, seed=seed, **given)

    class Judged(Words):
        @ag.reward
        async def judged(self) -> float:
            return float(await self.model("judge").ask("How good?"))

    settings = (await played_in(tmp_path)) / "settings.json"
    begun, asked = json.loads(settings.read_text()), []
    for number, seed in enumerate((0, 0, 1)):
        settings.write_text(json.dumps(begun | {"seed": seed}))
        judge = Noted()
        await rescore(settings.parent, Judged, tmp_path / f"{number}", models={"judge": judge})
        asked.append(set(judge.seeds))
    assert asked[0] == asked[1]
    assert len(asked[0]) == 6
    assert not asked[0] & asked[2]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (5, "names no env; name one with --env"),
        (None, "names no env; name one with --env"),
        ([1, 2], "names no env; name one with --env"),
        ({"chase": "x"}, "names no env; name one with --env"),
        ("x" * 100_000 + ".py:X", "env: there is no file x"),
        ("x" * 100_000, "there is no environment 'x"),
        ("a\0b", "there is no environment 'a\\x00b'"),
        ("\ud800", "there is no environment '\\ud800'"),
    ],
    ids=lambda value: f"{value!r:.20}",
)
async def test_settings_without_an_env_give_an_error_message(
    env: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (await played_in(tmp_path)) / "settings.json"
    settings.write_text(json.dumps({"env": env}))
    assert await asyncio.to_thread(cli.main, ["rescore", str(settings.parent)]) == 1
    said = capsys.readouterr().err
    assert (told in said, said.count("\n"), len(said) < 1000) == (True, 1, True), said[:1000]


async def test_a_rescore_does_not_follow_a_link_at_its_path(tmp_path: Path) -> None:
    played = await played_in(tmp_path)
    (tmp_path / "taken").symlink_to("nothing")
    with pytest.raises(ValueError, match="taken already exists"):
        await rescore(played, Words, tmp_path / "taken")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new.part").symlink_to("elsewhere")
    await rescore(played, Words, tmp_path / "new")
    assert list((tmp_path / "elsewhere").iterdir()) == []


async def test_rollouts_that_cannot_be_rescored_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Steps(ag.Env[Word]):
        pass

    played = await played_in(tmp_path)
    with pytest.raises(EnvError, match="Steps: can't be rescored, since all of its rewards come from its steps"):
        await rescore(played, Steps, tmp_path / "again")
    with pytest.raises(ValueError, match=r"output_dir: .* already exists"):
        await rescore(played, Words, played)
    refused = {
        ("--phase", "train"): "--phase: no rollout has the phase 'train'; the phases are: eval",
        ("--step", "9"): "run: there are no rollouts of this phase and step",
        ("--env", "nothing"): "there is no environment 'nothing'",
        ("--concurrency", "0"): "--concurrency: must be at least 1",
    }
    for words, told in refused.items():
        assert await asyncio.to_thread(cli.main, ["rescore", str(played), *words]) == 1
        assert capsys.readouterr().err.startswith(f"agentgym: {told}")
    (played / "settings.json").unlink()
    assert await asyncio.to_thread(cli.main, ["rescore", str(played)]) == 1
    assert "names no env; name one with --env" in capsys.readouterr().err
