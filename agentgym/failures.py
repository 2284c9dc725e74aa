"""Exceptions of the user's own code: the line that raised one, and one log line for each kind."""

import inspect
import logging
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)

_OWN = f"{Path(__file__).parent}/"
_FOREIGN = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_said: set[tuple[str, str, str]] = set()

_SQLITE = (
    "a plain tool or reward runs in a thread of its own: open the connection with check_same_thread=False, "
    "or make the method async"
)


def place_of(error: BaseException) -> str:
    """Return the last line of the user's code in a traceback, "my_env.py:12 in look"; "" where there is none."""
    own = [(frame, line) for frame, line in _frames(error.__traceback__) if _is_users(frame)]
    return _place(own[-1][0].f_code, own[-1][1]) if own else ""


def place_of_function(function: Callable[..., Any]) -> str:
    """Return where a function is defined, "my_env.py:10 in look"; "" where that is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _place(code, code.co_firstlineno) if code is not None else ""


def place_of_frame(frame: FrameType) -> str:
    """Return the line of the user's code that is running, and its function: "my_env.py:12 in look"."""
    inner: FrameType | None = frame
    while inner is not None and not _is_users(inner):
        inner = inner.f_back
    found = inner or frame
    return _place(found.f_code, found.f_lineno)


def log_once(what: str, error: BaseException, function: Callable[..., Any]) -> None:
    """Log a warning with the traceback, the first time that `what` raises this type of error at this line.

    `function` is what was called: its definition is named where no line of the user's code raised.
    """
    place = place_of(error) or place_of_function(function)
    kind = (what, type(error).__qualname__, place)
    if kind in _said:
        return
    _said.add(kind)
    hint = f" ({_SQLITE})" if type(error).__name__ == "ProgrammingError" and "thread" in describe(error) else ""
    said = f"{what} raised {describe(error)}, at {place or 'an unknown line'}{hint}"
    log.warning("%s; the same again is counted and not logged", said, exc_info=error)


def describe(error: BaseException) -> str:
    """Return the error's type and text, or a note where its text cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as worse:
        return f"{type(error).__name__}: (its text raised {type(worse).__name__})"


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not (path.startswith((_OWN, "<frozen")) or path.startswith(_FOREIGN))


def _place(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
