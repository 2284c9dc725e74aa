"""Envs found by file, and by the entry points of packages that the tests really install."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.engines.scripted import Scripted, say
from agentgym.environments import registry
from agentgym.errors import EnvError

ENV = '''"""An env in a file."""

import agentgym as ag
from {helpers} import WORD


class {name}(ag.ToolEnv[ag.Task]):
    """Says a word."""

    word = WORD

    @classmethod
    def tasks(cls, split):
        return [ag.Task(id=f"{{split}}-0", prompt="?")]

    @ag.reward
    def said(self):
        return float(self.answer == WORD)
'''


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the registry, `sys.path` and the env modules after each test."""
    monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] != "agentgym":  # agentgym's classes must stay the same objects for all tests
            del sys.modules[name]


def write_env(file: Path, name: str, *, word: str, helpers: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    (file.parent / f"{helpers.rpartition('.')[2]}.py").write_text(f"WORD = {word!r}\n")
    file.write_text(ENV.format(name=name, helpers=helpers))
    return file


def install(target: Path, package: str, envs: dict[str, str]) -> None:
    """Install a small package with pip into a separate folder, without network access."""
    for needed in ("pip", "hatchling"):
        pytest.importorskip(needed, reason=f"installs a package, which needs {needed}")
    source = target.parent / f"source-{package}"
    write_env(source / package / "env.py", "Spoken", word=package, helpers=f"{package}.words")
    (source / package / "__init__.py").write_text("")
    points = "\n".join(f'{name} = "{value}"' for name, value in envs.items())
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        f'[project]\nname = "{package}"\nversion = "1.5"\n[project.entry-points."agentgym.envs"]\n{points}\n'
        f'[tool.hatch.build.targets.wheel]\npackages = ["{package}"]\n'
    )
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_env_file_is_imported_once(tmp_path: Path) -> None:
    file = write_env(tmp_path / "my_words.py", "Words", word="hello", helpers="words_beside")
    found = ag.find_env(f"{file}:Words")
    assert (found.__name__, found.__module__, found.word) == ("Words", "my_words", "hello")  # type: ignore[attr-defined]
    assert ag.find_env(str(file)) is found
    assert ag.find_env("my_words:Words") is found


def test_a_file_in_a_package_is_imported_under_its_package_name() -> None:
    root = Path(__file__).parents[2]
    sys.path.append(str(root))
    found = ag.find_env(f"{root}/envs/bisect/env.py:Bisect")
    assert found.__module__ == "envs.bisect.env"


