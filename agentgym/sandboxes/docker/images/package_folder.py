"""A folder of packages for sandboxes that run this machine's Python: pip fills it once, and each sandbox mounts it."""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentgym.errors import SandboxError
from agentgym.files import names
from agentgym.machine.process_identity import dead_folders, new_folder, remove_folder
from agentgym.sandboxes.docker.images.build_log import BuildLog, announce

TIED = Path(__file__).with_name("tied.py")
FIRST_SITE = """
import json, os, site, sys
print(json.dumps([sys.version, next(iter(filter(os.path.isdir, site.getsitepackages())), None)]))
"""


@functools.cache
def package_binds(pip: tuple[str, ...], python: str) -> tuple[str, ...]:
    """Return bubblewrap's arguments that mount the packages where the interpreter looks for them; () without packages.

    If no folder for these packages and this interpreter exists yet, pip first installs them into a new one, with the
    user's pip settings. In the sandbox, the folder hides the host's packages. Unfinished folders of killed clients are
    removed.

    Args:
        pip: Packages to install.
        python: Path of the interpreter.

    Raises:
        SandboxError: If the installation fails; the message contains the end of pip's output.
    """
    if not pip:
        return ()
    for left in dead_folders(cache_folder()):
        remove_folder(left)
    version, site = _ask(python)
    key = hashlib.sha256(json.dumps([sorted(pip), python, version]).encode()).hexdigest()[:16]
    folder = cache_folder() / key
    if not folder.is_dir():
        announce(f"installing {' '.join(pip)} for {python} into {folder} (only once)")
        _install(pip, python, folder)
    return ("--ro-bind", str(folder), site)


def cache_folder() -> Path:
    """Return the folder that contains all package folders.

    For root, it is not in the home folder, so that the user inside a sandbox can reach it.
    """
    if os.geteuid() == 0:
        return Path("/var/cache/agentgym/packages")
    return names.cache_folder("packages")


def _ask(python: str) -> tuple[str, str]:
    """Return the interpreter's version, and the first of its site-packages folders that exists."""
    try:
        asked = subprocess.run([python, "-I", "-c", FIRST_SITE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SandboxError(f"pip: the sandboxes' interpreter does not run: {error}") from error
    version, site = json.loads(asked.stdout)
    if site is None:
        raise SandboxError(
            f"pip: {python} has no site-packages folder; create one of the folders that `python -m site` lists"
        )
    return version, site


def _install(pip: Sequence[str], python: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    new = new_folder("packages", target.parent)
    try:
        install = ["install", "--no-input", "--target", str(new), "--", *pip]
        command = [sys.executable, "-m", "pip", "--python", python, *install]
        said = BuildLog()
        # Run by a program that kills pip if this process ends: pip starts a child, which doesn't watch its parent.
        tied = [sys.executable, "-I", "-S", "-B", str(TIED), *command]
        with subprocess.Popen(tied, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            said.read(process.stdout)
        if process.returncode:
            raise SandboxError(f"pip failed with exit code {process.returncode}:\n{said}")
        for path in (new, *new.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        if not target.is_dir():  # Another process may have been faster.
            new.rename(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
