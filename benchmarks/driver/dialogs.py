"""The dialogs of `benchmarks.driver` and their tool's answers, for our process and for that of the other kits.

It imports neither agentgym nor another kit, so that any interpreter can run it.
"""

import json
import random
from collections import deque

QUESTION = "Add the numbers, two at a time, and answer with what they come to."
_SYLLABLES = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "ar", "en", "il")]


def added(a: int, b: int) -> str:
    """Return the tool's answer, a text too long for its ids to be cached."""
    return f"The sum of {a} and {b} is {a + b}."


class Tool:
    """The tool: it answers with the sum, or with the next of the `unseen` texts if there are any."""

    def __init__(self) -> None:
        self.unseen: deque[str] = deque()

    def answer(self, a: int, b: int) -> str:
        """Return the answer to one call."""
        return self.unseen.popleft() if self.unseen else added(a, b)


def tracebacks(count: int, seed: int) -> list[str]:
    """Return tracebacks as a failing program writes them, no two alike: each has new random numbers and addresses.

    One name in five is new, too; the others come from a program of 400 names, which are the same for every seed.
    """
    program = _names(random.Random(0), 400)
    draw = random.Random(seed)
    return [_traceback(draw, program) for _ in range(count)]


def _names(draw: random.Random, count: int) -> list[str]:
    return ["".join(draw.choices(_SYLLABLES, k=draw.randint(2, 4))) for _ in range(count)]


def _traceback(draw: random.Random, program: list[str]) -> str:
    def name() -> str:
        return draw.choice(program) if draw.random() < 0.8 else _names(draw, 1)[0]

    lines = ["Traceback (most recent call last):"]
    for _ in range(6):
        lines.append(f'  File "/srv/{name()}/{name()}.py", line {draw.randint(1, 999)}, in {name()}_{name()}')
        lines.append(f"    {name()} = self.{name()}({name()}, {name()}={draw.randint(1, 999)})")
    lines.append(f"ValueError: {name()} at 0x{draw.getrandbits(48):012x} is {draw.randint(1, 9999)}, not {name()!r}")
    return "\n".join(lines)


def call_in(said: str) -> dict[str, int] | None:
    """Return the arguments of the call in a reply, or None if it has no call."""
    _, call, rest = said.partition("<tool_call>\n")
    if not call:
        return None
    arguments: dict[str, int] = json.loads(rest.partition("\n</tool_call>")[0])["arguments"]
    return arguments
