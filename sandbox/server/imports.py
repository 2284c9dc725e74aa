"""The finder of modules in a process that judges: no library finds its own modules among the files that are judged."""

from __future__ import annotations

import os
import sys
from _frozen_importlib_external import PathFinder  # As importlib.machinery has it.

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

MESSENGERS = (
    "/importlib/__init__.py",
    "/importlib/util.py",
    "/importlib/metadata/__init__.py",
    "/importlib/metadata/_itertools.py",
    "/importlib/metadata.py",
    "/contextlib.py",
    "/pkgutil.py",
    "/pydoc.py",
    "/runpy.py",
    "/unittest/mock.py",
    "/_pytest/monkeypatch.py",
    "/_pytest/outcomes.py",
)
"""Files whose functions import what their callers name: it is their caller who asks."""
RUNNERS = (
    "/doctest.py",
    "/unittest/async_case.py",
    "/unittest/case.py",
    "/unittest/loader.py",
    "/_pytest/pathlib.py",
    "/_pytest/python.py",
)
"""Files whose functions import tests, or call them: they ask as the tests do."""


class OwnImports:
    """Python's finder of modules on sys.path, but for one folder, where only the code that is judged finds its own.

    A module of that folder is found where a file below it, or one that is trusted, asks for it, and where nothing else
    has that name. The standard library and installed packages find none there, whichever modules they look for.
    """

    def __init__(self, folder: str, trusted: Iterable[str], names: Iterable[str] = ()) -> None:
        """Guard a folder; names of files that begin as one of `trusted` are trusted, `names` are found by everybody."""
        self.folder = os.path.realpath(folder)
        self.trusted = tuple(trusted)
        self.askers = (folder + os.sep, self.folder + os.sep, *self.trusted)
        self.names = frozenset(names)
        self.told: set[str] = set()

    def install(self) -> None:
        """Take the place of Python's own finder."""
        sys.meta_path[sys.meta_path.index(PathFinder)] = self

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return where a module is found: elsewhere first, then in the folder, for those who may."""
        places = list(sys.path if path is None else path)
        inside = [place for place in places if self.holds(place)]
        outside = [place for place in places if place not in inside]
        found = frozen(PathFinder.find_spec(name, outside, target))
        if not inside or (found is not None and not self.is_open(found)):
            return found
        # Whoever has a package of the folder may ask it for modules; one that lies elsewhere too is a library's.
        free = path is not None and all(map(self.is_trusted, outside))
        if free or name in self.names or self.is_asked_for(sys._getframe(1)):
            return frozen(PathFinder.find_spec(name, [*outside, *inside], target))
        self.tell(name, inside)
        return found

    def find_distributions(self, context: Any) -> Any:
        """Return the metadata of packages, of the folder's own for those who may find modules there."""
        asked = self.is_asked_for(sys._getframe(1))
        path = [place for place in context.path if asked or not self.holds(place)]
        return PathFinder.find_distributions(type(context)(name=context.name, path=path))

    @staticmethod
    def invalidate_caches() -> None:
        """Do as Python's own finder does."""
        PathFinder.invalidate_caches()

    def holds(self, place: Any) -> bool:
        """Return whether a place of sys.path lies in the folder."""
        try:
            real = os.path.realpath(os.fsdecode(place) or os.curdir)
        except (OSError, TypeError, ValueError):
            return False  # No place for Python's own finder either.
        return real == self.folder or real.startswith(self.folder + os.sep)

    def is_trusted(self, place: Any) -> bool:
        return os.path.join(os.fsdecode(place), "").startswith(self.trusted)

    def is_open(self, found: Any) -> bool:
        """Return whether it is a package without a file of its own, all of whose folders are trusted."""
        return found.loader is None and all(map(self.is_trusted, found.submodule_search_locations))

    def is_asked_for(self, frame: Any) -> bool:
        """Return whether the file that asks is one of the folder, is trusted, or runs tests."""
        while frame is not None:
            said = self.says(frame.f_code.co_filename, frame.f_code.co_name == "<module>")
            if said is not None:
                return said
            frame = frame.f_back
        return False

    def says(self, name: str, at_top: bool) -> bool | None:
        """Return whether code of this file name may ask; None where it is its caller who does."""
        if name.startswith("<"):  # Made by `exec`, which is its caller's, or by the interpreter's own makers.
            own = name.startswith("<frozen ") and not name.startswith(("<frozen importlib", "<frozen runpy"))
            return True if name.startswith(self.trusted) else False if own else None
        if os.path.join(self.folder, name).startswith(self.askers):
            return True
        if at_top or not name.endswith((*RUNNERS, *MESSENGERS)):
            return False
        return True if name.endswith(RUNNERS) else None

    def tell(self, name: str, inside: list[Any]) -> None:
        """Say which module a library looked for that lies in the folder: its author may have meant it to be found."""
        found = PathFinder.find_spec(name, inside)
        if name not in self.told and found is not None and found.loader is not None:
            self.told.add(name)
            text = (
                f"a library looked for {name!r} in the working folder; only tests and tested code find modules there\n"
            )
            os.write(2, text.encode("utf-8", "replace"))


def frozen(found: Any) -> Any:
    """Return it with folders that no later change of sys.path adds to, where it is a package without a file."""
    if found is not None and found.loader is None:
        found.submodule_search_locations = list(found.submodule_search_locations)
    return found