def test_a_program_finds_the_env_that_it_registers_itself(tmp_path: Path) -> None:
    program = tmp_path / "my_program.py"
    program.write_text(
        "import agentgym as ag\n"
        '@ag.register("my_own")\n'
        "class Own(ag.ToolEnv): pass\n"
        "if __name__ == '__main__':\n"
        "    for name in ('my_own', 'my_program:Own', 'my_program.py:Own'):\n"
        "        print(ag.find_env(name).__name__)\n"
    )
    done = subprocess.run([sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["Own"] * 3, "")


def test_two_files_with_the_same_name_are_two_modules(tmp_path: Path) -> None:
    files = [write_env(tmp_path / f"at{i}" / "env.py", "Words", word=str(i), helpers=f"words_at{i}") for i in range(2)]
    first, second = (ag.find_env(f"{file}:Words") for file in files)
    assert (first.word, second.word) == ("0", "1")  # type: ignore[attr-defined]
    assert ag.find_env(str(files[1])) is second


def test_a_missing_file_or_one_without_exactly_one_env_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^env: there is no file .*nowhere\.py; name one"):
        ag.find_env(str(tmp_path / "nowhere.py"))
    empty, both = tmp_path / "no_env_in_it.py", tmp_path / "two_envs_in_it.py"
    empty.write_text("import agentgym as ag\n")
    both.write_text("import agentgym as ag\nclass A(ag.Env): ...\nclass B(ag.Env): ...\n")
    with pytest.raises(ValueError, match=r"no_env_in_it\.py defines none; name one class, as in .*\.py:MyEnv$"):
        ag.find_env(str(empty))
    with pytest.raises(ValueError, match=r"two_envs_in_it\.py defines A, B; name one class, as in .*\.py:A$"):
        ag.find_env(str(both))
    (tmp_path / "broken_env.py").write_text("1 / 0\n")
    with pytest.raises(EnvError, match="ZeroDivisionError"):
        ag.find_env(f"{tmp_path}/broken_env.py:A")


async def test_envs_of_an_installed_package_are_found_by_entry_point_name(tmp_path: Path) -> None:
    install(tmp_path / "site", "spoken_words", {"spoken": "spoken_words.env:Spoken"})
    sys.path.append(str(tmp_path / "site"))
    assert list(registry.installed()) == ["spoken"]
    found = ag.find_env("spoken")
    assert (found.__module__, found is ag.find_env("spoken")) == ("spoken_words.env", True)
    result = await ag.evaluate("spoken", Scripted([say("spoken_words")]))
    assert (result.reward, result.envs["Spoken"].version) == (1.0, "1.5")
    with pytest.raises(ValueError, match=r"'spokn' is not registered \(did you mean 'spoken'\?\)"):
        ag.find_env("spokn")


def test_two_packages_with_the_same_env_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    for package in ("first_words", "other_words"):
        write_env(tmp_path / package / "env.py", "Spoken", word=package, helpers=f"{package}.words")
        info = tmp_path / f"{package}-2.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(f"[agentgym.envs]\nspoken = {package}.env:Spoken\n")
    sys.path.append(str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"^env: 'spoken' names two classes, first_words\.env:Spoken of first_words 2\.0 and other_words\.env:",
    ):
        ag.find_env("spoken")
    assert ag.find_env("other_words.env:Spoken").word == "other_words"  # type: ignore[attr-defined]


def test_a_name_registered_and_installed_for_different_classes_is_an_error(tmp_path: Path) -> None:
    write_env(tmp_path / "late_words" / "env.py", "Spoken", word="x", helpers="late_words.words")
    file = tmp_path / "late_words" / "env.py"
    file.write_text(file.read_text() + '\n\n@ag.register("spoken")\nclass Other(Spoken):\n    """One more."""\n')
    info = tmp_path / "late_words-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late_words\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[agentgym.envs]\nspoken = late_words.env:Spoken\n")
    sys.path.append(str(tmp_path))
    with pytest.raises(ValueError, match=r"^register: 'spoken' is already registered as late_words\.env\.Other"):
        ag.find_env("spoken")


def test_ls_lists_the_envs_of_installed_packages(tmp_path: Path) -> None:
    write_env(tmp_path / "listed_words" / "env.py", "Spoken", word="x", helpers="listed_words.words")
    info = tmp_path / "listed_words-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: listed_words\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[agentgym.envs]\nspoken = listed_words.env:Spoken\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); from agentgym.cli.main import main; sys.exit(main(['ls']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["spoken", "listed_words.env:Spoken", "Says", "a", "word."] in lines, done
    assert json.dumps(done.stderr) == '""'


def test_a_gallery_env_is_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "envs.judge_essay.env", raising=False)
    found = ag.find_env("judge_essay_pairs")
    assert (found.__module__, found.__name__) == ("envs.judge_essay.env", "JudgeEssayPairs")
    assert registry.gallery().keys() > {"chase", "search", "notes", "negotiate", "judge_essay"}
    with pytest.raises(ValueError, match=r"did you mean 'negotiate'\?"):
        ag.find_env("negotate")


def test_another_folder_in_place_of_a_gallery_env_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write_env(tmp_path / "envs/notes/env.py", "Other", word="x", helpers="words")
    monkeypatch.setattr(sys, "path", [str(other.parent), str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"env: 'notes' is defined in .*/notes/env.py, but importing envs.notes"):
        ag.find_env("notes")


@pytest.mark.parametrize("name", ["", " ", "a:b", "a.py", "--env", "../x", "a b"])
def test_a_name_that_cannot_be_typed_on_a_command_line_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^register: a name may contain letters, digits"):
        ag.register(name)
