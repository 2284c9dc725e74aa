"""The value of one reward method: called as a tool is, and a number or an error that names it."""

from collections.abc import Callable
from typing import Any

from agentgym.errors import AgentGymError, EnvError
from agentgym.failures import describe, log_once, place_of, place_of_function
from agentgym.threads import Threads, call_method


async def reward_value(method: Callable[..., Any], where: str, threads: Threads) -> float:
    """What the method returns, as a float; EnvError says which reward raised, at which line, or gave no number.

    A plain method runs in a thread of its own, and is interrupted where nobody waits for it any more.
    """
    try:
        value = await call_method(method, {}, name=f"agentgym-reward {method.__name__}", threads=threads)
    except AgentGymError:
        raise
    except (Exception, SystemExit) as error:
        log_once(where, error, method)
        place = place_of(error) or place_of_function(method)
        raise EnvError(f"{where} raised {describe(error)}, at {place}") from error
    return _number(value, where)


def _number(value: Any, where: str) -> float:
    """The value as a float. Text and arrays are refused, although Python could make a float of some."""
    if not isinstance(value, str | bytes) and not getattr(value, "ndim", 0):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise EnvError(f"{where} returned {value!r:.80} ({type(value).__name__}): return a number")
