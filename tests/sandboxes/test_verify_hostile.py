"""Cheats against hidden tests: prepared files, forged reports, objects that lie about their value, and load."""

import textwrap
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest

from agentgym.sandboxes.fake.sandbox import FakeSandbox
from agentgym.sandboxes.hidden_tests.judging import MAX_OUTPUT, Judging
from agentgym.sandboxes.protocol import ExecResult, Sandbox
from agentgym.sandboxes.remote.sandbox import RemoteSandbox
from tests.sandboxes.conftest import others_slow

pytestmark = pytest.mark.asyncio(loop_scope="module")

FORGE = """
import subprocess
class Ended:
    stdout = "5"
subprocess.run = lambda *args, **more: Ended
"""
"""Makes every program print the output that the hidden test expects, without using the tested code."""
STARTS = "import os\nos._exit(0)\n"
WRONG = "print(2 - 3)"
RIGHT = "print(2 + 3)"
HIDDEN = {
    "tests/helpers.py": "right = 5\n",
    "tests/test_hidden.py": """
import decimal, subprocess, sys, unittest
import helpers

class Hidden(unittest.TestCase):
    def test_printed(self):
        ran = subprocess.run([sys.executable, "solution.py"], stdout=subprocess.PIPE)
        self.assertEqual(int(ran.stdout), helpers.right)
""",
}
"""Tests that never import the tested code: if wrong code passes, prepared files made it pass."""
PLUGIN = FORGE + "\ndef pytest_collection_modifyitems(items):\n    del items[:]\n"
CONFIG = "addopts = -p cheat\npython_files = cheat.py\n"
PREPARED = {
    "packages": {"__init__.py": FORGE, "tests/__init__.py": FORGE, "tests/test_hidden/__init__.py": FORGE},
    "modules of the library": dict.fromkeys(
        ("decimal.py", "tests/decimal.py", "json.py", "unittest.py", "unittest/__init__.py", "tests/unittest.py"), FORGE
    ),
    "modules of the tests": {
        "helpers.py": FORGE + "right = -1\n",
        "tests/helpers/__init__.py": FORGE + "right = -1\n",
        "test_hidden.py": FORGE,
        "tests.py": FORGE,
    },
    "start-up files": {
        name: STARTS
        for folder in ("", "tests/", ".local/lib/python3.11/site-packages/")
        for name in (f"{folder}sitecustomize.py", f"{folder}usercustomize.py")
    }
    | {"cheat.pth": "import os; os._exit(0)\n", ".pythonrc": STARTS, "pyvenv.cfg": "home = /tmp\n"},
    "plugins": dict.fromkeys(("conftest.py", "tests/conftest.py", "test_more/conftest.py"), PLUGIN)
    | {"pytest.py": FORGE, "_pytest/__init__.py": FORGE, "cheat.py": PLUGIN},
    "configuration": {
        "cheat.py": PLUGIN,
        "pytest.ini": f"[pytest]\n{CONFIG}",
        ".pytest.ini": f"[pytest]\n{CONFIG}",
        "tests/pytest.ini": f"[pytest]\n{CONFIG}",
        "tox.ini": f"[pytest]\n{CONFIG}",
        "setup.cfg": f"[tool:pytest]\n{CONFIG}",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p cheat"\n',
    },
}
"""Files that a session leaves next to hidden tests, by kind."""
FORGE_BYTE_CODE = """
import os, py_compile, sys
open("forged.py", "w").write(FORGE)
for path in ("tests/helpers", "tests/test_hidden", "tests/__init__", "solution"):
    folder, _, name = path.rpartition("/")
    cache = os.path.join(folder, "__pycache__")
    os.makedirs(cache, exist_ok=True)
    for target in (f"{cache}/{name}.{sys.implementation.cache_tag}.pyc", f"{path}.pyc"):
        py_compile.compile("forged.py", target, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    os.makedirs(f"{cache}/deep/er", exist_ok=True)
for folder in ("__pycache__/deep", "__pycache__", "tests/__pycache__/deep", "tests/__pycache__"):
    os.chmod(folder, 0o500)
"""
LINKS = """
import os
os.makedirs("mine/elsewhere")
for name in ("__init__.py", "helpers.py", "mine/helpers.py", "mine/__init__.py"):
    open(name, "w").write(FORGE)
os.symlink("mine", "tests")
os.symlink("elsewhere", "mine/__pycache__")
os.symlink("../solution.py", "mine/test_hidden.py")
"""
LEFT = {"forged bytecode": FORGE_BYTE_CODE, "links": LINKS}
"""Cells that leave files that no host could write, by kind."""
COMMANDS = ["python3 -m unittest tests.test_hidden", "python3 -m unittest discover -s tests"]


