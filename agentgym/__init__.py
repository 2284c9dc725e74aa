"""Train language-model agents by reinforcement learning.

Importing this package loads nothing: each name of `__init__.pyi` is loaded on first use. `agentgym.testing` has what
tests need.
"""

import sys as _sys
from typing import Any as _Any

import lazy_loader as _lazy

__version__ = "0.1.0"

_load, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> _Any:
    if name not in __all__:
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=_sys.modules[__name__]
        )  # Python then says which name may be meant
    from agentgym.errors.extras import needs_extra

    with needs_extra():
        return _load(name)
