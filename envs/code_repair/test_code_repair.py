"""Tests of code_repair without a model; tests that need a real process boundary run in bubblewrap and Docker."""

import ast
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

import agentgym as ag
from agentgym.engines.scripted import Reply, Scripted, call, calls, raw, say
from agentgym.sandboxes.docker.docker import why_no_docker
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.sandboxes.local.local import why_no_bubblewrap
from agentgym.sandboxes.protocol import SandboxPool
from agentgym.testing import check_env
from agentgym.types.rollout import Rollout
from envs.code_repair.bugs import answers, is_broken, original, run, same, single_bugs
from envs.code_repair.cases import CASES
from envs.code_repair.env import LONGEST, MAX_SOURCE, CodeRepair, RepairTask, make_task
from envs.code_repair.mutate import Mutation, apply, mutations, overlap

SPLITS: tuple[ag.Split, ...] = ("train", "test")
MODULES = sorted(CASES)
TASK = make_task("train", MODULES.index("lru"))
SUBMIT = call("submit")
TEST = "python3 -B -m unittest"


def mend(task: RepairTask) -> Reply:
    """Return a call that restores the broken module."""
    return call("write", path=f"{task.broken}.py", content=original(task.broken))


def solution(task: RepairTask) -> list[Reply]:
    return [mend(task), SUBMIT]