@pytest.mark.parametrize("prepared", others_slow(PREPARED, "start-up files"))
async def test_no_prepared_file_changes_what_unittest_finds(sandbox: Sandbox, prepared: str) -> None:
    await sandbox.write(PREPARED[prepared])
    await expect_honest_verdicts(sandbox, COMMANDS)


@pytest.mark.parametrize("left", LEFT)
async def test_no_bytecode_or_link_changes_what_unittest_finds(sandbox: Sandbox, left: str) -> None:
    assert (await sandbox.python(f"FORGE = {FORGE!r}\n{LEFT[left]}")).ok
    await expect_honest_verdicts(sandbox, COMMANDS)


async def expect_honest_verdicts(sandbox: Sandbox, commands: list[str], more: Mapping[str, str] | None = None) -> None:
    """Assert that the one test is found, passes for right code, and fails for wrong code."""
    for solution in (RIGHT, WRONG):
        await sandbox.write({"solution.py": solution})
        for command in commands:
            verdict = await sandbox.verify(command=command, files={**HIDDEN, **(more or {})}, timeout_s=60)
            assert [name.endswith("test_printed") for name in verdict.cases] == [True], verdict
            assert verdict.ok == (solution == RIGHT), (command, verdict)


@pytest.mark.parametrize("prepared", others_slow(PREPARED, "start-up files"))
async def test_no_prepared_file_changes_what_pytest_finds(prepared: str) -> None:
    await expect_honest_verdicts(FakeSandbox(files=PREPARED[prepared]), ["python3 -m pytest"])


@pytest.mark.slow
@pytest.mark.parametrize("prepared", ["packages", "plugins", "configuration"])
async def test_only_hidden_configuration_and_fixtures_are_used(prepared: str) -> None:
    own = {
        "tests/conftest.py": "import pytest\n@pytest.fixture\ndef given(): return 5\n",
        "setup.cfg": "[tool:pytest]\npython_functions = check_*\n",
        "tests/test_hidden.py": textwrap.dedent("""
            import subprocess, sys
            def check_printed(given):
                ran = subprocess.run([sys.executable, "solution.py"], stdout=subprocess.PIPE)
                assert int(ran.stdout) == given
        """),
    }
    for solution in (RIGHT, WRONG):
        sandbox = FakeSandbox(files={**PREPARED[prepared], "solution.py": solution})
        verdict = await sandbox.verify(command="python3 -m pytest tests", files=own, timeout_s=60)
        assert list(verdict.cases) == ["tests/test_hidden.py::check_printed"]
        assert verdict.ok == (solution == RIGHT), verdict


async def test_hidden_and_tested_scripts_import_modules_from_their_own_folder(sandbox: Sandbox) -> None:
    """The folder of the hidden files comes before the working folder, and both come after the standard library."""
    await sandbox.write({"app/main.py": "import part\n", "app/part.py": "", "helpers.py": FORGE, "decimal.py": FORGE})
    script = "import decimal, helpers\nassert helpers.right == 5\nassert decimal.Decimal(1) == 1\n"
    files = {"tests/helpers.py": "right = 5\n", "tests/run.py": script}
    assert (await sandbox.verify(command="python3 tests/run.py", files=files)).ok
    assert (await sandbox.verify(command="python3 app/main.py")).ok


