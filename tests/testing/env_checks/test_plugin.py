"""The pytest plugin in a user's project: an empty folder, the wheel, and no configuration."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECTS = Path(__file__).with_name("projects")


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of this checkout, unpacked where Python finds it before any other agentgym."""
    out = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(out)
    return out


def play(site: Path, folder: Path, *arguments: str) -> str:
    """Run pytest in that folder and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": f"{site}:{folder}", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def project(folder: Path, name: str) -> Path:
    """Write that test file alone into the folder, and return the folder."""
    (folder / f"test_{name}.py").write_text((PROJECTS / f"{name}.py").read_text())
    return folder


def test_an_asyncio_mode_in_the_projects_configuration_is_kept(site: Path, tmp_path: Path) -> None:
    folder = project(tmp_path, "plain")
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = strict\n")
    assert "mode=Mode.STRICT" in play(site, folder)
    (folder / "pytest.ini").unlink()
    assert "1 passed" in play(site, folder)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--asyncio-mode", "strict"), ("-o", "asyncio_mode=strict")])
def test_an_asyncio_mode_on_the_command_line_is_kept(site: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert "mode=Mode.STRICT" in play(site, project(tmp_path, "plain"), *words)


def test_without_pytest_asyncio_an_async_test_names_the_package_to_install(site: Path, tmp_path: Path) -> None:
    printed = play(site, project(tmp_path, "plain"), "-p", "no:asyncio")
    assert "an async test needs pytest-asyncio: pip install pytest-asyncio" in printed, printed
    assert "1 failed" in printed


@pytest.mark.parametrize("name", ["forgotten_await", "forgotten_async"])
def test_a_check_that_is_not_awaited_fails_its_test(name: str, site: Path, tmp_path: Path) -> None:
    printed = play(site, project(tmp_path, name))
    assert "check_env(Adder) was never awaited and checked nothing: write `await check_env(...)`" in printed, printed
    assert "1 failed, 1 passed" in printed


def test_a_test_that_leaks_something_fails_and_names_it(site: Path, tmp_path: Path) -> None:
    printed = play(site, project(tmp_path, "leaving"))
    assert "6 passed, 5 errors" in printed, printed
    for line in (
        r"the thread 'left' is still running, in wait \(threading\.py:\d+\)",
        r"the process \d+ \(\S+ -c input\(\)\) is still running",
        r"the file \S+test_leaving\.py is still open",
        r"the temporary folder \S+left-\S+ still exists",
        r"the asyncio task 'beat' \(Event\.wait\) is still running",
    ):
        assert re.search(line, printed), f"{line} is not in {printed}"


def test_the_thread_of_a_plain_tool_is_not_a_leak(site: Path, tmp_path: Path) -> None:
    printed = play(site, project(tmp_path, "plain_tools"), "-q")
    assert "300 passed" in printed, printed
