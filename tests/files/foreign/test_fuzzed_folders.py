"""Random changes to run folders: commands only end as documented, change no file outside, and use bounded memory."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from agentgym.exports.export import Chosen, export
from agentgym.store.writer import RolloutWriter
from agentgym.types.rollout import Group
from agentgym.types.task import Task
from tests.files.foreign.commands import Place, Worker, worker, wrong_with
from tests.files.foreign.mutations import MUTATIONS, ODD, Mutation, changed_within, mutate
from tests.store.test_store import rollout
from tests.view.made_runs import make_run

FUZZING = settings(
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""New random changes in each run, as for proofs."""
SAME = settings(FUZZING, derandomize=True, max_examples=16)
"""The same changes each time, until the test itself changes."""


RARITY = {"show": 1, "GET": 3, "rescore": 4, "report": 12}
"""Each command runs for one in this many changed folders; commands that are not listed, for every second folder."""


class Fuzzed:
    """A process for commands, and the valid folders that are changed."""

    def __init__(self, folder: Path, commands: Worker) -> None:
        self.folder, self.commands = folder, commands
        self.run = make_run(folder / "sound")
        with RolloutWriter(self.run, done=9) as writer:
            for name in ("e0", "e1"):
                task = Task(id=name, prompt="Say it.")
                writer.add(
                    [Group(group_id=name, rollouts=(rollout(f"{name}/0", 0.5),), task=task)], phase="eval", step=0
                )
        (self.run / "summary.json").write_text(json.dumps({"reward": 0.5, "pass_at": {"1": 0.5}, "rollouts": 2}))
        self.trajectories = folder / "trajectories"
        export(self.run, "atif", self.trajectories, Chosen(unscored=True))

    def check(self, mutations: list[Mutation], chosen: int) -> None:
        """Run some commands on a changed run; over many runs each command gets its turn, slow ones less often."""
        with tempfile.TemporaryDirectory(dir=self.folder) as around:
            place = Place.made(Path(around) / "place")
            shutil.copytree(self.run, place.run)
            (Path(around) / "sound").symlink_to(self.run)
            mutate(place.run, mutations)
            before = place.kept()
            commands = [words for words in place.commands() if chosen % RARITY.get(words[0], 2) == 0]
            wrong = [wrong for one in self.commands.run(*commands) for wrong in wrong_with(one)]
            assert (wrong, place.changes(before), place.strange()) == ([], [], [])

    def check_import(self, name: int, place: int, odd: int) -> None:
        """Import a changed trajectory."""
        with tempfile.TemporaryDirectory(dir=self.folder) as around:
            folder = Path(around) / "trajectories"
            shutil.copytree(self.trajectories, folder)
            files = sorted(folder.glob("*.json"))
            file = files[name % len(files)]
            file.write_text(json.dumps(changed_within(json.loads(file.read_text()), place, ODD[odd])))
            (found,) = self.commands.run(["import", str(file), "--output-dir", str(Path(around) / "out")])
            assert wrong_with(found) == []


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    folder = tmp_path_factory.mktemp("fuzzed")
    with worker(tmp_path_factory.mktemp("cache")) as commands:
        yield Fuzzed(folder, commands)


@SAME
@given(mutations=MUTATIONS, chosen=st.integers(0, 11))
def test_no_random_change_of_a_run_harms_a_command(fuzzed: Fuzzed, mutations: list[Mutation], chosen: int) -> None:
    fuzzed.check(mutations, chosen)


@SAME
@given(st.integers(0, 9), st.integers(0, 2**20), st.integers(0, len(ODD) - 1))
def test_no_random_change_of_a_trajectory_harms_the_import(fuzzed: Fuzzed, name: int, place: int, odd: int) -> None:
    fuzzed.check_import(name, place, odd)


@pytest.mark.proof
@pytest.mark.slow
@settings(FUZZING, max_examples=2000)
@given(mutations=MUTATIONS, chosen=st.integers(0, 11))
def test_no_change_in_two_thousand_runs_harms_a_command(fuzzed: Fuzzed, mutations: list[Mutation], chosen: int) -> None:
    fuzzed.check(mutations, chosen)


@pytest.mark.proof
@pytest.mark.slow
@settings(FUZZING, max_examples=2000)
@given(st.integers(0, 9), st.integers(0, 2**20), st.integers(0, len(ODD) - 1))
def test_no_change_in_two_thousand_trajectories_harms_the_import(
    fuzzed: Fuzzed, name: int, place: int, odd: int
) -> None:
    fuzzed.check_import(name, place, odd)
