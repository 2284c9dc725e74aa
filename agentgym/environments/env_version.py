"""The version and the content hash of an env, recorded with its results."""

import ast
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

from agentgym.environments.env import Env
from agentgym.environments.mixture import Mixture
from agentgym.types.env_version import EnvVersion

_LOG = logging.getLogger(__name__)


def warn_of_other_envs(begun: Mapping[str, EnvVersion], envs: Mapping[str, EnvVersion]) -> None:
    """Log a warning for each env that changed since a run or an evaluation was started."""
    for name, was in begun.items():
        if (now := envs.get(name)) is not None and now != was:
            _LOG.warning("resume: the env %s has changed since the start: it was (%s), and is now (%s)", name, was, now)


def env_versions(env: type[Env[Any]]) -> dict[str, EnvVersion]:
    """Return the version of the env, or of each member of a mixture, by name.

    The hash covers the files of the class and its base classes, the files of their own package or folder that they
    import, and the class's `data_files`. agentgym's own files are not hashed, because its version identifies them.

    Raises:
        ValueError: If one of `data_files` doesn't exist; the message names it.
    """
    members = {name: of.env for name, of in env.members.items()} if issubclass(env, Mixture) else {env.__name__: env}
    return {name: _version_of(each) for name, each in members.items()}


def _version_of(env: type[Env[Any]]) -> EnvVersion:
    package = env.__module__.partition(".")[0]
    declared = env.version if env.version is not None else _package_version(package)
    return EnvVersion(where=f"{env.__module__}:{env.__qualname__}", version=declared, sha256=_content(env))


@cache
def _package_version(package: str) -> str | None:
    for name in packages_distributions().get(package, ()):
        try:
            return version(name)
        except PackageNotFoundError:  # half uninstalled
            continue
    return None


def _content(env: type[Env[Any]]) -> str | None:
    files: dict[str, Path] = {}
    for owner in env.__mro__:
        if (home := _home(owner.__module__)) is not None:
            files |= {str(path.relative_to(home.root)): path for path in _with_imports(home)}
            for name in vars(owner).get("data_files", ()):
                files |= {f"{home.module}: {shown}": path for shown, path in _data(owner, home, name)}
    if not files:
        return None
    digest = sha256()
    for shown, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{shown}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Home:
    """The location of a user's module."""

    module: str
    path: Path
    root: Path
    """The folder that contains the module's package."""


def _home(module: str) -> _Home | None:
    """Return a module's location, or None if it belongs to Python or agentgym, or has no file."""
    package = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if package == "agentgym" or package in sys.stdlib_module_names - {"__main__"} or file is None:
        return None
    path = Path(file).resolve()
    up = module.count(".") + (path.name == "__init__.py")
    return _Home(module, path, path.parents[up]) if path.is_file() and up < len(path.parents) else None


def _with_imports(home: _Home) -> set[Path]:
    """Return the module's file, and the files of its package or folder that it imports directly or indirectly."""
    found: set[Path] = set()
    waiting = [home.path]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [other for name in _imports(path, home) for other in _files(name, home)]
    return found


def _imports(path: Path, home: _Home) -> Iterator[str]:
    """Yield the dotted names that the file imports from its own package or folder, inside functions too."""
    if path.suffix != ".py":  # a compiled module
        return
    parts = path.relative_to(home.root).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            of = [*parts[: len(parts) - node.level], *filter(None, [node.module])] if node.level else [str(node.module)]
            names = [".".join([*of, alias.name]) for alias in node.names]
        else:
            continue
        yield from (name for name in names if _is_own(name, home))


def _is_own(name: str, home: _Home) -> bool:
    """Return whether a name is in the module's own package, or in its folder if the module is in no package."""
    if "." in home.module or home.path.name == "__init__.py":
        return name.partition(".")[0] == home.module.partition(".")[0]
    return "site-packages" not in home.root.parts


def _files(name: str, home: _Home) -> Iterator[Path]:
    """Yield the files of a module and of its parent packages; `a.b` may be a module, or a name in `a`."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        place = home.root.joinpath(*parts[:end])
        yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())


def _data(owner: type, home: _Home, name: str) -> Iterator[tuple[str, Path]]:
    place = home.path.parent / name
    if not place.exists():
        raise ValueError(
            f"{owner.__name__}.data_files: {place} does not exist; name files and folders next to {home.path.name}"
        )
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(home.path.parent)), path
