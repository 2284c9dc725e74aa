"""The server, started by its folder: `python3 -I -S -B server CONFIG`."""

import gc
import marshal
import os
import sys
from _frozen_importlib import ModuleSpec  # importlib itself takes longer to import.

TYPE_CHECKING = False  # Importing typing would cost each new sandbox some milliseconds.
if TYPE_CHECKING:
    import types

gc.disable()  # Imported objects are permanent; `start` collects garbage once.
FOLDER = os.path.dirname(os.path.abspath(__file__))
BYTECODE = FOLDER + "/bytecode"
"""All modules of the package in one file, if the sandbox got that instead of their sources."""


class Bytecode:
    """Imports the modules of the package from `BYTECODE`."""

    def __init__(self) -> None:
        with open(BYTECODE, "rb") as file:
            self.modules: dict[str, types.CodeType] = marshal.load(file)

    def find_spec(self, name: str, _path: object, _target: object = None) -> object:
        if name not in self.modules:
            return None
        return ModuleSpec(name, self, is_package=name == "server")  # type: ignore[arg-type]

    def create_module(self, _spec: object) -> None:
        """Return None, so that Python creates the module."""

    def exec_module(self, module: "types.ModuleType") -> None:
        code = self.modules[module.__name__]
        module.__file__ = code.co_filename
        exec(code, module.__dict__)


# Last, and without the folder itself, so that none of our modules shadows the standard library.
sys.path[:] = [path for path in sys.path if path != FOLDER] + [os.path.dirname(FOLDER)]
if os.path.exists(BYTECODE):
    sys.meta_path.insert(0, Bytecode())  # type: ignore[arg-type]

from server.start import main  # type: ignore[import-not-found]

if __name__ == "__main__":
    main()
