"""Where hidden tests and their libraries find modules: a library never finds its own among the files of an episode."""

import sys
from pathlib import Path
from typing import Any

import pytest

from agentgym.sandboxes.fake.sandbox import FakeSandbox
from agentgym.sandboxes.protocol import Sandbox, Verdict
from agentgym.sandboxes.server_files import server_files

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLANTED = "import os\nos.write(2, b'FORGED by ' + __name__.encode())\n"
NAMES = (
    *(
        "msvcrt",
        "_winapi",
        "_overlapped",
        "winreg",
        "nt",
        "java",
        "org",
        "vms_lib",
        "_scproxy",
        "readline_",
        "ntsecuritycon",
    ),
    *(
        "sitecustomize",
        "usercustomize",
        "apport_python_hook",
        "tomli",
        "exceptiongroup",
        "colorama",
        "pygments",
        "attr",
    ),
    *("numpy", "argcomplete", "pexpect", "zope", "twisted", "xdist", "pytest_missing", "typing_extensions", "mock"),
)
"""Modules that the standard library, pytest or its plugins try to import and that may not be installed anywhere."""
DIST_INFO = {
    "forged-9.dist-info/METADATA": "Metadata-Version: 2.1\nName: forged\nVersion: 9\n",
    "forged-9.dist-info/entry_points.txt": "[pytest11]\nforged = numpy\n[console_scripts]\nforged = numpy:main\n",
}
LEFT: dict[str, str | bytes] = {
    **{f"{name}.py": PLANTED for name in NAMES},
    **{f"{name}/__init__.py": PLANTED for name in ("attrs", "win32security", "_pytest_extra")},
    **DIST_INFO,
    "lib.pth": "import os; os.write(2, b'FORGED by pth')\n",
    "solution.py": "import msvcrt_of_mine\ndef add(a, b):\n    import beside\n    return a - b\n",
    "msvcrt_of_mine.py": "",
    "beside/__init__.py": "",
}
LIBRARIES = (
    "import subprocess, asyncio, ctypes.util, getpass, webbrowser, pickle, unittest.mock, platform, uuid, site\n"
)
"""Modules of the standard library, some of which try to import modules that no Linux has."""
ENTRIES = (
    "import importlib.metadata as m\nassert not [d for d in m.distributions() if d.metadata['Name'] == 'forged']\n"
)
LOOK = f"{LIBRARIES}def look():\n    assert subprocess.run(['true']).returncode == 0\n"
CASE = "class Case(unittest.TestCase):\n    def test_look(self): look()\n"
TEST_CASE = f"{LOOK}{CASE}if __name__ == '__main__': unittest.main()\n"
GIVEN: dict[str, dict[str, Any]] = {
    "function": {"code": f"{LOOK}def test_look(): look()\n"},
    "value": {"code": LOOK, "expect": {"look()": None}},
    "unittest": {"command": "python3 -m unittest hidden", "files": {"hidden.py": TEST_CASE}},
    "module": {"command": "python3 -m hidden", "files": {"hidden.py": TEST_CASE}},
    "code": {"command": "python3 -c 'import hidden'", "files": {"hidden.py": f"{LOOK}look()\n"}},
    "script": {"command": "python3 tests/hidden.py", "files": {"tests/hidden.py": TEST_CASE}},
}


def seen(verdict: Verdict) -> str:
    return verdict.output + verdict.result.text()


@pytest.mark.parametrize("given", GIVEN)
async def test_no_library_finds_its_modules_in_the_working_folder(sandbox: Sandbox, given: str) -> None:
    await sandbox.write(LEFT)
    verdict = await sandbox.verify(**GIVEN[given], timeout_s=30)
    assert verdict.ok, verdict
    assert "FORGED" not in seen(verdict)
    assert "looked for 'msvcrt'" in seen(verdict)  # This tells the author that a planted module was found.


