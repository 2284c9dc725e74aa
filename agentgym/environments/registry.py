"""Lookup of envs by name: registered ones, those of installed packages and the gallery, and any module or file."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from agentgym.config_fields import nearest
from agentgym.environments.env import Env, _is_env
from agentgym.errors import EnvError, boundary
from agentgym.files.foreign.opening import is_file

EnvT = TypeVar("EnvT", bound="type[Env[Any]]")

GROUP = "agentgym.envs"
"""The entry point group in which an installed package names its envs."""


GALLERY = Path("_gallery/envs")
"""The wheel's folder with the envs that come with agentgym."""
_REGISTERS = re.compile(r'^@ag\.register\("(\w+)"\)$', re.MULTILINE)

_registry: dict[str, type[Env[Any]]] = {}


def register(name: str) -> Callable[[EnvT], EnvT]:
    """Register an env class under a name: `@ag.register("name")`.

    Args:
        name: The name: letters, digits, "_", "-" and ".". It must not start with "-" or ".", or end with ".py".

    Raises:
        ValueError: If the name is invalid, or another class is already registered under it.
        TypeError: If the name isn't a text, or the decorator is applied to anything but an env class.
    """
    if not isinstance(name, str):
        raise TypeError(f'register: expected a name, as in `@ag.register("name")`, got {name!r}')
    if not re.fullmatch(r"\w[\w.-]*", name) or name.endswith(".py"):
        raise ValueError(
            f"register: a name may contain letters, digits, '_', '-' and '.', and must not end with .py, got {name!r}"
        )

    def enter(cls: EnvT) -> EnvT:
        if not _is_env(cls):
            raise TypeError(f"register: {name!r} can only name an env class, got {cls!r}")
        known = _registry.get(name)
        if known is not None and _place(known) != _place(cls):
            raise ValueError(f"register: {name!r} is already registered as {known.__module__}.{known.__qualname__}")
        _registry[name] = cls
        return cls

    return enter


def _place(cls: type) -> tuple[str, str]:
    """Return a class's file and name, which identify the class even if its file was both run and imported."""
    module = sys.modules.get(cls.__module__)
    return getattr(module, "__file__", None) or cls.__module__, cls.__qualname__


def registered() -> Iterator[tuple[str, type[Env[Any]]]]:
    """Yield the name and class of every env that an imported module registered, sorted by name."""
    yield from sorted(_registry.items())


