"""Python math: a question with one exact answer, and a Python tool that keeps its variables between calls.

The questions come from a seeded generator. Their answers are computed here, by formulas that a model's code would
hardly use, and never enter the sandbox. The model's text is compared with them and never run.
"""

import random
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from hashlib import blake2b
from math import comb, lcm
from typing import Annotated, TypeAlias

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call, say

COUNT = 1_000_000
"""Number of tasks per split."""
INSTRUCTION = (
    "Work it out with the python tool; names persist from call to call. "
    'End with a line "Answer: " and the number: an integer or a fraction like 3/4.'
)

Question: TypeAlias = tuple[str, Fraction]
"""The text, on one line, and the exact answer."""
Family: TypeAlias = Callable[[random.Random], Question]


class MathTask(ag.Task):
    """A question of one family, and its answer as an integer or a fraction in lowest terms."""

    family: str
    answer: str = Field(pattern=r"^-?[0-9]+(/[1-9][0-9]*)?$")


# ---------------------------------------------------------------------------------------------------- questions


def remainder(rng: random.Random) -> Question:
    base, power, modulus = rng.randint(3, 99), rng.randint(20, 400), rng.randint(11, 997)
    text = f"What is the remainder when {base}^{power} is divided by {modulus}?"
    return text, Fraction(pow(base, power, modulus))


