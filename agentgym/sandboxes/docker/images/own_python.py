"""Copies this machine's Python, with its loader and libraries, into images that have neither Python nor glibc."""

import os
import platform
import re
import struct
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from agentgym.errors import SandboxError

PREFIX = "/agentgym/python"
LOADER = f"{PREFIX}/lib/ld.so"
LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "pydoc_data"}
    | {"site-packages", "dist-packages"}
)
PT_INTERP = 3


def own_python() -> list[str]:
    """Return the command that starts the copied Python inside an image."""
    return [LOADER, "--library-path", f"{PREFIX}/lib", f"{PREFIX}/bin/{_binary().name}"]


def check_fits(architecture: str, image: str) -> None:
    """Raise SandboxError if this machine's Python cannot run in an image of that architecture."""
    needed = {"amd64": "x86_64", "arm64": "aarch64"}.get(architecture, architecture)
    if sys.platform != "linux" or platform.machine() != needed or _loader(_binary()) is None:
        raise SandboxError(
            f"the image {image!r} has no python3 3.9 or newer on its PATH, and this machine's Python "
            f"({sys.platform}, {platform.machine()}) does not run in it ({architecture}): install python3 in the image"
        )


def add_python(archive: tarfile.TarFile) -> None:
    """Add the interpreter, its standard library, its shared libraries and their loader to an archive.

    The archive is for unpacking at `/`.
    """
    binary, stdlib = _binary(), Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix}))
    base = Path(sys.base_prefix)
    _add(archive, binary, f"{PREFIX}/bin/{binary.name}", 0o755)
    extensions = []
    for folder in {stdlib, Path(sysconfig.get_path("platstdlib", vars={"platbase": sys.base_prefix}))}:
        for path in _files(folder):
            _add(archive, path, f"{PREFIX}/{path.relative_to(base)}", 0o644)
            if path.suffix == ".so":
                extensions.append(path)
    loader = _loader(binary)
    assert loader is not None  # `check_fits` refuses a Python without one.
    _add(archive, Path(loader).resolve(), LOADER, 0o755)
    for name, path in sorted(_libraries(loader, [binary, *extensions]).items()):
        _add(archive, path.resolve(), f"{PREFIX}/lib/{name}", 0o755)


def _binary() -> Path:
    return Path(os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the standard library's files that a sandbox can use, including this Python's bytecode."""
    tag = f".{sys.implementation.cache_tag}.pyc"
    for above, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith("config-")]
        for name in names:
            path = Path(above, name)
            if path.is_file() and (path.parent.name != "__pycache__" or name.endswith(tag)):
                yield path


def _libraries(loader: str, programs: Iterable[Path]) -> dict[str, Path]:
    """Return the shared libraries that the programs load, keyed by the name that the programs request."""
    found: dict[str, Path] = {}
    for program in programs:
        listed = subprocess.run([loader, "--list", str(program)], capture_output=True, text=True, check=False)
        for name, path in re.findall(r"^\s*(\S+) => (/\S+)", listed.stdout, re.MULTILINE):
            found[Path(name).name] = Path(path)
    return found


def _loader(binary: Path) -> str | None:
    """Return the path of the dynamic loader that a 64-bit program names, or None if that is not glibc's loader."""
    with binary.open("rb") as file:
        head = file.read(64)
        if head[:5] != b"\x7fELF\x02":
            return None
        start, size, count = struct.unpack_from("<Q", head, 32)[0], *struct.unpack_from("<HH", head, 54)
        for number in range(count):
            file.seek(start + number * size)
            kind, _, offset, _, _, length = struct.unpack("<IIQQQQ", file.read(40))
            if kind == PT_INTERP:
                file.seek(offset)
                path = file.read(length).rstrip(b"\0").decode()
                return path if "ld-linux" in path else None
    return None


def _add(archive: tarfile.TarFile, source: Path, target: str, mode: int) -> None:
    info = archive.gettarinfo(source, target.lstrip("/"))
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = mode
    if info.islnk():  # A hard link to a file that is already in the archive: its content is written again.
        info.type, info.size = tarfile.REGTYPE, source.stat().st_size
    with source.open("rb") as file:
        archive.addfile(info, file)
