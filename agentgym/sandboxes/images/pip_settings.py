"""The user's settings of pip and of proxies, as environment variables for a build."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

CARRIED = frozenset(
    {"index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "cert", "proxy", "timeout", "retries"}
    | {"default-timeout", "pre", "prefer-binary", "only-binary", "no-binary"}
)
"""The settings that say where packages come from; those that say where they go, or which Python is meant, stay here."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY")
PLACES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")


def proxy_settings() -> dict[str, str]:
    """Return the proxies of this process's environment, in capitals and in small letters."""
    return {name: os.environ[name] for each in PROXIES for name in (each, each.lower()) if name in os.environ}


def pip_settings() -> dict[str, str]:
    """Return what the user's environment and pip.conf say about where packages come from, as PIP_ variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    # Lowest first: a setting for `install` is above a global one, and the environment is above both.
    rank = {"global": 0, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listed:
        section, _, setting = line.partition(".")
        name, value = _pair(setting)
        if section in rank and name in CARRIED and rank[section] >= found.get(name, (-1, ""))[0]:
            found[name] = (rank[section], value)
    return {f"PIP_{name.upper().replace('-', '_')}": " ".join(value.split()) for name, (_, value) in found.items()}


def indexes() -> list[str]:
    """Return the folders of this machine that the settings of pip name as places of packages.

    An index's files may lie beside it: of an index, it is the folder above.
    """
    settings = pip_settings()
    found = {path for name in PLACES for path in _folders(settings.get(name, ""), is_index="INDEX" in name)}
    return sorted(str(path) for path in found if path.is_dir() and path != Path("/"))


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, str(ast.literal_eval(value))


def _folders(value: str, *, is_index: bool) -> Iterator[Path]:
    for word in value.split():
        if word.startswith("file:") or word.startswith("/"):
            path = Path(unquote(urlsplit(word).path))
            yield path.parent if is_index else path
