"""The runs that the page offers, found below the given folders, each with a short key for its URL."""

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agentgym.files.folder_lock import LOCK
from agentgym.files.foreign.content import read_object
from agentgym.files.foreign.opening import read_bytes
from agentgym.run.metrics_logger import METRICS
from agentgym.run.recorder import SUMMARY
from agentgym.store.reader import RolloutStore
from agentgym.store.run_settings import SETTINGS
from agentgym.store.schema import FILE, StoreError
from agentgym.view.answers import Refused
from agentgym.view.metrics import Progress

LOOK_AGAIN_S = 2.0
"""Seconds between searches for new runs."""
DEEPEST = 6
"""Maximum number of levels below a given folder at which runs are searched for."""
LARGEST_JSON = 32 << 20
"""Largest number of bytes in settings.json and summary.json."""
LARGEST_LOCK = 4096
STILL_S = 120.0
"""Seconds that a run counts as active after its last write, if its process can't be seen from this machine."""
NO_RUNS = ("node_modules", "site-packages", "__pycache__")
"""Folders that are never searched."""
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Run:
    """Reads the folder of one run or evaluation."""

    key: str
    """The run's name in URLs: the folder's name and a hash of its full path."""
    folder: Path
    name: str

    @property
    def kind(self) -> Literal["train", "eval"]:
        """Whether this is a training run or an evaluation."""
        return "train" if "settings" in self.settings_file() else "eval"

    def settings_file(self) -> dict[str, Any]:
        """Return the content of settings.json, or {} if it can't be read."""
        return self._read(SETTINGS)

    def settings(self) -> dict[str, Any]:
        """Return every setting by its dotted name."""
        content = self.settings_file()
        kept = content.get("settings")
        if isinstance(kept, dict):
            return kept
        return {name: value for name, value in content.items() if name not in ("versions", "envs")}

    def summary(self) -> dict[str, Any] | None:
        """Return the scores at the end, or None before that."""
        return self._read(SUMMARY) or None

    def _read(self, name: str) -> dict[str, Any]:
        """Return the object in a file of the folder, or {} if it can't be read."""
        try:
            return read_object(self.folder / name, within=self.folder, most=LARGEST_JSON)
        except (OSError, ValueError):
            return {}

    def is_live(self) -> bool:
        """Return whether the run is active.

        A run is active if the process that locks its folder runs on this machine. That process may also run on another
        machine, so the run counts as active, too, if its folder was written to within the last STILL_S seconds.
        """
        try:
            said = read_bytes(self.folder / LOCK, within=self.folder, most=LARGEST_LOCK)
            process = int(said.split(b"\n")[0])
        except (OSError, ValueError):
            return False
        return _runs(process) or self._wrote_lately()

    def _wrote_lately(self) -> bool:
        found = list[os.stat_result]()
        for name in (METRICS, FILE, f"{FILE}-wal"):
            with suppress(OSError):
                found.append((self.folder / name).stat())
        return any(of.st_size and time.time() - of.st_mtime < STILL_S for of in found)  # readers create an empty -wal

    def begun(self) -> float | None:
        """Return when the run's settings were last written, in seconds since 1970.

        If the run has no settings, returns the time of its store, or None if it has neither.
        """
        for name in (SETTINGS, FILE):
            with suppress(OSError):  # the folder may be removed meanwhile
                return (self.folder / name).stat().st_mtime
        return None

    def store(self) -> RolloutStore:
        """Return the run's rollout store for one response.

        Entering it raises Refused if the store doesn't exist yet or can't be read.
        """
        return _Readable(self.folder, one_read=True)


class _Readable(RolloutStore):
    """A store whose errors are raised as Refused."""

    def __enter__(self) -> "_Readable":
        try:
            return super().__enter__()
        except FileNotFoundError:
            raise Refused(
                f"{self.path.parent} has no rollouts yet; try again after the run has written some", 409
            ) from None
        except StoreError as error:
            raise Refused(str(error), 409) from None

    def query(self, sql: str, *values: object) -> list[Any]:
        try:
            return super().query(sql, *values)
        except StoreError as error:
            raise Refused(str(error), 409) from None


class Runs:
    """Finds the runs below the given folders, including runs that start later."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder.resolve() for folder in folders]
        self._found: dict[str, Run] = {}
        self._progress: dict[Path, tuple[Progress, threading.Lock]] = {}
        self._look_at = 0.0
        self._lock = threading.Lock()

    def all(self) -> list[Run]:
        """Return every run, in the order of the folders' names."""
        with self._lock:
            if (now := time.monotonic()) >= self._look_at:
                found = [folder for named in self.folders for folder in _folders(named)]
                self._found = {run.key: run for run in map(run_of, dict.fromkeys(found))}
                took = time.monotonic() - now
                self._look_at = now + max(LOOK_AGAIN_S, 20 * took)  # so that a large tree isn't searched all the time
            return list(self._found.values())

    def get(self, key: str) -> Run:
        """Return the run with this key.

        Raises:
            Refused: If it doesn't exist, or its folder was removed.
        """
        with self._lock:
            run = self._found.get(key)
        run = run or next((run for run in self.all() if run.key == key), None)
        if run is None:
            raise Refused(f"there is no run {key!r}; the list of runs shows all that exist", 404)
        if not run.folder.is_dir():
            raise Refused(f"{run.folder} was removed; the list of runs shows all that exist", 404)
        return run

    def progress(self, run: Run) -> Progress:
        """Return how far the run's metrics have progressed by now."""
        with self._lock:
            found, alone = self._progress.setdefault(run.folder, (Progress(run.folder), threading.Lock()))
        with alone:  # a slow disk must not delay requests about other runs
            found.look()
            return replace(found)


def run_of(folder: Path) -> Run:
    """Return the run in a folder, with its key and its name."""
    parts = [part for part in folder.parts[-2:] if part != folder.anchor]
    name = "/".join(parts) if re.fullmatch(r"[\d-]+", folder.name) else folder.name
    slug = _ODD.sub("-", folder.name).strip("-.") or "run"
    return Run(f"{slug[:60]}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:12]}", folder, name)


def holds_run(folder: Path) -> bool:
    """Return whether the folder is that of a run or evaluation; False if it can't be read."""
    try:
        return (folder / FILE).is_file() or ((folder / SETTINGS).is_file() and (folder / METRICS).is_file())
    except OSError:
        return False


def _folders(named: Path, depth: int = 0) -> Iterator[Path]:
    if holds_run(named):
        yield named
        return
    if depth >= DEEPEST:
        return
    try:
        below = sorted(path for path in named.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        return
    for path in below:
        if not path.name.startswith(".") and path.name not in NO_RUNS:
            yield from _folders(path, depth + 1)


def _runs(process: int) -> bool:
    if process <= 0:  # os.kill would then signal a process group
        return False
    try:
        os.kill(process, 0)
    except PermissionError:  # it belongs to another user
        return True
    except (OSError, OverflowError):
        return False
    return True


def env_texts(run: Run) -> Mapping[str, str]:
    """Return a description of each env of the run, by its name."""
    envs = run.settings_file().get("envs")
    if not isinstance(envs, dict):
        return {}
    return {str(name): _env_text(of) for name, of in envs.items()}


def _env_text(of: object) -> str:
    if not isinstance(of, Mapping):
        return str(of)
    digest = str(of.get("sha256") or "")[:12]
    parts = [of.get("where"), of.get("version") and f"version {of['version']}", digest and f"sha256 {digest}"]
    return ", ".join(str(part) for part in parts if part)
