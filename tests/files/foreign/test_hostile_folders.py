"""Run folders from strangers: every command ends with a documented exit code and message, and no other changes."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from agentgym.store.writer import RolloutWriter
from tests.files.foreign.attacks import ATTACKS, CHOSEN
from tests.files.foreign.commands import Place, Worker, worker, wrong_with
from tests.store.test_store import group, rollout
from tests.view.made_runs import make_run


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with worker(tmp_path_factory.mktemp("cache")) as made:
        yield made


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a valid run, which each attack then modifies."""
    folder = make_run(tmp_path_factory.mktemp("sound") / "run")
    with RolloutWriter(folder, done=9) as writer:
        writer.add([group(rollout(f"task{place}/0", 0.5)) for place in range(3)][:1], phase="eval", step=0)
    return folder


def placed(tmp_path: Path, sound: Path) -> Place:
    """Copy the valid run into a folder with files that attacks try to damage."""
    place = Place.made(tmp_path / "place")
    shutil.copytree(sound, place.run)
    shutil.copytree(sound, tmp_path / "sound")
    return place


def test_every_command_reads_a_sound_run(tmp_path: Path, sound: Path, commands: Worker) -> None:
    place = placed(tmp_path, sound)
    before, found = place.kept(), commands.run(*place.commands())
    assert [wrong for one in found for wrong in wrong_with(one)] == []
    refused = [one["words"][0] for one in found if one["code"]]
    assert refused == ["show", "import"]  # nothing is suspicious, and the folder contains no trajectory
    assert (place.changes(before), place.strange()) == ([], [])


def check(attack: str, place: Place, commands: Worker, asked: Sequence[list[str]]) -> None:
    ATTACKS[attack](place.run)
    before = place.kept()
    found = commands.run(*asked)
    assert [wrong for one in found for wrong in wrong_with(one)] == []
    assert place.changes(before) == []
    assert place.strange() == []


@pytest.mark.parametrize("attack", CHOSEN)
def test_no_attack_harms_a_command(attack: str, tmp_path: Path, sound: Path, commands: Worker) -> None:
    place = placed(tmp_path, sound)
    check(attack, place, commands, place.quick(place.commands()))


@pytest.mark.slow
@pytest.mark.parametrize("attack", ATTACKS)
def test_no_attack_harms_any_command(attack: str, tmp_path: Path, sound: Path, commands: Worker) -> None:
    place = placed(tmp_path, sound)
    check(attack, place, commands, place.commands())
