"""Tests of python_math without a model or a container."""

import inspect
import itertools
import re
from collections.abc import Callable
from fractions import Fraction

import pytest

import agentgym as ag
from agentgym.engines.scripted import Reply, ReplyPolicy, Scripted, call, raw, say
from agentgym.sandboxes.fake.sandbox import FakeSandboxPool
from agentgym.testing import check_env
from envs.python_math.env import FAMILIES, MathTask, PythonMath, is_held_out, make_task, parse_answer

# ------------------------------------------------------------------- every family again, by brute force
# Called with the numbers in the question, in order; also sent into the sandbox as source, including the imports.


def remainder(base: int, power: int, modulus: int) -> int:
    return int(base**power % modulus)


def multiples(start: int, top: int, first: int, second: int) -> int:
    return sum((n % first == 0) != (n % second == 0) for n in range(start, top + 1))


def digit_sum(start: int, top: int) -> int:
    return sum(int(digit) for n in range(start, top + 1) for digit in str(n))


def apart(chosen: int, books: int, gap: int) -> int:
    rows = itertools.combinations(range(books), chosen)
    return sum(all(b - a > gap for a, b in itertools.pairwise(row)) for row in rows)


def dice(first: int, second: int, least: int) -> Fraction:
    rolls = list(itertools.product(range(1, first + 1), range(1, second + 1)))
    return Fraction(sum(sum(roll) >= least for roll in rolls), len(rolls))


def recurrence(one: int, first: int, two: int, second: int, p: int, _1: int, q: int, _2: int, index: int) -> int:
    terms = [first, second]
    while len(terms) < index:
        terms.append(p * terms[-1] + q * terms[-2])
    return terms[-1]


def taps(fast: int, slow: int, drain: int) -> Fraction:
    return 1 / (Fraction(1, fast) + Fraction(1, slow) - Fraction(1, drain))


