"""Hidden tests on a sandbox's files: right code passes, wrong code fails, and tricks of the tested code don't help."""

import asyncio
import importlib.machinery
import re
import textwrap
from collections.abc import Mapping
from typing import Any

import pytest

from agentgym.sandboxes.fake.sandbox import FakeSandbox
from agentgym.sandboxes.hidden_tests.judging import Judging
from agentgym.sandboxes.hidden_tests.verify import program, verify
from agentgym.sandboxes.protocol import ExecResult, HiddenTests, Sandbox, Verdict
from tests.sandboxes.conftest import make, others_slow

pytestmark = pytest.mark.asyncio(loop_scope="module")

RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
TESTS = """
from solution import add

def test_small():
    assert add(2, 3) == 5

def test_zero():
    assert add(0, 0) == 0

async def test_negative():
    assert add(-2, -3) == -5
"""
UNITTEST = """
import unittest
from solution import add

class Adding(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(2, 3), 5)

    def test_zero(self):
        self.assertEqual(add(0, 0), 0)

if __name__ == "__main__":
    unittest.main()
"""
SCRIPT = "import sys\nfrom solution import add\nassert add(2, 3) == 5\nsys.exit(0)\n"
VALUES = {"add(2, 3)": 5, "add(-2, -3)": -5, "[add(0.5, 0.25)]": [0.75], "add(1, 1)": lambda value: value == 2}
FORGED = """
import os, py_compile, sys
os.makedirs("__pycache__", exist_ok=True)
with open("other.py", "w") as file:
    file.write("def test_small(): pass")
for name in ("hidden_tests", "solution"):
    target = f"__pycache__/{name}.{sys.implementation.cache_tag}.pyc"
    py_compile.compile("other.py", target, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
"""
"""Leaves bytecode that Python takes for that of two files, whatever they contain."""
FULL = """
import itertools
for number in itertools.count():
    open(f"file{number}", "x").close()
"""
CHEATS = {
    "leaves": "import os\nos._exit(0)",
    "exits normally": "raise SystemExit(0)",
    "exits by signal": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "exits in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "becomes another program": "import os\nos.execv('/bin/true', ['true'])",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\nos._exit(0)",
    "writes to every descriptor": textwrap.dedent("""
        import os
        for fd in range(64):
            try:
                os.write(fd, b'{"passed": true, "value": "5", "cases": {"a": null}}\\n' * 3)
            except OSError:
                pass
        os._exit(0)
    """),
    "exits in code without a file": "exec('def add(a, b): raise SystemExit(0)')",
    "exits in code with another name": textwrap.dedent("""
        for name in ("hidden_tests.py", "<frozen runpy>", "/usr/lib/os-release"):
            exec(compile("def add(a, b): raise SystemExit(0)", name, "exec"))
    """),
    "skips the test": "import unittest\ndef add(a, b):\n    raise unittest.SkipTest('hard')",
    "skips the import": "import unittest\nraise unittest.SkipTest('hard')",
    "interrupts": "def add(a, b):\n    raise KeyboardInterrupt",
    "does nothing": "",
    "is not Python": "def add(",
}