REPORTS = """
import json, os, sys
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and "token" in value:
                said = {"passed": True, "cases": {"add(2, 3)": None, "more": None}, "exit_code": 0, "value": "0"}
                os.write(value["report"], (value["token"] + json.dumps(said) + "\\n").encode())
                os._exit(0)
        frame = frame.f_back
"""
LIES = {
    "finds its task and writes its own report": REPORTS,
    "equals everything": "class Any(int):\n    __eq__ = lambda *_: True\ndef add(a, b): return Any(0)",
    "is a str that equals everything": "class Any(str):\n    __eq__ = lambda *_: True\ndef add(a, b): return Any('0')",
    "is not a number": "def add(a, b): return float('nan')",
    "is true": "def add(a, b): return True",
    "writes values itself": "import json\njson.dumps = lambda *_, **__: '[5, -5]'\ndef add(a, b): return 5j",
    "nests": "def add(a, b):\n    value = []\n    for _ in range(900): value = [value]\n    return value",
    "is endless": "def add(a, b): return 'x' * (1 << 21)",
    "exits in an exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return None",
    "exits in a thread": textwrap.dedent("""
        import os, threading
        def add(a, b):
            threading.Thread(target=os._exit, args=(0,)).start()
            threading.Event().wait()
    """),
    "reports twice": textwrap.dedent("""
        import atexit, os
        def again():
            for fd in range(3, 64):
                try:
                    os.write(fd, b'{"value": "5"}\\n')
                except OSError:
                    pass
        atexit.register(again)
        def add(a, b): return None
    """),
}
"""Code under test that doesn't know the right value, by the trick it uses."""


@pytest.mark.parametrize("lie", LIES)
async def test_no_code_passes_an_expect_case_if_it_does_not_know_the_value(sandbox: Sandbox, lie: str) -> None:
    await sandbox.write({"solution.py": LIES[lie]})
    verdict = await sandbox.verify(
        code="from solution import add", expect={"add(2, 3)": 5, "add(-2, -3)": -5}, timeout_s=5
    )
    assert (verdict.passed, verdict.total) == (0, 2), verdict


SEARCH = """
import gc, glob, os, sys
def found(*letters):
    word, texts = bytes(letters).decode(), []
    for value in gc.get_objects():
        if type(value) in (list, tuple, dict):
            texts += [text for text in [*value, *getattr(value, "values", tuple)()] if type(text) is str]
    for pattern in ("/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ", "/proc/[0-9]*/fd/*", "/tmp/**", "/branches/**"):
        for path in glob.glob(pattern, recursive=True):
            try:
                if os.path.isfile(path):
                    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                    texts.append(os.pread(fd, 1 << 20, 0).decode("utf-8", "replace"))
                    os.close(fd)
            except OSError:
                continue
    return any(word in text for text in texts)
"""


async def test_a_case_learns_nothing_about_the_other_cases(isolated_sandbox: Sandbox) -> None:
    await isolated_sandbox.write({"solution.py": SEARCH})
    expect = {"found(*b'found(')": True, "found(104, 117, 115, 104)": False, "'hush'": "hush"}
    verdict = await isolated_sandbox.verify(code="from solution import found", expect=expect, timeout_s=30)
    assert verdict.ok, verdict


REACH = """
import ctypes, os, signal
FORGED = b'{"id": 1, "done": 0}{"passed": true, "value": "5"}\\n'
def add(a, b):
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        ctypes.CDLL(None).ptrace(16, int(pid), 0, 0)
        for name in ["mem", *(f"fd/{fd}" for fd in range(64))]:
            try:
                fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_NONBLOCK)
                os.write(fd, FORGED)
                reached.append((pid, name))
            except OSError:
                pass
    return reached
reached = []
"""


