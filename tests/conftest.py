"""Fixtures and options that all tests share."""

import os
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def pytest_configure() -> None:
    """Let tests run as in a shell whose virtual environment is active.

    A shell's background job ignores Ctrl-C, and so would each process that a test starts and interrupts.
    """
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        type=int,
        default=1,
        metavar="N",
        help="run the first of the selected tests, and every Nth after it",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the requested share of the tests; the others are counted as deselected."""
    share: int = config.getoption("--share")
    if share <= 1:
        return
    left_out = [item for place, item in enumerate(items) if place % share]
    items[:] = items[::share]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("agentgym_kit-*.whl"))


@dataclass(frozen=True)
class Installed:
    """A virtual environment that holds the wheel; its dependencies are those of the Python that runs the tests."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin/python")

    def run(self, *command: str, cwd: Path, typed: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a command in a folder outside the checkout; the virtual environment's commands take precedence."""
        words, environment = self._words(command)
        return subprocess.run(words, cwd=cwd, env=environment, input=typed, capture_output=True, text=True, check=False)

    def start(self, *command: str, cwd: Path) -> "subprocess.Popen[str]":
        """Start a command like `run` and leave it to the caller; its stdout is a pipe, its stderr is the test's."""
        words, environment = self._words(command)
        return subprocess.Popen(words, cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)

    def _words(self, command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command with its path, and its environment."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTEST", "PYTHON", "VIRTUAL_ENV"))}
        path = f"{self.folder / 'bin'}:{kept['PATH']}"
        environment = kept | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        own = self.folder / "bin" / command[0]
        return [str(own) if own.exists() else command[0], *command[1:]], environment


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Install the wheel with pip in a separate virtual environment."""
    made = Installed(tmp_path_factory.mktemp("installed") / "venv")
    venv.create(made.folder, symlinks=True)
    found = subprocess.run(
        [made.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    # A .pth adds this folder after the environment's own, and this folder's .pth of the checkout isn't read.
    Path(found.stdout.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", made.python, "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-index", "--no-deps", str(wheel)], capture_output=True, text=True, check=False, cwd=made.folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return made
