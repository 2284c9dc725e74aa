"""Folder names, and commands that can be pasted into a shell."""

import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentgym.files.names import command, drop_unused, free_name, new_folder, shown, whole_path


def test_folders_that_are_asked_for_in_one_second_are_different_ones(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: new_folder(tmp_path / "runs/hello"), range(48)))
    assert len(set(made)) == 48
    assert all(folder.is_dir() for folder in made)


def test_a_folder_in_the_way_of_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(ValueError, match=r"^output_dir: .*/runs/hello/.* cannot be created \(a file is in its way\)"):
        new_folder(tmp_path / "runs/hello")


def test_a_path_is_whole_whatever_the_working_folder_is_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = whole_path("runs/a")
    monkeypatch.chdir("/")
    assert path == tmp_path / "runs/a"


def test_a_relative_path_in_a_folder_that_was_removed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match="relative to the working folder, which was removed"):
        whole_path("runs/a")


def test_a_folder_that_nothing_was_written_to_is_dropped_with_those_that_were_made_for_it(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    unused, used = new_folder(tmp_path / "runs/a"), new_folder(tmp_path / "runs/b")
    (used / "settings.json").touch()
    drop_unused(unused)
    drop_unused(used)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "kept",
        "runs",
        "runs/b",
        str(used.relative_to(tmp_path)),
        str((used / "settings.json").relative_to(tmp_path)),
    ]


def test_the_free_name_is_the_first_that_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").symlink_to("nowhere")
    assert free_name(tmp_path / "run") == tmp_path / "run-3"


@pytest.mark.parametrize("name", ["a b", "ü", "it's", '"', "$HOME", "a;b", "-x", "*", "plain"])
def test_a_command_is_read_by_a_shell_as_it_was_meant(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    assert shlex.split(command("show", tmp_path / "runs" / name))[-2:] == ["show", f"runs/{name}"]


def test_a_path_is_shown_whole_where_the_shell_s_folder_is_not_the_process_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.chdir("/")
    assert shown(tmp_path / "runs") == str(tmp_path / "runs")
    monkeypatch.delenv("PWD")
    monkeypatch.chdir(tmp_path)
    assert shown(Path(os.path.realpath(tmp_path)) / "runs") == "runs"
