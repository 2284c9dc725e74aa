"""Writes of several files: how many fit in one frame, and which file a refusal is about."""

import json
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager

from agentgym.sandboxes.remote.host_functions import MAX_FILE

MAX_BATCH = 200
MAX_NAMES = 256 << 10
"""Maximum bytes of the paths in one frame, as JSON."""


@contextmanager
def about(*paths: str) -> Iterator[None]:
    """Add the path to errors that a sandbox's kernel reports for a write.

    If there are several paths, the first and the last are added.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None or not isinstance(error, ValueError | FileNotFoundError):
            raise
        named = paths[0] if len(paths) == 1 else f"one of {len(paths)} files, {paths[0]} to {paths[-1]}"
        raise type(error)(error.errno, error.strerror, named) from None


def write_batches(
    files: Mapping[str, bytes], executable: Container[str] = ()
) -> Iterator[tuple[list[tuple[str, int, bool]], bytes]]:
    """Yield the files in groups of at most 16 MiB, 200 files and 256 KiB of paths, one group per frame."""
    names: list[tuple[str, int, bool]] = []
    parts: list[bytes] = []
    size = said = 0
    for path, data in files.items():
        saying = len(json.dumps(path))
        if names and (size + len(data) > MAX_FILE or len(names) == MAX_BATCH or said + saying > MAX_NAMES):
            yield names, b"".join(parts)
            names, parts, size, said = [], [], 0, 0
        names.append((path, len(data), path in executable))
        parts.append(data)
        size += len(data)
        said += saying
    if names:
        yield names, b"".join(parts)
