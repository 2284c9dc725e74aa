"""The pytest plugin in a separate project: a failing env test prints the conversation."""

import os
import re
import subprocess
import sys
from pathlib import Path

from agentgym.pytest_plugin import SHOWN_OF_CHECK

ROOT = Path(__file__).parents[1]
ENV = '''
import agentgym as ag
from agentgym.engines.scripted import Scripted, call, say

class Desk(ag.ToolEnv[ag.Task]):
    @ag.tool
    async def look(self) -> str:
        """Look."""
        return "only a stapler\\x1b[2J\\ud800"

    @ag.reward
    def found(self) -> float:
        return float("key" in (self.answer or ""))

async def play(name):
    task = ag.Task(id=name, prompt="Find the key.")
    return await ag.rollout(Desk, task, Scripted([call("look"), say(f"It is gone, says {name}.")]))
'''


def run(folder: Path, tests: str, *options: str) -> str:
    """Return pytest's output for a file of tests, with this checkout's plugin and without the project's settings."""
    (folder / "desk.py").write_text(ENV)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_desk.py").write_text("from desk import play\n" + tests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": f"{ROOT}:{folder}", "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_a_failing_env_test_prints_the_transcript(tmp_path: Path) -> None:
    printed = run(tmp_path, "async def test_it():\n    assert (await play('t')).reward == 1\n")
    assert "1 failed" in printed
    assert " rollout t/0 " in printed
    for said in (
        "user: Find the key.",
        "assistant calls: look()",
        "assistant: It is gone, says t.",
        "rewards: found 0",
    ):
        assert printed.count(said) == 1
    assert r"tool look: only a stapler\x1b[2J\ud800" in printed


def test_a_passing_test_prints_no_transcript_and_the_next_one_only_its_own(tmp_path: Path) -> None:
    tests = "async def test_a():\n    await play('a')\n\nasync def test_b():\n    await play('b')\n    assert 0\n"
    printed = run(tmp_path, tests)
    assert "1 failed, 1 passed" in printed
    assert "says b." in printed
    assert "says a." not in printed


def test_the_last_rollouts_of_a_test_are_printed(tmp_path: Path) -> None:
    tests = "async def test_it():\n    for name in 'abcde':\n        await play(name)\n    assert 0\n"
    printed = run(tmp_path, tests)
    assert [name for name in "abcde" if f"says {name}." in printed] == ["c", "d", "e"]


def test_a_failing_fixture_prints_the_rollouts_once(tmp_path: Path) -> None:
    tests = """
import pytest


@pytest.fixture
async def played():
    yield await play("t")
    assert 0, "teardown"

async def test_it(played):
    assert 0, "call"
"""
    printed = run(tmp_path, tests)
    assert "1 failed, 1 error" in printed
    assert printed.count(" rollout t/0 ") == 1


def test_rollouts_of_check_env_are_named_and_displace_none_of_the_tests_own(tmp_path: Path) -> None:
    tests = """
import agentgym as ag
from agentgym.testing import check_env, say
from desk import Desk

async def test_it():
    for name in "abc":
        await play(name)
    await check_env(Desk, ag.Task(id="t", prompt="Find it."), oracle=[say("none")])
"""
    printed = run(tmp_path, tests)
    titles = [line.strip("- ") for line in printed.splitlines() if line.startswith("---") and " rollout " in line]
    assert titles[:3] == ["rollout a/0", "rollout b/0", "rollout c/0"]
    of_check = re.compile(r"rollout t/check_env-[\w-]+, run by check_env itself")
    assert [bool(of_check.fullmatch(title)) for title in titles[3:]] == [True] * SHOWN_OF_CHECK


def test_the_transcript_is_passed_through_xdist_workers(tmp_path: Path) -> None:
    printed = run(tmp_path, "async def test_it():\n    await play('t')\n    assert 0\n", "-n", "1")
    assert printed.count("assistant: It is gone, says t.") == 1