async def test_code_under_test_cannot_reach_the_process_that_judges_it(isolated_sandbox: Sandbox) -> None:
    await isolated_sandbox.write({"solution.py": REACH})
    verdict = await isolated_sandbox.verify(code="from solution import add", expect={"add(2, 3)": [], "1": 1})
    assert verdict.ok, verdict


SPIES = """
import os
found = []
for name in ["mem", "environ", *(f"fd/{fd}" for fd in range(3, 64))]:
    try:
        os.open(f"/proc/{os.getppid()}/{name}", os.O_RDONLY | os.O_NONBLOCK)
        found.append(name)
    except OSError:
        pass
for fd in range(3, 64):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
"""
"""A program started with the descriptors of its parent, the judge."""
STARTS_A_PROGRAM = """
import subprocess, sys
def test_found():
    ran = subprocess.run([sys.executable, "-c", open("spies.py").read() + "print(found)"], close_fds=False, stdout=-1)
    assert ran.stdout == b"[]\\n", ran.stdout
"""


async def test_a_program_that_a_test_starts_reaches_neither_report_nor_judge(isolated_sandbox: Sandbox) -> None:
    await isolated_sandbox.write({"spies.py": SPIES})
    verdict = await isolated_sandbox.verify(code=STARTS_A_PROGRAM)
    assert verdict.ok, verdict


FORGES_IMPORTS = """
import os, py_compile
FORGED = '''
import os, sys
frame = sys._getframe()
while "orders" not in frame.f_locals:
    frame = frame.f_back
orders = frame.f_locals["orders"]
os.write(orders["report"], (orders["token"] + '{"passed": true, "cases": {"all": null}}' + chr(10)).encode())
os._exit(0)
'''
for name in ("hidden", "fresh"):
    try:
        os.rename(f"/branches/{name}", f"/branches/old-{name}")
    except OSError:
        pass
home = os.environ["HOME"]
for folder in (home, home + "/..", home + "/../hidden", "/branches", "/branches/hidden", "/branches/fresh", "."):
    for path in (f"{folder}/org/__init__.py", f"{folder}/helper.py", f"{folder}/usercustomize.py"):
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.chmod(folder, 0o777)
            if os.path.exists(path):
                os.unlink(path)
            open(path, "w").write(FORGED)
            py_compile.compile(path, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        except OSError:
            pass
print(41)
"""
"""Leaves modules wherever its judge may look, and in place of hidden ones."""
IMPORTS_LATE = """
import subprocess, sys
out = subprocess.run([sys.executable, "solution.py"], stdout=-1).stdout
import pickle, multiprocessing.pool, helper
assert int(out) == helper.right, out
"""
WITH_HELPER = {"helper.py": "right = 42\n"}
CASE_LATE = "import unittest\nclass Late(unittest.TestCase):\n    def test_late(self):"
LATE: dict[str, dict[str, Any]] = {
    "function": {"code": f"def test_late():{textwrap.indent(IMPORTS_LATE, ' ' * 4)}", "files": WITH_HELPER},
    "script": {"command": "python3 check.py", "files": {**WITH_HELPER, "check.py": IMPORTS_LATE}},
    "unittest": {
        "command": "python3 -m unittest",
        "files": {**WITH_HELPER, "test_late.py": CASE_LATE + textwrap.indent(IMPORTS_LATE, " " * 8)},
    },
}
"""Tests that import after the tested program ran: their own module, and one that looks for a module no Linux has."""


@pytest.mark.parametrize("given", LATE)
async def test_no_program_that_a_test_starts_can_write_modules_that_its_judge_imports(
    isolated_sandbox: Sandbox, given: str
) -> None:
    if isinstance(isolated_sandbox, RemoteSandbox) and isolated_sandbox.reset_in_place:
        pytest.skip("sandboxes are reset in place: hidden files are not read-only there")
    await isolated_sandbox.write({"solution.py": FORGES_IMPORTS})
    verdict = await isolated_sandbox.verify(**LATE[given], timeout_s=60)
    assert ["AssertionError" in (why or "") for why in verdict.cases.values()] == [True], verdict
    await isolated_sandbox.write({"solution.py": "print(42)"})
    assert (await isolated_sandbox.verify(**LATE[given], timeout_s=60)).ok