def installed() -> dict[str, EntryPoint]:
    """Return the entry points that installed packages list in the group "agentgym.envs", by env name.

    Raises:
        ValueError: If two packages give the same name to different classes; the message names both.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ValueError(
                f"env: {entry.name!r} names two classes, {other.value} of {_package(other)} and {entry.value} of "
                f"{_package(entry)}; uninstall one of the packages, or name the class as MODULE:CLASS"
            )
    return found


def gallery() -> dict[str, Path]:
    """Return the files of the envs that come with agentgym, by registered name, from the wheel or a checkout."""
    room = Path(__file__).parents[1]
    folder = room / GALLERY if (room / GALLERY).is_dir() else room.parent / "envs"
    files = sorted(folder.glob("*/env.py"))
    return {name: file for file in files for name in _REGISTERS.findall(file.read_text())}


def find_env(env: "str | type[Env[Any]]") -> type[Env[Any]]:
    """Return the env class for a name, "package.module:Class" or "path.py:Class"; a class is returned unchanged.

    Args:
        env: A class, or its name: one that an imported module registered, an installed package's entry point, or an env
            of the gallery. A path alone, "path.py", means the only env that the file defines.

    Raises:
        ValueError: If a name is unknown (the message suggests the nearest one) or ambiguous, if a path's file doesn't
            exist, if a file defines several envs or none, or if a module or file has no such class.
        EnvError: If the module can't be imported.
    """
    if not isinstance(env, str):
        if not _is_env(env):
            raise ValueError(f"env: must be an Env class or its name, got {env!r:.200}; pass the class itself")
        return env
    if env in _registry:
        return _registry[env]
    module, colon, attribute = (env, "", "") if env.endswith(".py") else env.rpartition(":")
    if not colon and not env.endswith(".py"):
        return _installed(env)
    if (is_path := module.endswith(".py")) and not is_file(module):
        raise ValueError(f"env: there is no file {module:.200}; name one, as in my_env.py:Pointers")
    with boundary(EnvError, f"env {env!r}"):
        loaded = import_file(Path(module)) if is_path else importlib.import_module(module)
        found: Any = getattr(loaded, attribute, None) if attribute else None
    if is_path and not attribute:
        return _only_env(env, loaded)
    if not _is_env(found):
        like = nearest(attribute, [name for name, value in vars(loaded).items() if _is_env(value)])
        raise ValueError(
            f"env: {env!r} is not an Env class; name a subclass of ag.Env or ag.ToolEnv after the colon ({like})"
        )
    made: type[Env[Any]] = found
    return made


def _installed(name: str) -> type[Env[Any]]:
    """Return the env that an installed package or the gallery has under this name."""
    there, ours = installed(), gallery()
    if name not in there and name in ours:
        return _in_gallery(name, ours[name])
    if name not in there:
        known = nearest(name, [*_registry, *there, *ours])
        raise ValueError(
            f"env: {name!r:.200} is not registered ({known}); import its module, or write "
            '"module:Class" or "path.py:Class", as in "my_env:Pointers"'
        )
    entry = there[name]
    with boundary(EnvError, f"env {name!r}, {entry.value} of {_package(entry)}"):
        found = entry.load()
    if not _is_env(found):
        raise ValueError(f"env: {name!r} is {entry.value} of {_package(entry)}, which is not an Env class")
    made: type[Env[Any]] = found
    return register(name)(made)


def _in_gallery(name: str, file: Path) -> type[Env[Any]]:
    """Import an env of the gallery as `envs.FOLDER.env`, the module name by which the gallery's other envs import it.

    For this, the folder above `envs` is appended to the import path.
    """
    top, module = str(file.parents[2]), f"envs.{file.parent.name}.env"
    if top not in sys.path:
        sys.path.append(top)
    with boundary(EnvError, f"env {name!r}, {file}"):
        loaded = importlib.import_module(module)
    if name not in _registry:
        raise ValueError(
            f"env: {name!r} is defined in {file}, but importing {module} found {loaded.__file__} instead; rename the "
            "folder of the file that was found, or name the class in that file as MODULE:CLASS"
        )
    return _registry[name]


def _package(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"


def import_file(path: Path) -> ModuleType:
    """Import a Python file once, under the name that an `import` statement would use, if there is one.

    The folder above its packages is appended to the import path, so that the file can import modules next to it.
    """
    path = path.resolve()
    if str(top := _top(path)) not in sys.path:
        sys.path.append(str(top))
    for name in _names(path):
        if (spec := _spec(name)) is not None and spec.origin and Path(spec.origin).resolve() == path:
            return importlib.import_module(name)
    return _import_alone(path)


def _top(path: Path) -> Path:
    """Return the folder above a file's packages.

    For an env in a separate folder, as in envs/chase/env.py, that is the folder of the checkout.
    """
    top = path.parent
    while (top / "__init__.py").is_file():
        top = top.parent
    return path.parents[2] if path.parent.parent.name == "envs" and top == path.parent else top


def _names(path: Path) -> Iterator[str]:
    """Yield the dotted names under which the file may be importable, longest first.

    In this order, a module of a package is found by its full name.
    """
    parts = path.with_suffix("").parts
    for start in range(1, len(parts)):
        if all(part.isidentifier() for part in parts[start:]) and str(Path(*parts[:start])) in _path():
            yield ".".join(parts[start:])


def _path() -> set[str]:
    return {str(Path(entry or ".").resolve()) for entry in sys.path}


def _spec(name: str) -> ModuleSpec | None:
    """Find a module without importing it; its parent packages are imported."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _import_alone(path: Path) -> ModuleType:
    """Import a file under a generated name, because another module already has the file's name."""
    name = f"{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _only_env(env: str, module: ModuleType) -> type[Env[Any]]:
    own = [value for value in vars(module).values() if _is_env(value) and value.__module__ == module.__name__]
    if len(own) != 1:
        there = ", ".join(each.__name__ for each in own) or "none"
        raise ValueError(
            f"env: {env} defines {there}; name one class, as in {env}:{own[0].__name__ if own else 'MyEnv'}"
        )
    found: type[Env[Any]] = own[0]
    return found