@pytest_asyncio.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
async def real(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    """Yield a pool of one real sandbox of each kind."""
    docker = request.param == "docker"
    if (why_not := why_no_docker() if docker else why_no_bubblewrap()) is not None:
        pytest.skip(f"{request.param}: {why_not}")
    async with (ag.Docker() if docker else ag.Bubblewrap()).open(1) as pool:
        yield pool


async def play(sandboxes: SandboxPool, *script: Reply, task: RepairTask = TASK) -> Rollout:
    rollout = await ag.rollout(CodeRepair, task, Scripted(script), sandboxes=sandboxes)
    assert rollout.error is None
    return rollout


# ---------------------------------------------------------------------------------------------------- the bugs


@pytest.mark.parametrize("name", MODULES)
def test_the_sound_module_answers_its_cases_within_the_steps(name: str) -> None:
    for hidden in (False, True):
        said = run(original(name), list(CASES[name].hidden if hidden else CASES[name].visible))
        assert same(said, answers(name, hidden=hidden))


@pytest.mark.parametrize("name", MODULES)
def test_most_mistakes_are_caught_by_the_visible_and_the_hidden_cases(name: str) -> None:
    caught = [len(single_bugs(name, split)) for split in SPLITS]
    assert sum(caught) >= 0.7 * len(mutations(original(name)))
    assert min(caught) >= 4


@pytest.mark.parametrize("name", MODULES)
def test_the_mistakes_of_the_two_splits_are_disjoint(name: str) -> None:
    assert not set(single_bugs(name, "train")) & set(single_bugs(name, "test"))


def test_a_mutation_is_one_replaced_text() -> None:
    source = "def f(a, b=1):\n    # kept\n    if not (a < b):\n        return g(a, (b))\n    return (a + b) * 2\n"
    made = {apply(source, [m]) for m in mutations(source)}
    assert source.replace("a < b", "a <= b") in made
    assert source.replace("not (a < b)", "a < b") in made
    assert source.replace("(a + b) * 2", "(a + b) + 2") in made
    assert source.replace("b=1", "b=0") in made
    assert source.replace("g(a, (b))", "g(b, (a))") in made
    assert source.replace("    if not (a < b):\n        return g(a, (b))\n", "") in made
    assert all(ast.parse(broken) and "# kept" in broken for broken in made)


def test_two_mutations_do_not_affect_each_others_position() -> None:
    first, second = Mutation(0, 1, "xyz", "a"), Mutation(4, 5, "w", "b")
    assert apply("a + b", [first, second]) == apply("a + b", [second, first]) == "xyz + w"
    assert not overlap(first, second)
    assert overlap(first, Mutation(0, 5, "", "c"))


def test_code_that_never_ends_is_not_a_task() -> None:
    source = "def f(n):\n    while n < 5:\n        n -= 1\n    return n\n"
    assert run(source, ["f(9)"]) == [{"value": 9}]
    assert run(source, ["f(0)"]) is None


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("index", [*range(16), 4321, 9999])
def test_every_task_is_broken_and_reproducible(split: ag.Split, index: int) -> None:
    task = make_task(split, index)
    assert task == make_task(split, index)
    source = task.files[f"{task.broken}.py"]
    for hidden, cases in ((False, CASES[task.broken].visible), (True, CASES[task.broken].hidden)):
        assert not same(run(source, list(cases)), answers(task.broken, hidden=hidden))
    assert [name for name in task.modules if task.files[f"{name}.py"] != original(name)] == [task.broken]
    assert 1 <= len(task.mistakes) <= 2


def test_no_broken_module_of_the_test_split_is_in_the_training_split() -> None:
    train, test = ({make_task(split, i).files[f"{MODULES[i % 8]}.py"] for i in range(200)} for split in SPLITS)
    assert not train & test
    assert len(train) > 100


def test_a_bug_that_no_case_detects_does_not_count() -> None:
    swap = next(m for m in mutations(original("intervals")) if m.kind == "swapped arguments")
    assert not is_broken("intervals", [swap])


# ---------------------------------------------------------------------------------------------------- the env


async def test_code_repair_keeps_the_contract_of_an_env(sandboxes: FakeSandboxPool) -> None:
    await check_env(CodeRepair, TASK, oracle=solution(TASK), noop=[SUBMIT], sandboxes=sandboxes)


async def test_an_edit_solves_the_task(sandboxes: FakeSandboxPool) -> None:
    task = next(t for t in CodeRepair.tasks("train") if len(t.mistakes) == 1 and t.mistakes[0] == "comparison")
    bad, good = task.files[f"{task.broken}.py"], original(task.broken)
    line = next((b, g) for b, g in zip(bad.splitlines(), good.splitlines(), strict=True) if b != g)
    assert bad.count(line[0]) == 1
    rollout = await play(sandboxes, call("edit", path=f"{task.broken}.py", old=line[0], new=line[1]), SUBMIT, task=task)
    assert rollout.reward == 1.0


async def test_another_right_solution_is_also_rewarded(sandboxes: FakeSandboxPool) -> None:
    source = original("lru").replace(
        "value = self.entries.pop(key)", "value = self.entries[key]\n        self._drop(key)"
    )
    source += "\n    def _drop(self, key):\n        del self.entries[key]\n"
    rollout = await play(sandboxes, call("write", path="lru.py", content=source), SUBMIT)
    assert rollout.reward == 1.0


async def test_nothing_is_rewarded_without_submit(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, mend(TASK), say("I am done."))
    assert rollout.reward == 0.0


async def test_a_malformed_call_costs_a_tenth(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, raw("<tool_call>\nsubmit(\n</tool_call>"), *solution(TASK))
    assert rollout.rewards == {"solved": 1.0, "malformed": 1.0}


async def test_breaking_a_sound_module_earns_nothing(sandboxes: FakeSandboxPool) -> None:
    other = next(name for name in TASK.modules if name != TASK.broken)
    rollout = await play(sandboxes, mend(TASK), call("write", path=f"{other}.py", content="x = 1\n"), SUBMIT)
    assert rollout.reward == 0.0


async def test_mistakes_with_the_editor_get_a_message(sandboxes: FakeSandboxPool) -> None:
    script = [
        calls(
            ("read", {"path": "nothing.py"}),
            ("edit", {"path": "lru.py", "old": "self", "new": ""}),
            ("edit", {"path": "lru.py", "old": "no such text", "new": ""}),
            ("edit", {"path": "lru.py", "old": "", "new": "x"}),
        ),
        *solution(TASK),
    ]
    rollout = await play(sandboxes, *script)
    assert rollout.reward == 1.0
    assert rollout.metrics["tool_errors"] == 4


async def test_the_solution_never_enters_the_sandbox(sandboxes: FakeSandboxPool) -> None:
    await play(sandboxes, call("write", path="lru.py", content=original("lru") + "\n"), SUBMIT)
    (verifier,) = sandboxes.made[0].log  # type: ignore[attr-defined]
    assert CASES["lru"].hidden[1] in verifier
    assert "[['d', 'a', 'b']" not in verifier
    assert "Expected" not in verifier


# ---------------------------------------------------------------------------------------------------- real sandboxes


@pytest.mark.parametrize("index", range(8))
async def test_in_a_real_sandbox_the_visible_tests_fail_and_pass_after_the_repair(
    real: SandboxPool, index: int
) -> None:
    task = make_task("test", index)
    async with real.lease() as sandbox:
        await sandbox.write(task.files)
        before = await sandbox.exec(TEST)
        assert before.exit_code == 1, before
        assert f"test_{task.broken}" in before.stderr
        await sandbox.write({f"{task.broken}.py": original(task.broken)})
        after = await sandbox.exec(TEST)
        assert after.ok, after
    assert (await play(real, call("bash", cmd=TEST), *solution(task), task=task)).reward == 1.0
    assert (await play(real, call("bash", cmd=TEST), SUBMIT, task=task)).reward == 0.0


HARD_CODED = "\n".join(
    [
        "class LRUCache:",
        "    def __init__(self, capacity=3):",
        "        if capacity < 1: raise ValueError",
        "        self.capacity = capacity",
        "    def put(self, key, value): pass",
        "    def get(self, key, default=None): return {'a': 1}.get(key, default)",
        "    def keys(self): return ['b', 'c']",
        "    def ratio(self): return [1, 3]",
    ]
)
FORGED = """
import sys
frame = sys._getframe()
while frame:
    cases = frame.f_locals.get('cases') or frame.f_globals.get('cases')
    for names in (frame.f_locals, frame.f_globals):
        if 'report' in names:
            names['report']([{'value': None}] * 9)
            names['report'] = lambda *_: None
    frame = frame.f_back
"""
PATCHED = """
import builtins, json, unittest
class Same(list):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
json.dumps = lambda *_, **__: '1'
json.loads = lambda *_, **__: Same()
builtins.repr = lambda _: 'True'
builtins.type = lambda _: Same
unittest.TestCase.assertEqual = lambda *_: None
unittest.TestCase.run = lambda *_: None
"""
OK = "print('Ran 6 tests in 0.001s\\n\\nOK')\n"
CHEATS: dict[str, dict[str, str]] = {
    "the tests are edited": {"test_lru.py": "import unittest\n"},
    "the tests always pass": {"unittest.py": OK, "test_lru.py": OK},
    "it leaves at import": {"lru.py": "import sys; sys.exit(0)"},
    "it leaves harder": {"lru.py": OK + "import os; os._exit(0)"},
    "builtins, json and unittest are patched": {"lru.py": PATCHED + TASK.files["lru.py"]},
    "sitecustomize and conftest": {"sitecustomize.py": PATCHED, "conftest.py": PATCHED, "usercustomize.py": PATCHED},
    "modules shadow the verifier's": {"json.py": PATCHED, "ast.py": "def parse(*_): raise SystemExit(0)"},
    "results are printed": {"lru.py": OK + TASK.files["lru.py"]},
    "results are reported": {"lru.py": FORGED + TASK.files["lru.py"]},
    "visible answers are hard-coded": {"lru.py": HARD_CODED},
    "it never ends": {"lru.py": "while True: pass"},
    "no source": {"lru.py": ""},
}


@pytest.mark.parametrize("how", CHEATS)
async def test_cheating_does_not_solve_it(real: SandboxPool, how: str) -> None:
    writes = [("write", {"path": path, "content": content}) for path, content in CHEATS[how].items()]
    rollout = await play(real, calls(*writes), call("bash", cmd=f"timeout 1 {TEST}"), SUBMIT)
    assert rollout.reward == 0.0
    assert (await play(real, *solution(TASK))).reward == 1.0


class Roomy(CodeRepair):
    """Code repair with as many tokens as its longest calls have bytes here."""

    limits = replace(CodeRepair.limits, turn_tokens=1 << 19, context_tokens=1 << 20)


@pytest.mark.parametrize("letter", ["\N{EVERGREEN TREE}", "\U00100000"], ids=["shown", "escaped"])
async def test_the_longest_repair_that_the_tools_can_write_is_rewarded(real: SandboxPool, letter: str) -> None:
    whole, mark = original("lru"), "# longer"
    written = f"{whole}{mark}".ljust(LONGEST, letter)
    assert len(written.encode()) > 1 << 16
    longer = call("edit", path="lru.py", old=mark, new=mark.ljust(LONGEST, letter))
    script = [call("write", path="lru.py", content=written), longer, SUBMIT]
    rollout = await ag.rollout(Roomy, TASK, Scripted(script), sandboxes=real)
    assert (rollout.reward, rollout.metrics["tool_errors"]) == (1.0, 0), rollout
    assert "replaced" in str(rollout)


UNREADABLE = [
    "ln -s /proc/self/environ lru.py",
    "mkfifo lru.py",
    "mkdir lru.py",
    f"head -c {MAX_SOURCE + 1} /dev/zero >lru.py",
    r"printf '\377' >lru.py",
    "true",
]


@pytest.mark.parametrize("made", UNREADABLE)
async def test_an_unreadable_source_file_is_not_a_solution(real: SandboxPool, made: str) -> None:
    assert (await play(real, call("bash", cmd=f"rm lru.py; {made}"), SUBMIT)).reward == 0.0


async def test_a_process_that_outlives_submit_has_no_effect(real: SandboxPool) -> None:
    daemon = "(while :; do echo 'import os; os._exit(0)' >lru.py; done) >/dev/null 2>&1 &"
    rollout = await play(real, call("bash", cmd=daemon), *solution(TASK))
    assert rollout.reward == 1.0