JUDGE_ENDERS = {
    "kills it": "import os\ndef add(a, b): os.kill(os.getppid(), 9)",
    "stops it": "import os\ndef add(a, b): os.kill(os.getppid(), 19)",
    "kills all": "import os\ndef add(a, b): os.kill(-1, 9)",
    "interrupts it": "import os\ndef add(a, b): os.kill(os.getppid(), 2)\n",
    "limits it": "import resource, os\ndef add(a, b): resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))",
}
"""Code that ends or stops the process that runs the cases, by its method."""


@pytest.mark.parametrize("ender", JUDGE_ENDERS)
async def test_code_that_ends_or_stops_its_judge_gets_a_verdict_and_no_reward(
    isolated_sandbox: Sandbox, ender: str
) -> None:
    await isolated_sandbox.write({"solution.py": JUDGE_ENDERS[ender]})
    code = "from solution import add\ndef test_a(): assert add(2, 3) == 5\ndef test_b(): assert add(1, 1) == 2\n"
    verdict = await isolated_sandbox.verify(code=code, timeout_s=2)
    assert (verdict.passed, verdict.total) == (0, 2)
    assert all(verdict.cases.values())
    assert (await isolated_sandbox.python("1 + 1")).stdout == "2\n"


SPOIL = """
import glob, os
for path in [*glob.glob("**", recursive=True), *glob.glob(os.environ["HOME"] + "/../../**", recursive=True)]:
    if path.endswith(("check.sh", "answer.txt")):
        with open(path, "w") as file:
            file.write("echo forged")
os.makedirs("__pycache__", exist_ok=True)
"""


async def test_hidden_files_are_written_again_for_each_case(sandbox: Sandbox) -> None:
    await sandbox.write({"solution.py": SPOIL})
    files = {"check.sh": "cat answer.txt; python3 solution.py\n", "answer.txt": "right\n"}
    verdict = await sandbox.verify(command="sh check.sh", files=files, expect={"one": "right", "two": "right"})
    assert verdict.ok, verdict


WRITES = """
def spoil(folder):
    for name in ("solution.py", "left"):
        with open(f"{folder}/{name}", "a") as file:
            file.write("# changed")
"""


async def test_files_that_code_under_test_writes_by_absolute_path_are_not_in_the_session(
    isolated_sandbox: Sandbox,
) -> None:
    if isinstance(isolated_sandbox, RemoteSandbox) and isolated_sandbox.reset_in_place:
        pytest.skip("sandboxes are reset in place: code under test reaches the session's folder")
    await isolated_sandbox.write({"solution.py": WRITES})
    here = (await isolated_sandbox.python("import os; print(os.getcwd())")).stdout.strip()
    verdict = await isolated_sandbox.verify(code="from solution import spoil", expect={f"spoil({here!r})": None})
    assert verdict.ok, verdict
    assert await isolated_sandbox.list() == ["solution.py"]
    assert await isolated_sandbox.read("solution.py") == WRITES.encode()


CLOSES = """
import os
def close():
    for folder in (".", os.environ["HOME"] + "/../.."):
        os.chmod(folder, 0)
"""


async def test_a_case_that_locks_the_folders_fails_no_other_case(isolated_sandbox: Sandbox) -> None:
    await isolated_sandbox.write({"solution.py": CLOSES})
    expect = {"close()": None, "1": 1}
    code = "from solution import close"
    verdict = await isolated_sandbox.verify(code=code, files={"data/it": ""}, expect=expect, timeout_s=30)
    assert verdict.ok, verdict


