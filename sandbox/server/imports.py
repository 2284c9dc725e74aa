"""An import finder for a process that judges: no library finds its modules among the files that are judged."""

from __future__ import annotations

import os
import sys
from _frozen_importlib_external import PathFinder  # The same as importlib.machinery's.

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
"""Files whose functions import the modules that their callers name; the caller counts as the importer."""
RUNNERS = (
    "/doctest.py",
    "/unittest/async_case.py",
    "/unittest/case.py",
    "/unittest/loader.py",
    "/_pytest/pathlib.py",
    "/_pytest/python.py",
)
"""Files whose functions import or call tests; they import with the tests' rights."""


class OwnImports:
    """Finds modules on sys.path like Python's own finder, but the modules of one folder only for the judged code.

    A module of that folder is found if a file below it or a trusted file imports it, and if nothing else has that name.
    The standard library and installed packages find none there, whatever modules they look for.
    """

    def __init__(self, folder: str, trusted: Iterable[str], names: Iterable[str] = ()) -> None:
        """Guard a folder; `trusted` are prefixes of trusted file names, and everyone finds the modules in `names`."""
        self.folder = os.path.realpath(folder)
        self.trusted = tuple(trusted)
        self.askers = (folder + os.sep, self.folder + os.sep, *self.trusted)
        self.names = frozenset(names)
        self.told: set[str] = set()

    def install(self) -> None:
        """Replace Python's own finder."""
        sys.meta_path[sys.meta_path.index(PathFinder)] = self

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's spec, found outside the folder or, for importers with access, in the folder."""
        places = list(sys.path if path is None else path)
        inside = [place for place in places if self.holds(place)]
        outside = [place for place in places if place not in inside]
        found = frozen(PathFinder.find_spec(name, outside, target))
        if not inside or (found is not None and not self.is_open(found)):
            return found
        # Code that has a package of the folder may import its modules, but a package that is also elsewhere is a
        # library's.
        free = path is not None and all(map(self.is_trusted, outside))
        if free or name in self.names or self.is_asked_for(sys._getframe(1)):
            return frozen(PathFinder.find_spec(name, [*outside, *inside], target))
        self.tell(name, inside)
        return found

    def find_distributions(self, context: Any) -> Any:
        """Return the metadata of packages; the folder's own only for importers that may find modules there."""
        asked = self.is_asked_for(sys._getframe(1))
        path = [place for place in context.path if asked or not self.holds(place)]
        return PathFinder.find_distributions(type(context)(name=context.name, path=path))

    @staticmethod
    def invalidate_caches() -> None:
        """Invalidate the caches of Python's own finder."""
        PathFinder.invalidate_caches()

    def holds(self, place: Any) -> bool:
        """Return whether an entry of sys.path is in the folder."""
        try:
            real = os.path.realpath(os.fsdecode(place) or os.curdir)
        except (OSError, TypeError, ValueError):
            return False  # Python's own finder can't use it either.
        return real == self.folder or real.startswith(self.folder + os.sep)

    def is_trusted(self, place: Any) -> bool:
        return os.path.join(os.fsdecode(place), "").startswith(self.trusted)

    def is_open(self, found: Any) -> bool:
        """Return whether this is a namespace package (one without a file) whose folders are all trusted."""
        return found.loader is None and all(map(self.is_trusted, found.submodule_search_locations))

    def is_asked_for(self, frame: Any) -> bool:
        """Return whether the importing file is in the folder, is trusted, or runs tests."""
        while frame is not None:
            said = self.says(frame.f_code.co_filename, frame.f_code.co_name == "<module>")
            if said is not None:
                return said
            frame = frame.f_back
        return False

    def says(self, name: str, at_top: bool) -> bool | None:
        """Return whether code in the file `name` may import from the folder, or None if its caller decides."""
        if name.startswith("<"):  # Created by `exec`, whose caller counts, or by the interpreter itself.
            own = name.startswith("<frozen ") and not name.startswith(("<frozen importlib", "<frozen runpy"))
            return True if name.startswith(self.trusted) else False if own else None
        if os.path.join(self.folder, name).startswith(self.askers):
            return True
        if at_top or not name.endswith((*RUNNERS, *MESSENGERS)):
            return False
        return True if name.endswith(RUNNERS) else None

    def tell(self, name: str, inside: list[Any]) -> None:
        """Log which module in the folder a library looked for, because its author may have meant it to be found."""
        found = PathFinder.find_spec(name, inside)
        if name not in self.told and found is not None and found.loader is not None:
            self.told.add(name)
            text = (
                f"a library looked for {name!r} in the working folder; only tests and tested code find modules there\n"
            )
            os.write(2, text.encode("utf-8", "replace"))


def frozen(found: Any) -> Any:
    """Return the spec; the folders of a namespace package are fixed, so later changes of sys.path add none."""
    if found is not None and found.loader is None:
        found.submodule_search_locations = list(found.submodule_search_locations)
    return found