async def test_pytest_and_its_plugins_find_none_of_their_modules_in_the_working_folder() -> None:
    tests = f"import pytest\n{LOOK}def test_look(): look()\ndef test_fails(): assert [1, 2] == [1, 3]\n"
    verdict = await FakeSandbox(files=LEFT).verify(
        command="python3 -m pytest", files={"test_it.py": tests}, timeout_s=60
    )
    assert [why is None for why in verdict.cases.values()] == [True, False], verdict
    assert "FORGED" not in seen(verdict)


async def test_libraries_of_fresh_cells_find_no_modules_in_the_working_folder(sandbox: Sandbox) -> None:
    await sandbox.write(LEFT)
    result = await sandbox.python(f"{LOOK}look()\nimport solution\nsolution.add(2, 3)", fresh=True, timeout_s=30)
    assert result.stdout == "-1\n", result
    assert "FORGED" not in result.stderr


async def test_tests_and_tested_code_find_their_own_modules(sandbox: Sandbox) -> None:
    """Through statements, names, code in strings and mocks, in packages with and without `__init__.py`."""
    await sandbox.write({"solution.py": "import msvcrt\nfrom app.part import one\nexec('import late')\n"})
    await sandbox.write({"msvcrt.py": "mine = 1\n", "app/part.py": "one = 1\n", "late.py": "", "other.py": "x = 1\n"})
    code = """
import importlib
from unittest import mock
@mock.patch("other.x", 2)
def test_mock():
    import other
    assert other.x == 2
def test_statement():
    import solution
    assert solution.msvcrt.mine == solution.one == 1
def test_name():
    assert importlib.import_module("app.part").one == 1
    assert importlib.util.find_spec("late") is not None
def test_text():
    names = {}
    exec("import late", names)
    assert names["late"].__file__
"""
    verdict = await sandbox.verify(code=code, timeout_s=30)
    assert verdict.ok, verdict
    assert (await sandbox.verify(command="python3 -m app.part")).ok
    case = "class T(unittest.TestCase):\n    def test(self): pass\n"
    files = {"app/test_it.py": f"import unittest\nfrom app.part import one\n{case}"}
    assert (await sandbox.verify(command="python3 -m unittest app.test_it", files=files)).ok


async def test_an_installed_package_gets_no_submodules_from_the_working_folder(sandbox: Sandbox) -> None:
    """Neither a namespace package, nor one that looks for its parts along sys.path."""
    await sandbox.write(
        {"spread/__init__.py": PLANTED, "spread/extra.py": PLANTED, "wide/__init__.py": "", "wide/extra.py": PLANTED}
    )
    hidden = {
        "installed/spread/core.py": "try:\n    import spread.extra\nexcept ImportError: pass\n",
        "installed/wide/__init__.py": "import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n",
        "installed/wide/core.py": "try:\n    import wide.extra\nexcept ImportError: pass\n",
    }
    # Copied out of the hidden files, as an installed package would be.
    code = """
import os, shutil, sys, tempfile
def test_it():
    place = tempfile.mkdtemp()
    shutil.copytree(os.path.join(sys.path[-2], "installed"), place, dirs_exist_ok=True)
    sys.path.insert(0, place)
    import spread.core, wide.core
    sys.path.append("/nonexistent")
    import wide.core
    assert "spread.extra" not in sys.modules and "wide.extra" not in sys.modules
"""
    verdict = await sandbox.verify(code=code, files=hidden, timeout_s=30)
    assert verdict.ok, verdict
    assert "FORGED" not in seen(verdict)


async def test_a_namespace_package_keeps_the_path_it_was_found_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own search would look along sys.path again after it changed, and find the folder's part."""
    found: dict[str, Any] = {"__name__": "imports"}
    exec(server_files()["imports.py"], found)
    for part in ("work/spread", "installed/spread"):
        (tmp_path / part).mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), str(tmp_path / "work")])
    spec = found["OwnImports"](str(tmp_path / "work"), ()).find_spec("spread")
    sys.path.append(str(tmp_path))
    assert list(spec.submodule_search_locations) == [str(tmp_path / "installed/spread")]