BOMB = """
import os
def burst():
    while True:
        try:
            os.fork()
        except OSError:
            pass
"""


@pytest.mark.slow
async def test_only_the_case_that_forks_endlessly_fails(isolated_sandbox: Sandbox) -> None:
    await isolated_sandbox.write({"solution.py": BOMB})
    code = "from solution import burst\ndef test_bursts(): burst()\ndef test_after(): pass\n"
    verdict = await isolated_sandbox.verify(code=code, timeout_s=10)
    assert [why is None for why in verdict.cases.values()] == [False, True], verdict


async def test_cases_share_one_copy_at_the_working_folders_path(isolated_sandbox: Sandbox) -> None:
    assert isinstance(isolated_sandbox, RemoteSandbox)
    here = (await isolated_sandbox.python("import os; print(os.getcwd())")).stdout.strip()
    await isolated_sandbox.write({"mark": ""})
    code = "import os\ndef spoil():\n    os.unlink('mark')\n    return os.getcwd()\n"
    verdict = await isolated_sandbox.verify(code=code, expect={"spoil()": here})
    assert verdict.ok == (not isolated_sandbox.reset_in_place)
    assert "mark" in await isolated_sandbox.list()


async def test_output_of_all_cases_is_bounded_and_the_cut_is_reported(sandbox: Sandbox) -> None:
    await sandbox.write({"solution.py": "print('x' * 700_000)"})
    texts = {str(number): lambda text: len(text) == 700_001 for number in range(4)}
    verdict = await sandbox.verify(command="python3 solution.py", expect=texts, timeout_s=30)
    assert verdict.ok, list(verdict.cases.values())
    assert verdict.output.endswith(f"\n[... {4 * 700_001 - MAX_OUTPUT} characters cut ...]\n")
    assert len(verdict.output) < MAX_OUTPUT + 100