def multiples(rng: random.Random) -> Question:
    first, second = rng.sample(range(2, 30), 2)
    top = rng.randint(200, 5000)
    text = f"How many integers from 1 to {top} are divisible by {first} or by {second}, but not by both?"
    return text, Fraction(top // first + top // second - 2 * (top // lcm(first, second)))


def digit_sum(rng: random.Random) -> Question:
    top = rng.randint(100, 20_000)
    text = f"What is the sum of the digits of all integers from 1 to {top}, all added up?"
    return text, Fraction(sum(_digits_at(top, 10**place) for place in range(len(str(top)))))


def _digits_at(top: int, unit: int) -> int:
    """Return the sum of one decimal place over 1..top: complete cycles 0..9, then the digits of the incomplete one."""
    cycles, rest = divmod(top + 1, 10 * unit)
    digit, extra = divmod(rest, unit)
    return 45 * unit * cycles + unit * digit * (digit - 1) // 2 + digit * extra


def apart(rng: random.Random) -> Question:
    chosen, gap = rng.randint(2, 5), rng.randint(1, 3)
    books = rng.randint(chosen + (chosen - 1) * gap, 22)
    text = (
        f"In how many ways can {chosen} of {books} different books in a row be taken so that at least {gap} "
        "stayed between any two of them?"
    )
    return text, Fraction(comb(books - (chosen - 1) * gap, chosen))


def dice(rng: random.Random) -> Question:
    first, second = rng.randint(4, 20), rng.randint(4, 20)
    least = rng.randint(3, first + second)
    text = f"Two fair dice with {first} and {second} sides are rolled. How likely is a sum of at least {least}?"
    ways = sum(max(0, second - max(least - face, 1) + 1) for face in range(1, first + 1))
    return text, Fraction(ways, first * second)


def recurrence(rng: random.Random) -> Question:
    first, second, p, q = (rng.randint(1, 9) for _ in range(4))
    index = rng.randint(8, 25)
    text = (
        f"A sequence starts x(1) = {first}, x(2) = {second} and goes on x(n) = {p}*x(n-1) + {q}*x(n-2). "
        f"What is x({index})?"
    )
    return text, Fraction(_linear(first, second, p, q, index))


def _linear(first: int, second: int, p: int, q: int, index: int) -> int:
    """Return the term as an integer combination of the first two: (a, b) means a*x(2) + b*x(1)."""
    a, b = 1, 0
    for _ in range(index - 2):
        a, b = p * a + b, q * a
    return a * second + b * first


def taps(rng: random.Random) -> Question:
    fast, slow = sorted(rng.sample(range(3, 40), 2))
    drain = rng.randint(slow + 1, 80)
    text = (
        f"One tap fills a tank in {fast} minutes, another in {slow} minutes; a drain empties it in {drain} minutes. "
        "All three are open and the tank is empty. How many minutes until it is full?"
    )
    return text, Fraction(fast * slow * drain, slow * drain + fast * drain - fast * slow)


def stamps(rng: random.Random) -> Question:
    small, large = sorted(rng.sample(range(2, 20), 2))
    total = rng.randint(100, 900)
    text = (
        f"Stamps cost {small} or {large} cents each. In how many ways can stamps be bought for exactly {total} cents?"
    )
    return text, Fraction(sum((total - large * n) % small == 0 for n in range(total // large + 1)))


FAMILIES: tuple[Family, ...] = (remainder, multiples, digit_sum, apart, dice, recurrence, taps, stamps)


# ---------------------------------------------------------------------------------------------------- tasks


def make_task(split: ag.Split, index: int) -> MathTask:
    """Create the task of an index; the families alternate by index.

    The same arguments always give the same task.
    """
    family = FAMILIES[index % len(FAMILIES)]
    rng = random.Random(index)
    text, answer = family(rng)
    while is_held_out(text) != (split == "test"):
        text, answer = family(rng)
    prompt = ag.Message(role="user", content=f"{text}\n{INSTRUCTION}")
    return MathTask(id=f"math-{split}-{index}", prompt=(prompt,), family=family.__name__, answer=str(answer))


def is_held_out(question: str) -> bool:
    """Return whether this question is for evaluation only.

    One in eight is. This depends on the text and not on the index, since two indices can draw the same numbers.
    """
    return blake2b(question.encode(), digest_size=1).digest()[0] % 8 == 0


# ---------------------------------------------------------------------------------------------------- answers

# At most 400 digits, and no exponent: refusing "1e999999999" must cost nothing.
_NUMBER = re.compile(r"[+-]?[0-9]{1,400}(/[0-9]{1,400}|\.[0-9]{0,400})?")
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_FRAC = re.compile(r"^([+-]?)\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}$")


def parse_answer(text: str) -> Fraction | None:
    r"""Parse the exact number on the last line, after `Answer:` or in `\boxed{}`; return None if there is none.

    Commas, spaces and dollar signs are ignored: "1,234" is 1234. Fractions may be 3/4, 0.75 or \frac{3}{4}.
    """
    line = text.strip().rpartition("\n")[2]
    boxed = _BOXED.findall(line)
    found = boxed[-1] if boxed else line.rpartition("Answer:")[2] if "Answer:" in line else ""
    number = _FRAC.sub(r"\1\2/\3", re.sub(r"[,\s$]", "", found))
    if not _NUMBER.fullmatch(number):
        return None
    try:
        return Fraction(number)
    except ZeroDivisionError:
        return None


# ---------------------------------------------------------------------------------------------------- the env


@ag.register("python_math")
class PythonMath(ag.ToolEnv[MathTask]):
    """Reward 1 for exactly the right number, minus 0.1 for each malformed call."""

    sandbox_spec = ag.AnySandbox()
    limits = ag.Limits(turns=8, seconds=300)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[MathTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    @ag.tool(timeout_s=20)
    async def python(self, code: Annotated[str, Field(max_length=4000)]) -> str:
        """Run Python code; names persist from call to call, and the value of a last expression is shown."""
        return (await self.sandbox.python(code)).text(limit=2000)

    @ag.reward
    def correct(self) -> float:
        """Return whether the last line of the answer has exactly the right number."""
        return float(parse_answer(self.answer or "") == Fraction(self.task.answer))

    @ag.reward(weight=-0.1)
    def malformed(self) -> float:
        """Return how many calls were malformed; without this cost, malformed calls would not be unlearned."""
        return self.metrics["malformed_calls"]


def oracle(task: MathTask) -> list[Reply]:
    """Return replies with the right number, which Python prints first; `agentgym check` and the tests play them."""
    return [call("python", code=f"answer = {task.answer!r}\nanswer"), say(f"Answer: {task.answer}")]