PYTEST = """
import decimal, subprocess, sys
from solution import add

def test_small():
    assert add(2, 3) == 5

def test_printed():
    code = "from solution import add; print(add(2, 3))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "5\\n"
"""
PLUGIN = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
"""
PYTEST_CHEATS: dict[str, dict[str, str | bytes]] = {
    "skips": {"solution.py": "import pytest\ndef add(a, b):\n    pytest.skip('hard')"},
    "expects to fail": {"solution.py": "import pytest\ndef add(a, b):\n    pytest.xfail('hard')"},
    "exits the run": {"solution.py": "import pytest\ndef add(a, b):\n    pytest.exit('well', 0)"},
    "interrupts the run": {"solution.py": "def add(a, b):\n    raise KeyboardInterrupt"},
    "has its own tests": {"test_mine.py": "def test_one(): pass\ndef test_two(): pass\n"},
    "is a plugin": {
        "cheat.py": PLUGIN,
        "cheat-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: cheat\nVersion: 1.0\n",
        "cheat-1.0.dist-info/entry_points.txt": "[pytest11]\ncheat = cheat\n",
    },
    "configures it": {"cheat.py": PLUGIN, "pytest.ini": "[pytest]\naddopts = -p cheat\n", "conftest.py": PLUGIN},
    "shadows a module": {
        "decimal.py": "import subprocess\nclass Ended:\n    stdout = '5\\n'\nsubprocess.run = lambda *a, **k: Ended\n"
    },
}
"""Files that a cheat leaves, by the effect of the cheat."""


async def verified(sandbox: Sandbox, solution: str, **given: Any) -> Verdict:
    await sandbox.write({"solution.py": solution})
    return await sandbox.verify(**given)


async def test_each_test_function_is_a_case(sandbox: Sandbox) -> None:
    verdict = await verified(sandbox, RIGHT, code=TESTS)
    assert verdict.cases == {"test_small": None, "test_zero": None, "test_negative": None}
    assert verdict.ok
    assert verdict.fraction == 1.0
    verdict = await verified(sandbox, WRONG, code=TESTS)
    assert (verdict.passed, verdict.total, verdict.ok) == (1, 3, False)
    assert "AssertionError" in str(verdict.cases["test_small"])


async def test_values_are_compared_on_the_host(sandbox: Sandbox) -> None:
    assert (await verified(sandbox, RIGHT, code="from solution import add", expect=VALUES)).ok
    verdict = await verified(sandbox, WRONG, code="from solution import add", expect=VALUES)
    assert verdict.passed == 0


async def test_true_is_not_1_and_a_tuple_equals_a_list(sandbox: Sandbox) -> None:
    values: Mapping[str, object] = {"True": 1, "1.0": 1, "(1, 2)": [1, 2], "float('nan')": float("nan"), "{1}": [1]}
    verdict = await sandbox.verify(code="", expect=values)
    assert [name for name, why in verdict.cases.items() if why] == ["True", "{1}"]


async def test_a_program_runs_once_for_each_stdin_text(sandbox: Sandbox) -> None:
    solution = "print(sum(map(int, input().split())))"
    texts = {"2 3\n": "5", "-2 -3\n": "-5\n", "0 0\n": lambda text: text.strip() == "0"}
    assert (await verified(sandbox, solution, command="python3 solution.py", expect=texts)).ok
    verdict = await verified(sandbox, "print(5)", command="python3 solution.py", expect=texts)
    assert [why is None for why in verdict.cases.values()] == [True, False, False]


@pytest.mark.parametrize("command", ["python3 -m unittest hidden_tests", "python3 -B hidden_tests.py"])
async def test_python_commands_are_recognized(sandbox: Sandbox, command: str) -> None:
    files = {"hidden_tests.py": UNITTEST}
    assert (await verified(sandbox, RIGHT, command=command, files=files)).ok
    verdict = await verified(sandbox, WRONG, command=command, files=files)
    assert not verdict.ok
    if "-m" in command:
        assert (verdict.passed, verdict.total) == (1, 2)


async def test_any_other_command_is_judged_by_its_exit_code(sandbox: Sandbox) -> None:
    files = {"tests/check.sh": "test -f ../solution.py && echo seen"}
    verdict = await verified(sandbox, RIGHT, command="cd tests && sh check.sh", files=files)
    assert verdict.ok
    assert verdict.output == "seen\n"
    assert not (await sandbox.verify(command="cd tests && sh check.sh")).ok


@pytest.mark.parametrize(
    "cheat",
    others_slow(CHEATS, "leaves", "kills its parent", "writes to every descriptor", "skips the test", "does nothing"),
)
async def test_a_solution_that_ends_its_process_or_claims_success_fails(sandbox: Sandbox, cheat: str) -> None:
    solution = CHEATS[cheat]
    given: list[dict[str, Any]] = [
        {"code": TESTS},
        {"code": "from solution import add", "expect": VALUES},
        {"command": "python3 -m unittest hidden_tests", "files": {"hidden_tests.py": UNITTEST}},
        {"command": "python3 hidden_tests.py", "files": {"hidden_tests.py": SCRIPT}},
        {"command": "python3 hidden_tests.py", "files": {"hidden_tests.py": UNITTEST}},
    ]
    for each in given:
        verdict = await verified(sandbox, solution, **each, timeout_s=5)
        assert verdict.passed == 0 < verdict.total, each


RETURNS = {
    "a comparison": "def test_it():\n    return 1 == 2\n",
    "a generator": "def test_it():\n    yield\n    assert False\n",
    "a coroutine's comparison": "async def test_it():\n    return 1 == 2\n",
}


@pytest.mark.parametrize("kind", RETURNS)
async def test_a_test_that_returns_a_value_has_not_passed(kind: str) -> None:
    verdict = await FakeSandbox().verify(code=RETURNS[kind])
    assert "it returned a " in str(verdict.cases["test_it"])
    of_a_class = f"import unittest\nclass T(unittest.TestCase):\n{textwrap.indent(RETURNS[kind], '    ')}"
    given = {"test_u.py": of_a_class.replace("test_it()", "test_it(self)")}
    verdict = await FakeSandbox().verify(command="python3 -m unittest test_u", files=given, timeout_s=60)
    assert "it returned a " in str(verdict.cases["test_u.T.test_it"])


async def test_a_pytest_test_that_returns_a_value_has_not_passed() -> None:
    given = {"test_it.py": RETURNS["a comparison"]}
    assert not (await FakeSandbox().verify(command="python3 -m pytest -q", files=given, timeout_s=60)).ok


async def test_an_async_function_in_expect_never_passes() -> None:
    verdict = await FakeSandbox().verify(
        code="", expect={"1": lambda value: asyncio.get_running_loop().create_future()}
    )
    assert "the function is async" in str(verdict.cases["1"])


async def test_files_that_shadow_hidden_files_do_not_help(sandbox: Sandbox) -> None:
    """Packages, libraries, links and compiled files of the same name, and modules that would shadow others."""
    await sandbox.exec(
        "mkdir -p hidden_tests __pycache__ unittest; echo 'import os; os._exit(0)' > hidden_tests/__init__.py;"
        "echo '' > unittest/__init__.py; echo 'class TestCase: pass' > unittest/main.py; touch hidden_tests.abi3.so;"
        "ln -s /etc/passwd hidden_tests.py; echo 'import os; os._exit(0)' > usercustomize.py;"
        "cp usercustomize.py json.py"
    )
    given: dict[str, Any] = {"command": "python3 -m unittest hidden_tests", "files": {"hidden_tests.py": UNITTEST}}
    assert (await verified(sandbox, RIGHT, **given)).ok
    assert not (await verified(sandbox, WRONG, **given)).ok


async def test_forged_bytecode_is_not_run(sandbox: Sandbox) -> None:
    await sandbox.python(FORGED)
    given: dict[str, Any] = {"command": "python3 -m unittest hidden_tests", "files": {"hidden_tests.py": UNITTEST}}
    verdict = await verified(sandbox, WRONG, **given)
    assert (verdict.passed, verdict.total) == (1, 2)


async def test_tests_that_the_episode_left_do_not_count(sandbox: Sandbox) -> None:
    await sandbox.write({"test_mine.py": UNITTEST.replace("from solution import add", "def add(a, b): return a + b")})
    verdict = await verified(sandbox, WRONG, command="python3 -m unittest", files={"test_hidden.py": UNITTEST})
    assert list(verdict.cases) == ["test_hidden.Adding.test_small", "test_hidden.Adding.test_zero"]
    assert (await sandbox.verify(command="python3 -m unittest")).ok  # Without hidden tests, these are run.


@pytest.mark.parametrize("cheat", others_slow(PYTEST_CHEATS, "skips", "is a plugin", "exits the run"))
async def test_pytest_counts_finished_hidden_tests_and_none_of_the_episodes_own(cheat: str) -> None:
    sandbox = FakeSandbox(files={"solution.py": WRONG} | PYTEST_CHEATS[cheat])
    verdict = await sandbox.verify(command="python3 -m pytest -q", files={"test_hidden.py": PYTEST}, timeout_s=60)
    assert list(verdict.cases) == ["test_hidden.py::test_small", "test_hidden.py::test_printed"]
    assert verdict.passed == 0


async def test_pytest_runs_right_code() -> None:
    sandbox = FakeSandbox(files={"solution.py": RIGHT})
    assert (await sandbox.verify(command="python3 -m pytest -q", files={"test_hidden.py": PYTEST}, timeout_s=60)).ok


async def test_an_expected_failure_passes() -> None:
    marked = "import pytest\n@pytest.mark.xfail\ndef test_known(): assert False\n"
    sandbox = FakeSandbox()
    assert (await sandbox.verify(command="python3 -m pytest -q", files={"test_hidden.py": marked}, timeout_s=60)).ok


async def test_a_value_that_an_expect_function_cannot_handle_fails_its_case(sandbox: Sandbox) -> None:
    """A return value that the tested code chose must not cause an error, which would leave no reward."""
    solution = "def add(a, b):\n    return 'x'"
    code = "from solution import add"
    verdict = await verified(sandbox, solution, code=code, expect={"add(2, 3)": lambda value: abs(value - 5) < 1e-6})
    assert "TypeError" in str(verdict.cases["add(2, 3)"])


async def test_only_the_case_that_prints_too_much_fails(sandbox: Sandbox) -> None:
    """It neither ends the later cases nor reveals them."""
    solution = "import os\nos.write(1, bytes(1 << 20) if input() == 'a' else b'1')"
    verdict = await verified(sandbox, solution, command="python3 solution.py", expect={"a": "1", "b": "1"})
    assert verdict.cases == {"a": "its report and output are too long", "b": None}


async def test_a_folder_that_cannot_be_copied_reveals_nothing_of_the_tests(isolated_sandbox: Sandbox) -> None:
    await isolated_sandbox.python(FULL)
    verdict = await isolated_sandbox.verify(code="SECRET = 'hush'\n" + TESTS)
    assert (verdict.passed, verdict.total) == (0, 3)
    assert "hush" not in str(verdict)


async def test_processes_of_the_session_are_stopped_during_verify(sandbox: Sandbox) -> None:
    await sandbox.python(
        "import subprocess, sys\n"
        "code = '''while True:\\n open('solution.py', 'w').write('def add(a, b): return a + b')\\n'''\n"
        "child = subprocess.Popen([sys.executable, '-c', code])"
    )
    try:
        verdict = await sandbox.verify(files={"solution.py": WRONG}, code=TESTS)
        assert verdict.passed == 1
    finally:
        await sandbox.python("child.kill(); child.wait()")


async def test_processes_that_a_case_leaves_are_gone_before_the_next_case(sandbox: Sandbox) -> None:
    solution = textwrap.dedent("""
        import os, time
        def leave():
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    while True:
                        open("mark", "w").write("x")
                        time.sleep(0.001)
                os._exit(0)
        def seen():
            time.sleep(0.05)
            if os.path.exists("mark"):
                os.unlink("mark")
            time.sleep(0.05)
            return os.path.exists("mark")
    """)
    verdict = await verified(
        sandbox, solution, code="from solution import *", expect={"leave()": None, "seen()": False}
    )
    assert verdict.ok


async def test_hidden_tests_leave_nothing_in_the_sandbox(sandbox: Sandbox) -> None:
    await sandbox.write({"solution.py": RIGHT, "hidden_tests.py": "mine"})
    before = await sandbox.list()
    await sandbox.verify(command="python3 hidden_tests.py", files={"hidden_tests.py": SCRIPT, "new/data.txt": "1"})
    assert await sandbox.list() == before
    assert await sandbox.read("hidden_tests.py") == b"mine"


async def test_a_hanging_case_fails_by_its_time_limit(sandbox: Sandbox) -> None:
    verdict = await sandbox.verify(command="read x; sleep $x", expect={"60\n": "", "0\n": ""}, timeout_s=1)
    assert str(verdict.cases["60\n"]).startswith("it took longer than 0.")
    assert verdict.total == 2


async def test_a_slow_case_may_take_half_of_the_remaining_time(sandbox: Sandbox) -> None:
    """An even share would be a tenth of a second."""
    expect = {f"{seconds}\n": "" for seconds in (1, *(f"0.{zeros}" for zeros in ("0" * n for n in range(1, 100))))}
    verdict = await sandbox.verify(command="read x; test $x = 1 && sleep 1; true", expect=expect, timeout_s=10)
    assert verdict.cases["1\n"] is None


def limit_of(left: float, behind: int) -> float:
    """Return the limit that the harness, a separate program, grants."""
    harness: dict[str, Any] = {}
    exec(program("harness"), harness)
    return float(harness["limit_of"](left, behind))


async def test_a_hanging_case_leaves_time_for_all_later_cases() -> None:
    assert limit_of(10.0, 0) == 10.0
    left = 10.0
    for behind in (5, 4, 3):
        assert left / 2 == pytest.approx(limit_of(left, behind))
        left -= limit_of(left, behind)
    assert left > 0


async def test_stderr_of_a_compared_command_is_in_the_output(sandbox: Sandbox) -> None:
    verdict = await verified(sandbox, "1 / 0", command="python3 solution.py", expect={"": "5"})
    assert "ZeroDivisionError" in verdict.output
    verdict = await verified(
        sandbox, "import sys; sys.stderr.write('aside'); print(5)", command="python3 solution.py", expect={"": "5"}
    )
    assert verdict.ok
    assert verdict.output == "5\naside"
    assert "ZeroDivisionError" in (await verified(sandbox, "1 / 0", command="cd . && python3 solution.py")).output


async def test_a_command_may_be_a_list_of_words(sandbox: Sandbox) -> None:
    files = {"hidden tests.py": SCRIPT}
    verdict = await verified(sandbox, RIGHT, command=["python3", "-B", "hidden tests.py"], files=files)
    assert verdict.cases == {"'hidden tests.py'": None}
    assert not (await verified(sandbox, WRONG, command=["python3", "hidden tests.py"], files=files)).ok
    assert (await sandbox.verify(command=["python3", "-c", "assert '$HOME; #' < '*'"])).ok
    assert (await sandbox.verify(command=["printf", "%s\n", "a b", "$HOME"], expect={"": "a b\n$HOME"})).ok


async def test_a_hidden_file_does_not_replace_data_files_of_a_similar_name(sandbox: Sandbox) -> None:
    """Files that could shadow a hidden module are removed; data files next to it stay."""
    await sandbox.write({"cases.txt": "mine", "cases/__init__.py": ""})
    files = {
        "cases.json": "[1]",
        "cases.py": "import json, os\nfound = json.load(open('cases.json')), open('cases.txt').read()\n",
    }
    verdict = await sandbox.verify(code="from cases import found", expect={"found": [[1], "mine"]}, files=files)
    assert verdict.ok, verdict


REMOVES = """
import os, shutil
here = os.getcwd()
os.chdir("/")
shutil.rmtree(here, ignore_errors=True)
"""


async def test_tests_fail_if_the_working_folder_was_removed(sandbox: Sandbox) -> None:
    async with await sandbox.fork() as branch:
        await branch.python(REMOVES)
        verdict = await branch.verify(code=TESTS)
        assert (verdict.passed, verdict.total) == (0, 3)
        assert all(verdict.cases.values())
    assert (await verified(sandbox, RIGHT, code=TESTS)).ok


async def test_endless_output_does_not_reach_the_host(sandbox: Sandbox) -> None:
    verdict = await sandbox.verify(code="def test_talks():\n    for _ in range(10**5): print('x' * 100)\n")
    head, _, note = verdict.output.partition("\n[... ")
    assert len(head) == 32 << 10
    assert note == f"{101 * 10**5 - len(head)} bytes cut ...]\n"


async def test_large_hidden_files_arrive_whole(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * (1 << 13)
    code = "def test_size():\n    assert open('deep/er/data', 'rb').read() == bytes(range(256)) * (1 << 13)"
    assert (await sandbox.verify(code=code, files={"deep/er/data": data})).ok


async def test_the_session_continues_after_verify(sandbox: Sandbox) -> None:
    await sandbox.python("x = 41")
    await sandbox.verify(code="def test_nothing(): pass")
    assert (await sandbox.python("x + 1")).stdout == "42\n"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "code="),
        ({"code": "def test_a(): pass", "command": "true"}, "code="),
        ({"code": "x = 1"}, "code: expected 1 to 900 top-level functions"),
        ({"code": "def ("}, "code: "),
        ({"code": b"def test_a(): pass"}, "code: must be text"),
        ({"code": "def test_a(): '\0'"}, "code: contains a null"),
        ({"code": "def test_a(): pass\ndef test_a(): pass"}, "code: test_a is defined twice"),
        ({"code": "def test_a(): pass\n" + "#" * (1 << 20)}, "code: the tests have"),
        ({"code": "def test_a(): pass\nclass TestB:\n    def test_b(self): pass"}, "code: the tests of class TestB"),
        ({"code": "", "expect": {}}, "expect: expected 1 to 900 cases, got 0"),
        ({"code": "", "expect": ["1"]}, "expect: expected a mapping from cases to expected values, got a list"),
        ({"code": "", "expect": {1: 1}}, "expect: must be text, got 1"),
        ({"code": "", "expect": {"1": {2}}}, "expect: {2} is not JSON"),
        ({"code": "", "expect": {"'\udcff'": 1}}, "expect: can't be encoded as UTF-8"),
        ({"command": "./solve", "expect": {"x" * (1 << 20): ""}}, "expect: the tests have"),
        ({"code": "", "expect": {"1": asyncio.sleep}}, "expect: the function for '1' is async"),
        ({"command": "true", "expect": {"": b"5"}}, "expect: the value for '' is a bytes"),
        (
            {"command": "python3 -W error -m pytest"},
            "must be followed by a file, -m MODULE or -c CODE",
        ),
        (
            {"command": ["python3"]},
            "must be followed by a file, -m MODULE or -c CODE",
        ),
        ({"command": "python3 'x"}, "command: "),
        ({"command": " "}, "command: expected a command, got an empty string"),
        ({"command": []}, "command: the first word"),
        ({"command": ["true", 1]}, "command: must be text, got 1"),
        ({"command": b"true"}, "command: expected a string or a sequence of words, got a bytes"),
        ({"command": "true", "files": {}}, "files: expected a mapping from paths to contents, got {}"),
        ({"command": "true", "files": {"": ""}}, "files: '' is not a plain path"),
        ({"command": "true", "files": {"../x": ""}}, "files: '../x' is not a plain path"),
        ({"command": "true", "files": {"/etc/x": ""}}, "files: '/etc/x' is not a plain path"),
        ({"command": "true", "files": {"a\udcff": ""}}, "files: can't be encoded as UTF-8"),
        ({"command": "true", "files": {"x" * 256: ""}}, "has a name longer than 255 bytes"),
        ({"command": "true", "files": {"a": "\udcff"}}, "files: the text of 'a' can't be encoded as UTF-8"),
        ({"command": "true", "files": {"a": 1}}, "files: the content of 'a' is a int"),
        ({"command": "true", "files": {"a": "", "a/b": ""}}, "files: 'a' and 'a/b' conflict"),
        ({"command": "true", "files": {"a.py": "", "a/__init__.py": ""}}, "files: 'a.py' and 'a/__init__.py'"),
        ({"command": "true", "files": {"a": bytes(9 << 20)}}, "files: 'a' has 9437184 bytes"),
        (
            {"command": "true", "files": {f"a{n}": bytes(8 << 20) for n in range(9)}},
            "files: the contents have 75497472 bytes in total",
        ),
        ({"command": "true", "files": {f"file{number}": "" for number in range(1000)}}, "files: 1000 files"),
        ({"command": "true", "timeout_s": 0.0}, "timeout_s"),
        ({"command": "true", "timeout_s": -1.0}, "timeout_s"),
        ({"command": "true", "timeout_s": float("nan")}, "timeout_s"),
        ({"command": "true", "timeout_s": float("inf")}, "timeout_s"),
    ],
)
async def test_invalid_arguments_are_refused_by_name_before_a_sandbox_is_used(given: dict[str, Any], says: str) -> None:
    async def run(*_: object) -> ExecResult:
        raise AssertionError("the sandbox was used")

    timeout_s = given.pop("timeout_s", 10.0)
    absent = {"code": None, "command": None, "files": None, "expect": None}
    with pytest.raises(ValueError, match=re.escape(says)):
        await verify(run, HiddenTests(**{**absent, **given}), timeout_s, copied=False)


async def test_a_fake_sandbox_really_runs_the_tests() -> None:
    sandbox = FakeSandbox(files={"solution.py": RIGHT})
    assert (await sandbox.verify(code=TESTS)).ok
    await sandbox.write({"solution.py": WRONG})
    assert (await sandbox.verify(code=TESTS)).passed == 1


async def test_a_sandbox_without_pytest_is_the_authors_mistake_whatever_code_claims() -> None:
    forged = {"pytest.py": "main = lambda *words, **more: 0\n", "_pytest/__init__.py": "", "_pytest/config.py": ""}
    python = "/usr/bin/python3"
    if importlib.machinery.PathFinder.find_spec("pytest", ["/usr/lib/python3/dist-packages"]):
        pytest.skip(f"{python} has pytest")
    async with make("bubblewrap", python=python).open(1) as pool, pool.lease() as sandbox:
        for files in ({}, forged):
            await sandbox.write(files)
            with pytest.raises(ValueError, match=r"^command: the sandbox has no pytest"):
                await sandbox.verify(command="python3 -m pytest", files={"test_hidden.py": "def test_it(): pass\n"})


async def test_no_case_can_claim_that_the_sandbox_lacks_a_package() -> None:
    judging = Judging("command", ["python3 -m pytest"], None)
    judging.report("python3 -m pytest", {"lacks": "pytest", "failed": "why"})
    result = ExecResult(status="ok", exit_code=0, stdout="", stderr="")
    assert judging.verdict(result).cases == {"python3 -m pytest": "why"}
