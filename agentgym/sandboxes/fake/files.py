"""Files of fake sandboxes: their paths, and copying them to and from this machine."""

import copy
import errno
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from agentgym.sandboxes.host_files import Spool, find_files, load, store_tree
from agentgym.sandboxes.protocol.arguments import check_text
from agentgym.sandboxes.protocol.content import NotAFile, WrongContent, of_number


def path_of(path: str) -> str:
    """Return the path relative to the working folder.

    Raises:
        ValueError: If it leads out of the working folder.
    """
    check_text("path", path)
    names: list[str] = []
    for name in PurePosixPath(path).parts:
        if name == "/" or (name == ".." and not names):
            raise WrongContent(f"{path!r} is outside the working folder, and a FakeSandbox has no other folder")
        names = names[:-1] if name == ".." else [*names, name]
    return str(PurePosixPath(*names))


def read_file(files: Mapping[str, bytes], path: str, limit: int) -> bytes:
    """Return the content of one file.

    Raises:
        SandboxContentError: If there is no such file, or if it has more than `limit` bytes.
    """
    name = path_of(path)
    if name not in files:
        folder = any(is_below(other, PurePosixPath(name)) for other in files)
        raise NotAFile(f"{path!r} is not a file") if folder else _missing(files, name, path)
    if len(files[name]) > limit:
        raise WrongContent(f"{path} has {len(files[name])} bytes, but the limit is {limit}")
    return files[name]


def names_in(files: Mapping[str, bytes], path: str) -> list[str]:
    """Return the sorted names in a folder; names of folders end with a slash.

    Raises:
        SandboxContentError: If the path is a file, or if the folder is empty or missing (the working folder may be
            empty).
    """
    folder = PurePosixPath(path_of(path))
    inside = [PurePosixPath(name).relative_to(folder) for name in files if is_below(name, folder)]
    if str(folder) in files:
        raise of_number(errno.ENOTDIR, path)
    if not inside and str(folder) != ".":
        raise _missing(files, str(folder), path)
    return sorted({p.parts[0] + ("/" if len(p.parts) > 1 else "") for p in inside})


def _missing(files: Mapping[str, bytes], name: str, path: str) -> Exception:
    """Return the error for a name that no file has; `path` is what the caller asked for."""
    below_file = any(str(folder) in files for folder in PurePosixPath(name).parents)
    return of_number(errno.ENOTDIR if below_file else errno.ENOENT, path)


def with_files(files: Mapping[str, bytes], more: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files and those of `more`, whose names `path_of` returned and which replace files of the same name.

    Raises:
        SandboxContentError: If a file of one of them is where the other needs a folder.
    """
    folders = {str(folder) for name in files for folder in PurePosixPath(name).parents}
    stored = dict(files)
    for name, content in more.items():
        parents = {str(folder) for folder in PurePosixPath(name).parents}
        if name in folders:
            raise of_number(errno.EISDIR, name)
        if not parents.isdisjoint(stored):
            raise of_number(errno.ENOTDIR, name)
        stored[name] = content
        folders |= parents
    return stored


def load_tree(source: Path, target: str) -> dict[str, bytes]:
    """Return the contents of a file, or of all files in a folder, keyed by their paths in the sandbox."""
    return {path_of(path): content for path, content in load(find_files(source, target)).items()}


def store(target: Path, files: Mapping[PurePosixPath, bytes]) -> None:
    """Store files on this machine, keyed by their paths relative to `target`; an empty path is `target` itself.

    Raises:
        FileExistsError: If a link, a file or a folder is in the way.
        OSError: If a file can't be stored for another reason, such as a full disk.
    """
    with Spool(target) as spool:
        for path, content in files.items():
            spool.add("/".join(path.parts), content)
        store_tree(target, spool)


def is_below(name: str, folder: PurePosixPath) -> bool:
    """Return whether a file is in the folder or in one of its subfolders."""
    return PurePosixPath(name).is_relative_to(folder) and PurePosixPath(name) != folder


def copied(value: Any) -> Any:
    """Return a deep copy of a value for a branch, or the value itself if it can't be copied (a module, a lock)."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def bytes_of(data: str | bytes) -> bytes:
    """Return the content as bytes."""
    return data.encode() if isinstance(data, str) else data


def tar_of(files: Mapping[str, bytes], limit: int) -> bytes:
    """Return the files as a tar archive.

    Raises:
        ValueError: If the archive has more than `limit` bytes.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    if len(packed.getvalue()) > limit:
        raise WrongContent(f"limit: the archive has {len(packed.getvalue())} bytes, but the limit is {limit}")
    return packed.getvalue()
