"""The files for outsiders agree with each other: versions, links, the workflow's commands, plain English."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import agentgym as ag
from tests import prose

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()
REPOSITORY = PROJECT["urls"]["Source"]
FILES = ["SECURITY.md", "CODE_OF_CONDUCT.md", "CITATION.cff", ".github/ISSUE_TEMPLATE/config.yml"]


def test_the_version_is_the_same_everywhere() -> None:
    [cited] = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.findall(r"^## \[?([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert cited == newest == ag.__version__


@pytest.mark.parametrize("name", FILES)
def test_links_to_the_repository_name_the_projects(name: str) -> None:
    links = re.findall(r"https://github\.com/[\w-]+/[\w-]+", (ROOT / name).read_text())
    assert set(links) == {REPOSITORY}


def test_the_projects_links_are_in_one_repository() -> None:
    assert [url for url in PROJECT["urls"].values() if not url.startswith(REPOSITORY)] == []


def test_the_workflow_runs_targets_and_files_that_exist() -> None:
    jobs = yaml.safe_load(WORKFLOW)["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {command.split()[1] for command in commands if command.startswith("make ")}
    makefile = (ROOT / "Makefile").read_text()
    assert {"lint", "test-fast", "docs"} <= targets
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
    assert any(".ci/run" in command for command in commands)


def test_the_workflow_tests_each_python_that_the_project_names() -> None:
    tested = yaml.safe_load(WORKFLOW)["jobs"]["test"]["strategy"]["matrix"]["python"]
    named = [re.search(r":: (3\.\d+)$", line) for line in PROJECT["classifiers"]]
    assert tested == [match[1] for match in named if match]


def test_the_changelog_has_at_most_60_lines_for_a_version() -> None:
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert [section.partition("\n")[0] for section in sections if len(section.splitlines()) > 60] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("where", "Return the id; None where there is none."),
        ("behind", "Appended behind the last turn."),
        ("goes on", "The run goes on."),
        ("is no X", "It is no integer."),
        ("of its own", "A process of its own."),
        ("what is", "What is left over is dropped."),
    ],
)
def test_the_prose_counter_counts(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "agentgym").mkdir()
    (tmp_path / "agentgym/a.py").write_text(f'"""{text}"""\n')
    found = list(prose.texts(tmp_path))
    assert [prose.hits(one, name) for one in found] == [1]
    command = [sys.executable, str(ROOT / "tests/prose.py"), "--root", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    "text", ["Say where the file is.", "There is no such file.", "`what is` in code", "If it is there, return it."]
)
def test_the_prose_counter_passes_plain_sentences(text: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text(f"{text}\n")
    bounded = [name for name, count in prose.COUNTS.items() if count.bound == 1]
    assert [name for one in prose.texts(tmp_path) for name in bounded if prose.hits(one, name)] == []
