"""Tests of repo without a model: what the bugs do, what fixes them, and which workarounds earn nothing."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import agentgym as ag
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import Reply, Scripted, call, calls, check_env, say
from envs.repo.bugs import BUGS, NEEDS, VISIBLE, Bug
from envs.repo.env import Repo, RepoTask, make_task, oracle
from envs.repo.generate import OUTCOMES, hidden_tests, part_source

SPLITS: tuple[ag.Split, ...] = ("train", "test")
TASK = make_task("train", 0)


@pytest_asyncio.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def real(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    """Yield a pool of one real sandbox of each kind."""
    docker = request.param == "docker"
    if (why_not := why_no_docker() if docker else why_no_bubblewrap()) is not None:
        pytest.skip(f"{request.param}: {why_not}")
    async with (ag.Docker() if docker else ag.Bubblewrap()).open(1) as pool:
        yield pool


async def play(sandboxes: SandboxPool, *script: Reply, task: RepoTask = TASK) -> ag.Rollout:
    rollout = await ag.rollout(Repo, task, Scripted([*script, say("Done.")]), sandboxes=sandboxes)
    assert rollout.error is None, rollout
    return rollout


def outcomes(bug: Bug, cases: list[str]) -> list[Any]:
    """Return the outcomes of the cases in the module with the bug, which imports no other part that has a bug."""
    broken: dict[str, Any] = {}
    exec(part_source(bug.part, "envs.repo.parts").replace(bug.good, bug.bad), broken)
    names: dict[str, Any] = {}
    exec(OUTCOMES, names)

    def outcome(case: str) -> Any:
        try:
            return json.loads(json.dumps(names["outcomes"](type("Module", (), broken), [case])[0]))
        except Exception as error:
            return error

    return [outcome(case) for case in cases]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.part}-{bug.kind}".replace(" ", "-"))
def test_a_bug_is_one_replaced_text_that_breaks_only_hidden_cases(bug: Bug) -> None:
    sound = part_source(bug.part, "acorn")
    assert sound.count(bug.good) == 1
    assert sound.replace(bug.good, bug.bad).count(bug.bad) == 1
    right = hidden_tests(bug.part)[1]
    visible, hidden = VISIBLE[bug.part], bug.hidden
    assert outcomes(bug, visible) == right[: len(visible)]
    start = len(visible) + sum(len(each.hidden) for each in BUGS[: BUGS.index(bug)] if each.part == bug.part)
    assert outcomes(bug, hidden) != right[start : start + len(hidden)]


def test_the_tests_of_a_repository_pass_with_its_bug(tmp_path: Path) -> None:
    for path, text in make_task("train", 5).files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-B", "-m", "unittest"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("OK\n"), done.stderr
    assert "Ran 0 tests" not in done.stderr


def test_no_bug_is_in_both_splits_and_together_they_have_all() -> None:
    kinds = [{(task.path.partition("/")[2], task.bad) for task in Repo.tasks(split)[:40]} for split in SPLITS]
    assert not kinds[0] & kinds[1]
    assert sum(map(len, kinds)) == len(BUGS)


@pytest.mark.parametrize("split", SPLITS)
def test_tasks_are_reproducible_and_contain_their_imported_modules(split: ag.Split) -> None:
    for index in range(40):
        task = make_task(split, index)
        assert task == make_task(split, index)
        package = task.path.partition("/")[0]
        there = {path.removeprefix(f"{package}/") for path in task.files if path.startswith(package)}
        for part, needs in NEEDS.items():
            assert f"{part}.py" not in there or {f"{need}.py" for need in needs} <= there
        assert len(there) == 5


async def test_the_oracle_is_rewarded_and_reading_alone_is_not(real: SandboxPool) -> None:
    for split in SPLITS:
        task = make_task(split, 1)
        looks = calls(("list", {}), ("read", {"path": task.path}), ("search", {"text": "def "}))
        tests = call("run", command="python3 -B -m unittest 2>&1")
        rollout = await play(real, looks, tests, oracle(task)[0], task=task)
        assert rollout.reward == 1.0, rollout
        assert "OK" in str(rollout)
        assert (await play(real, looks, task=task)).reward == 0.0


async def test_repo_keeps_the_contract_of_an_env(real: SandboxPool) -> None:
    await check_env(Repo, TASK, oracle=oracle(TASK), sandboxes=real)


async def test_mistakes_with_the_tools_get_a_message(real: SandboxPool) -> None:
    wrong = calls(
        ("read", {"path": "nothing.py"}),
        ("list", {"folder": "../.."}),
        ("edit", {"path": TASK.path, "old": "return", "new": ""}),
        ("edit", {"path": TASK.path, "old": "no such text", "new": ""}),
        ("search", {"text": "no such text"}),
    )
    rollout = await play(real, wrong, oracle(TASK)[0])
    assert (rollout.reward, rollout.metrics["tool_errors"]) == (1.0, 4)
    assert "[not found]" in str(rollout)


FORGED = """
import builtins, json, os, sys, unittest
class Same(list):
    def __eq__(self, other): return True
json.dumps = lambda *_, **__: "[]"
builtins.eval = lambda *_: Same()
unittest.TestCase.run = lambda *_: None
"""
PACKAGE = TASK.path.partition("/")[0]
INIT = f"{PACKAGE}/__init__.py"
CHEATS = {
    "tests are deleted": "rm -rf tests",
    "tests are patched": f"printf '%s' '{FORGED}' | tee tests/__init__.py conftest.py sitecustomize.py",
    "it leaves with success": f"echo 'import sys; sys.exit(0)' >> {INIT}",
    "it leaves harder": f"echo 'import os; os._exit(0)' >> {INIT}",
    "it patches what judges it": f"printf '%s' '{FORGED}' >> {INIT}",
    "modules stand in for the judge's": f"printf '%s' '{FORGED}' | tee json.py hidden.py importlib.py",
    "the package is gone": f"rm -rf {PACKAGE}",
}


@pytest.mark.parametrize("how", CHEATS)
async def test_cheating_does_not_fix_the_bug(real: SandboxPool, how: str) -> None:
    assert (await play(real, call("run", command=CHEATS[how]))).reward == 0.0


async def test_a_fix_that_also_deletes_the_tests_is_rewarded(real: SandboxPool) -> None:
    rollout = await play(real, oracle(TASK)[0], call("run", command="rm -rf tests; echo 'raise SystemExit' > json.py"))
    assert rollout.reward == 1.0
