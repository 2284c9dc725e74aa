"""Train language-model agents by reinforcement learning.

Importing this package loads nothing: each name of `__init__.pyi` is loaded on first use. `agentgym.testing` contains
helpers for tests.
"""

import re as _re
import sys as _sys
from pathlib import Path as _Path
from typing import Any as _Any

import lazy_loader as _lazy

__version__ = "0.1.0"

_load, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        room = _room_of(name) if name.isidentifier() else None
        said = f"module {__name__!r} has no attribute {name!r}" + (f"; it is in {room}" if room else "")
        raise AttributeError(said, name=name, obj=_sys.modules[__name__])  # Python adds a suggestion
    from agentgym.errors.extras import needs_extra

    with needs_extra():
        return _load(name)


def _room_of(name: str) -> str | None:
    """Return the agentgym package that has a public name, or None, without importing anything."""
    here = _re.compile(rf'\b(as|class) {_re.escape(name)}\b|^ +"{_re.escape(name)}",$', _re.MULTILINE)
    files = sorted(_Path(__file__).parent.glob("*/__init__.py*"))
    return next((f"{__name__}.{file.parent.name}" for file in files if here.search(file.read_text("utf-8"))), None)
