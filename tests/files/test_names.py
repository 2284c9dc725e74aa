"""Folder names, and commands that can be pasted into a shell."""

import errno
import os
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentgym.files.names import command, drop_unused, free_name, new_folder, refused_path, shown, whole_path


def test_new_folders_of_the_same_second_have_different_names(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: new_folder(tmp_path / "runs/hello"), range(48)))
    assert len(set(made)) == 48
    assert all(folder.is_dir() for folder in made)


def test_a_folder_in_place_of_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(ValueError, match=r"^output_dir: .*/runs/hello/.* cannot be created \(a file is in its way\)"):
        new_folder(tmp_path / "runs/hello")


def test_a_folder_whose_name_contains_nul_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^output_dir: '.*/runs\\x00/.*' cannot be created \(embedded null byte\)"):
        new_folder(tmp_path / "runs\0")


def test_a_path_stays_valid_if_the_working_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = whole_path("runs/a")
    monkeypatch.chdir("/")
    assert path == tmp_path / "runs/a"


def test_a_path_that_the_system_refuses_is_named_in_a_removed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    long = "/" + "n" * 300
    with pytest.raises(OSError, match="File name too long") as failed:
        Path(long).stat()
    assert refused_path(failed.value, ["--limit", "3", long]) == (
        f"{long} cannot be used (File name too long); give another path"
    )


def test_only_a_path_that_is_beside_below_or_above_a_word_concerns_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = {
        path: refused_path(OSError(errno.EACCES, "Permission denied", path), ["--output=runs/a", "r"]) is not None
        for path in ("runs/a", "runs/a/settings.json", "runs/a.part", "runs", "r", "runs/ab", "runs/b", "run", "ra")
    }
    assert [path for path, named in refused.items() if named] == [
        "runs/a",
        "runs/a/settings.json",
        "runs/a.part",
        "runs",
        "r",
    ]


def test_a_relative_path_in_a_removed_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ValueError, match="relative to the working directory, which was removed"):
        whole_path("runs/a")


def test_an_unused_new_folder_is_removed_with_the_parents_created_for_it(tmp_path: Path) -> None:
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


def test_the_free_name_is_the_first_unused_one(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").symlink_to("nowhere")
    assert free_name(tmp_path / "run") == tmp_path / "run-3"


@pytest.mark.parametrize("name", ["a b", "ü", "it's", '"', "$HOME", "a;b", "-x", "*", "plain"])
def test_a_shell_reads_a_printed_command_as_intended(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    assert shlex.split(command("show", tmp_path / "runs" / name))[-2:] == ["show", f"runs/{name}"]


def test_a_printed_path_is_not_mistaken_for_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    assert shown(tmp_path / "-run/adapter") == "./-run/adapter"
    assert shown(Path("-run")) == "./-run"
    assert shown(tmp_path) == "."


def test_a_path_is_printed_in_full_if_the_shell_is_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.chdir("/")
    assert shown(tmp_path / "runs") == str(tmp_path / "runs")
    monkeypatch.delenv("PWD")
    monkeypatch.chdir(tmp_path)
    assert shown(Path(os.path.realpath(tmp_path)) / "runs") == "runs"