def stamps(small: int, large: int, total: int) -> int:
    counts = itertools.product(range(total // small + 1), range(total // large + 1))
    return sum(a * small + b * large == total for a, b in counts)


BRUTE: dict[str, Callable[..., int | Fraction]] = {
    made.__name__: made for made in (remainder, multiples, digit_sum, apart, dice, recurrence, taps, stamps)
}
"""Brute-force functions by the name of the family."""


def numbers(task: MathTask) -> list[int]:
    question = task.prompt[0]["content"].partition("\n")[0]
    return [int(found) for found in re.findall(r"\d+", question)]


def program(task: MathTask) -> str:
    """Return the brute force as a cell whose output is the answer."""
    source = inspect.getsource(BRUTE[task.family])
    return f"import itertools\nfrom fractions import Fraction\n{source}\nprint({task.family}(*{numbers(task)}))"


def solver(task: MathTask) -> ReplyPolicy:
    """Run the program, then answer with the tool's output."""

    def policy(text: str) -> Reply:
        said = re.search(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", text, re.DOTALL)
        return say(f"The tool says so.\nAnswer: {said[1]}") if said else call("python", code=program(task))

    return policy


def task_of(family: str) -> MathTask:
    names = [made.__name__ for made in FAMILIES]
    return PythonMath.tasks("train")[names.index(family)]


TASK = MathTask(
    id="t",
    prompt=(ag.Message(role="user", content="How likely is heads, twice in a row?"),),
    family="dice",
    answer="1/4",
)


async def play(sandboxes: FakeSandboxPool, *script: Reply) -> ag.Rollout:
    return await ag.rollout(PythonMath, TASK, Scripted(script), sandboxes=sandboxes)


# ------------------------------------------------------------------- the env


async def test_python_math_keeps_the_contract_of_an_env(sandboxes: FakeSandboxPool, no_leaks: None) -> None:
    task = task_of("dice")
    await check_env(PythonMath, task, oracle=solver(task), sandboxes=sandboxes)


@pytest.mark.parametrize("family", sorted(BRUTE))
async def test_a_program_in_the_sandbox_solves_the_family(family: str, sandboxes: FakeSandboxPool) -> None:
    task = task_of(family)
    rollout = await ag.rollout(PythonMath, task, Scripted(solver(task)), sandboxes=sandboxes)
    assert (rollout.reward, rollout.stop_reason, rollout.metrics["tool_calls"]) == (1.0, "answer", 1)


async def test_a_wrong_answer_earns_nothing(sandboxes: FakeSandboxPool) -> None:
    assert (await play(sandboxes, say("Answer: 1/3"))).reward == 0.0


async def test_the_answer_counts_only_on_the_last_line(sandboxes: FakeSandboxPool) -> None:
    assert (await play(sandboxes, say("Answer: 1/4\nor perhaps not"))).reward == 0.0


async def test_a_malformed_call_costs_a_tenth(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, raw("<tool_call>\n1/4\n</tool_call>"), say("Answer: 1/4"))
    assert rollout.rewards == {"correct": 1.0, "malformed": 1.0}


async def test_names_persist_from_call_to_call(sandboxes: FakeSandboxPool) -> None:
    said: list[str] = []

    def policy(text: str) -> Reply:
        said.append(text)
        script = [call("python", code="half = 0.5"), call("python", code="half * half"), say("Answer: 0.25")]
        return script[len(said) - 1]

    rollout = await ag.rollout(PythonMath, TASK, Scripted(policy), sandboxes=sandboxes)
    assert "<|im_start|>tool\n0.25<|im_end|>" in said[-1]
    assert rollout.reward == 1.0


async def test_an_exception_in_the_code_is_a_message_to_the_model(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, call("python", code="1 / 0"), say("Answer: 1/4"))
    assert rollout.reward == 1.0
    assert rollout.metrics["tool_errors"] == 0


async def test_no_answer_before_the_last_turn_earns_nothing(sandboxes: FakeSandboxPool) -> None:
    rollout = await play(sandboxes, *[call("python", code="1")] * 8)
    assert (rollout.reward, rollout.stop_reason) == (0.0, "turns")


# ------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Answer: 42", Fraction(42)),
        ("So it is:\nAnswer: 42\n", Fraction(42)),
        (r"Thus \boxed{42}", Fraction(42)),
        (r"Answer: \boxed{42}", Fraction(42)),
        (r"\boxed{1} is wrong, \boxed{2} is right", Fraction(2)),
        ("Answer: 1,234 567", Fraction(1_234_567)),
        ("Answer: -3 / 6", Fraction(-1, 2)),
        ("Answer: +0.75", Fraction(3, 4)),
        ("Answer: 42.", Fraction(42)),
        ("Answer: $42$", Fraction(42)),
        (r"$\boxed{-\frac{3}{4}}$", Fraction(-3, 4)),
        (r"\boxed{\dfrac{6}{8}}", Fraction(3, 4)),
        ("Answer: not 41, Answer: 42", Fraction(42)),
    ],
)
def test_answers_are_parsed(text: str, number: Fraction) -> None:
    assert parse_answer(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "Answer:",
        "Answer: about 42",
        "Answer: 40 + 2",
        "Answer: 6*7",
        "Answer: 0x2a",
        "Answer: 1/0",
        "Answer: 1e9",
        "Answer: inf",
        "Answer: 1_000",
        "Answer: 1/2/3",
        "Answer: ٤٢",
        "Answer: __import__('os')",
        "Answer: " + "9" * 5000,
        r"\boxed{}",
        "Answer: 42\nthat is my answer",
        "Answer: 4\n2",
        "\\boxed{42}\nor perhaps not",
    ],
)
def test_text_that_is_not_a_number_is_not_an_answer(text: str) -> None:
    assert parse_answer(text) is None


# ------------------------------------------------------------------- the generator


def test_every_family_has_a_brute_force_solution() -> None:
    assert sorted(made.__name__ for made in FAMILIES) == sorted(BRUTE)


@pytest.mark.parametrize("split", ["train", "test"])
def test_brute_force_gives_the_same_answers(split: ag.Split) -> None:
    for task in PythonMath.tasks(split)[: 40 * len(FAMILIES)]:
        assert Fraction(BRUTE[task.family](*numbers(task))) == Fraction(task.answer), task.prompt[0]["content"]


def questions(split: ag.Split) -> set[str]:
    return {task.prompt[0]["content"].partition("\n")[0] for task in PythonMath.tasks(split)[:4000]}


def test_questions_of_train_and_test_never_overlap() -> None:
    train, test = questions("train"), questions("test")
    assert not train & test
    assert len(train) > 3000
    assert all(map(is_held_out, test))


def test_the_same_index_gives_the_same_task() -> None:
    assert PythonMath.tasks("train")[7] == PythonMath.tasks("train")[7] == make_task("train", 7)


def test_the_first_tasks_never_change() -> None:
    """Held-out scores are compared across versions, so the generator must not change unnoticed."""
    answers = [task.answer for task in PythonMath.tasks("test")[: len(FAMILIES)]]
    assert answers == ["60", "566", "368634", "1287", "23/24", "65591", "312/47", "46"]


def test_few_questions_are_held_out() -> None:
    held = sum(is_held_out(f"question {n}") for n in range(4000))
    assert 400 < held < 600
