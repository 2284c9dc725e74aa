"""Errors in the user's own code: the line that raised, the traceback, and one logged warning for each kind."""

import inspect
import logging
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from traceback import TracebackException
from types import CodeType, FrameType, TracebackType
from typing import Any

log = logging.getLogger(__name__)

_OWN = f"{Path(__file__).parents[1]}/"
_FOREIGN = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = ("/site-packages/", "/dist-packages/")
"""Parts of the paths of package folders. They also identify folders that `_FOREIGN` lacks: the one in the user's home,
those that a .pth file adds, and Debian's next to pip's.
"""
_said: set[tuple[str, str, str]] = set()

_SQLITE = (
    "a plain tool or reward runs in a separate thread: open the connection with check_same_thread=False, "
    "or make the method async"
)


def place_of(error: BaseException) -> str:
    """Return the user's line that raised or caused the error, as "my_env.py:12 in look", or "" if none did."""
    own = [(frame, line) for frame, line in _frames(error.__traceback__) if _is_users(frame.f_code.co_filename)]
    if own:
        return _place(own[-1][0].f_code, own[-1][1])
    # Before Python 3.11.4, a timeout's error has no cause: the error of the cancelled code is its context.
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return place_of(before) if before is not None else ""


def place_of_function(function: Callable[..., Any]) -> str:
    """Return the line that defines a function, as "my_env.py:10 in look", or "" if it is unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _place(code, code.co_firstlineno) if code is not None else ""


def place_of_frame(frame: FrameType) -> str:
    """Return the line at which a frame is, as "my_env.py:12 in look".

    If the frame isn't in the user's code, return the line of the nearest calling frame that is. If none is, return
    the frame's own line.
    """
    inner: FrameType | None = frame
    while inner is not None and not _is_users(inner.f_code.co_filename):
        inner = inner.f_back
    found = inner or frame
    return _place(found.f_code, found.f_lineno)


def holder_of(frames: Sequence[FrameType]) -> str:
    """Return the name of the user's function that a running stack is in, such as "Env.look".

    If user functions call each other, the one that agentgym called is named.

    Args:
        frames: The frames of the stack, the innermost first. If none of them is the user's, the innermost function is
            named.
    """
    found: FrameType | None = None
    for frame in frames:
        path = frame.f_code.co_filename
        if found is not None and path.startswith(_OWN):
            break
        if _is_users(path):
            found = frame
    code = (found or frames[0]).f_code
    return code.co_qualname.rpartition("<locals>.")[2]


def log_once(what: str, error: BaseException, function: Callable[..., Any]) -> None:
    """Log a warning with the traceback, the first time that `what` raises this type of error at this line.

    Args:
        what: The message's name for the tool, reward or method that raised.
        error: The error. Its traceback starts at the user's first frame, or has all frames if none is the user's.
        function: The function that was called. If no line of the user's code raised, the message names its definition.
    """
    place = place_of(error) or place_of_function(function)
    kind = (what, type(error).__qualname__, place)
    if kind in _said:
        return
    _said.add(kind)
    hint = f" ({_SQLITE})" if type(error).__name__ == "ProgrammingError" and "thread" in describe(error) else ""
    said = f"{what} raised {describe(error)}, at {place or 'an unknown line'}{hint}"
    first = error.__traceback__
    while first is not None and not _is_users(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    shown = (type(error), error, first or error.__traceback__)
    log.warning("%s; repetitions are counted, but not logged", said, exc_info=shown)


def describe(error: BaseException) -> str:
    """Return the error's type and text, even if its `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        raise
    except BaseException as worse:
        return f"{type(error).__name__}: (its __str__ raised {type(worse).__name__})"


def users_traceback(error: BaseException, *, or_all: bool = False) -> str:
    """Return the traceback of an error and its causes as text, starting at the user's first frame.

    Args:
        error: The error.
        or_all: What to return if no frame is the user's: False returns "", and True returns all frames except
            agentgym's own at the top.
    """
    made = TracebackException.from_exception(error, compact=True)
    parts = list(_parts(made))
    if not or_all and not any(_is_users(frame.filename) for part in parts for frame in part.stack):
        return ""
    for part in parts:
        paths = [frame.filename for frame in part.stack]
        users = (index for index, path in enumerate(paths) if _is_users(path))
        others = (index for index, path in enumerate(paths) if not path.startswith(_OWN))
        del part.stack[: next(users, next(others, 0))]
    return encodable("".join(made.format()))


def encodable(text: str) -> str:
    """Return the text with lone surrogates escaped, so that files and terminals accept it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _parts(made: TracebackException) -> Iterator[TracebackException]:
    """Yield a traceback, the tracebacks of its causes and contexts, and those of the errors in an exception group."""
    found: list[TracebackException | None] = [made]
    while found:
        if (part := found.pop()) is not None:
            yield part
            found += [part.__cause__, part.__context__, *(part.exceptions or ())]


def _frames(trace: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _is_users(path: str) -> bool:
    return not path.startswith((_OWN, "<frozen", *_FOREIGN)) and not any(folder in path for folder in _PACKAGES)


def _place(code: CodeType, line: int) -> str:
    return f"{Path(code.co_filename).name}:{line} in {code.co_name}"
