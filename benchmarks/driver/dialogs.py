"""The dialogs of `benchmarks.driver` and what their tool answers, for our process and for that of the peers.

It imports nothing of ours and no other kit, so that any interpreter can run it.
"""

import json
import random
from collections import deque

QUESTION = "Add the numbers, two at a time, and answer with what they come to."
_SYLLABLES = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "ar", "en", "il")]


def added(a: int, b: int) -> str:
    """What the tool says: long enough that its ids are made anew each time."""
    return f"The sum of {a} and {b} is {a + b}."


class Tool:
    """What the tool answers: the sum, or where texts were given the next of these, which nobody has seen before."""

    def __init__(self) -> None:
        self.unseen: deque[str] = deque()

    def answer(self, a: int, b: int) -> str:
        """Answer one call."""
        return self.unseen.popleft() if self.unseen else added(a, b)


def tracebacks(count: int, seed: int) -> list[str]:
    """Return texts as a failing program writes them, no two alike: numbers and addresses are drawn anew for each.

    So is one name in five; the others are of a program of 400 names, the same for each seed.
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
    """Return the arguments of the call that a reply holds; None where it holds none."""
    _, call, rest = said.partition("<tool_call>\n")
    if not call:
        return None
    arguments: dict[str, int] = json.loads(rest.partition("\n</tool_call>")[0])["arguments"]
    return arguments