async def test_the_host_keeps_no_output_of_a_judged_case() -> None:
    expect: dict[str, object] = {str(number): "right" for number in range(900)}
    judging = Judging("shell", list(expect), expect)
    tracemalloc.start()
    try:
        for name in expect:
            judging.report(name, {"exit_code": 0, "printed": name + "x" * (1 << 20)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    verdict = judging.verdict(ExecResult(status="ok", exit_code=0, stdout="", stderr=""))
    assert (verdict.passed, verdict.total) == (0, 900)
    assert peak < 16 << 20


async def test_a_reason_is_bounded() -> None:
    judging = Judging("function", ["test_a"], None)
    judging.report("test_a", {"failed": "x" * (1 << 20)})
    why: Any = judging.verdict(ExecResult(status="ok", exit_code=0, stdout="", stderr="")).cases["test_a"]
    assert len(why) <= 1000


HALF = "half = '\\ud800 bad'\ndef add(a, b): raise ValueError(half)\ndef value(): return half\n"
HALF_NAMED = """
import solution, unittest
class Half(unittest.TestCase):
    def test_add(self): solution.add(2, 3)
setattr(Half, "test_" + solution.half, lambda self: print(ascii(solution.half)))
"""


async def test_reasons_names_and_output_can_be_written_to_a_file(sandbox: Sandbox) -> None:
    await sandbox.write({"solution.py": HALF})
    raised = await sandbox.verify(code="from solution import add\ndef test_add(): add(2, 3)\n")
    compared = await sandbox.verify(code="from solution import value", expect={"value()": 5})
    named = await sandbox.verify(command="python3 -m unittest", files={"test_half.py": HALF_NAMED})
    for verdict in (raised, compared, named):
        "".join([*verdict.cases, *(why or "" for why in verdict.cases.values()), verdict.output]).encode()
    assert raised.cases == {"test_add": "ValueError: \\ud800 bad (solution.py:2)"}
    assert compared.cases == {"value()": r"'\ud800 bad' is not right"}
    assert {name: why is None for name, why in named.cases.items()} == {
        "test_half.Half.test_add": False,
        "test_half.Half.test_\\ud800 bad": True,
    }


async def test_a_command_with_much_output_is_judged_by_its_exit_code(sandbox: Sandbox) -> None:
    verdict = await sandbox.verify(command="head -c 2000000 /dev/zero; true")
    assert verdict.ok
    assert verdict.output.endswith("bytes cut ...]\n")


TWO_FILES = {
    "test_easy.py": "def test_easy():\n    pass\n",
    "test_hard.py": "from solution import f\ndef test_hard():\n    assert f() == 42\n",
}
SUBTESTS = """
import unittest
from solution import f

class Sub(unittest.TestCase):
    def test_each(self):
        for right in (f(), 42):
            with self.subTest(right=right):
                self.assertEqual(f(), right)
"""
RUN_BY_ITSELF = {"run.py": "import sys, pytest\nsys.exit(pytest.main(['-q']))\n", **TWO_FILES}
COLLECT_ONLY = "[pytest]\naddopts = --collect-only\n"
HIDE_THE_HARD = "def pytest_collection_modifyitems(items):\n    items[:] = items[:1]\n"
SKIPS_MODULE = "import pytest\npytest.skip('hard', allow_module_level=True)\n"


@pytest.mark.parametrize(
    ("left", "tests"),
    [
        ({"solution.py": SKIPS_MODULE}, TWO_FILES),
        ({"solution.py": "f = int"}, {"test_sub.py": SUBTESTS}),
    ],
    ids=["skips a module", "fails a subtest"],
)
async def test_no_pytest_test_is_skipped_or_fails_unnoticed(left: dict[str, str], tests: dict[str, str]) -> None:
    verdict = await FakeSandbox(files=left).verify(command="python3 -m pytest -q", files=tests, timeout_s=120)
    assert not verdict.ok
    assert all(case.startswith("test_") for case in verdict.cases)


@pytest.mark.parametrize(
    "left",
    [
        {"solution.py": SKIPS_MODULE},
        {"solution.py": "f = int", "pytest.ini": COLLECT_ONLY},
        {"solution.py": "f = int", "conftest.py": HIDE_THE_HARD},
    ],
    ids=["skips a module", "configures", "hides a test"],
)
async def test_a_hidden_script_that_runs_pytest_overlooks_nothing(left: dict[str, str]) -> None:
    verdict = await FakeSandbox(files=left).verify(command="python3 run.py", files=RUN_BY_ITSELF, timeout_s=120)
    assert not verdict.ok


async def test_a_hidden_script_that_runs_pytest_passes_right_code() -> None:
    sandbox = FakeSandbox(files={"solution.py": "f = lambda: 42"})
    assert (await sandbox.verify(command="python3 run.py", files=RUN_BY_ITSELF, timeout_s=120)).ok


async def test_an_interrupted_unittest_run_fails_the_tests_that_did_not_run() -> None:
    tests = "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n"
    tests += "    def test_a(self): f()\n    def test_b(self): self.assertEqual(f(), 42)\n"
    sandbox = FakeSandbox(files={"solution.py": "import os, signal\ndef f(): os.kill(os.getpid(), signal.SIGINT)\n"})
    verdict = await sandbox.verify(command="python3 -m unittest -c test_u", files={"test_u.py": tests}, timeout_s=60)
    assert verdict.cases == {"test_u.T.test_a": None, "test_u.T.test_b": "the test did not finish"}


@pytest.mark.parametrize(
    "command", ["python3 -m unittest --locals=1", "python3 -munittest", "python3 -B -c 'import test_u; (1)'"]
)
async def test_options_of_a_plain_command_never_reach_a_shell(command: str) -> None:
    sandbox = FakeSandbox(files={"solution.py": STARTS})
    verdict = await sandbox.verify(command=command, files={"test_u.py": "import solution"}, timeout_s=60)
    assert verdict.passed == 0
