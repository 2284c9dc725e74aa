"""Broken modules, each checked to terminate, to fail visible cases and to fail hidden cases."""

import ast
import json
import random
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import agentgym as ag
from envs.code_repair.cases import CASES
from envs.code_repair.mutate import Mutation, apply, mutations, overlap
from envs.code_repair.probe import outcomes, value_of

STEPS = 6000
"""Loop iterations and function calls that a module may use for its cases. The correct modules need less than half of
it.
"""


class _OutOfStepsError(BaseException):
    """Not an Exception, so that a case that expects an error doesn't catch it."""


@cache
def original(name: str) -> str:
    """Return the correct source of a module."""
    return (Path(__file__).parent / "modules" / f"{name}.py").read_text(encoding="ascii")


@cache
def answers(name: str, *, hidden: bool) -> tuple[Any, ...]:
    """Return the outcomes of the correct module's cases."""
    return tuple(run(original(name), _cases(name, hidden=hidden)) or ())


def run(source: str, cases: list[str]) -> list[Any] | None:
    """Run our own source on the host and return the outcomes, or None if it doesn't load or doesn't terminate."""
    left = STEPS

    def step() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _OutOfStepsError

    try:
        return outcomes(_counted(source), cases, step=step)
    except (_OutOfStepsError, RecursionError, SyntaxError):
        return None


def same(one: object, other: object) -> bool:
    """Return whether two values are the same plain JSON; 1, 1.0 and True all differ."""
    try:
        return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    except (TypeError, ValueError):
        return False


@cache
def single_bugs(name: str, split: ag.Split) -> tuple[Mutation, ...]:
    """Return the single mutations of a module that are checked to break it.

    No mutation is in both splits.
    """
    made = mutations(original(name))
    return tuple(m for m in made if _held_out(name, m) == (split == "test") and is_broken(name, [m]))


def draw(rng: random.Random, name: str, split: ag.Split) -> list[Mutation]:
    """Choose one or two mutations that break a module together and each on its own."""
    known = single_bugs(name, split)
    while True:
        bugs = rng.sample(known, rng.randint(1, 2))
        if len(bugs) == 1 or (not overlap(*bugs) and is_broken(name, bugs)):
            return sorted(bugs)


def is_broken(name: str, bugs: list[Mutation]) -> bool:
    """Return whether the broken module terminates, fails a visible case and fails a hidden one."""
    source = apply(original(name), bugs)
    seen, unseen = (run(source, _cases(name, hidden=hidden)) for hidden in (False, True))
    if seen is None or unseen is None:
        return False
    return not same(seen, answers(name, hidden=False)) and not same(unseen, answers(name, hidden=True))


def visible_tests(name: str) -> str:
    """Return the visible cases as a test file that `python3 -m unittest` finds and runs."""
    scope: dict[str, Any] = {}
    exec(compile(original(name), name, "exec"), scope)
    tests = [_test(number, case, dict(scope)) for number, case in enumerate(CASES[name].visible, 1)]
    head = f"import unittest\n\nfrom {name} import {', '.join(_public(name))}\n\n\n"
    return f"{head}class Test{name.title()}(unittest.TestCase):\n" + "\n".join(tests)


def _test(number: int, case: str, scope: dict[str, Any]) -> str:
    *setup, last = map(ast.unparse, ast.parse(case).body)
    lines = [f"    def test_{number}(self):", *(f"        {line}" for line in setup)]
    try:
        lines.append(f"        self.assertEqual({last}, {value_of(case, scope)!r})\n")
    except Exception as error:
        lines += [f"        with self.assertRaises({type(error).__name__}):", f"            {last}\n"]
    return "\n".join(lines)


def _public(name: str) -> list[str]:
    made = ast.parse(original(name)).body
    return [d.name for d in made if isinstance(d, ast.FunctionDef | ast.ClassDef) and not d.name.startswith("_")]


def _cases(name: str, *, hidden: bool) -> list[str]:
    return list(CASES[name].hidden if hidden else CASES[name].visible)


def _held_out(name: str, mutation: Mutation) -> bool:
    """Return whether a mutation is for evaluation only.

    One in four is, based on the mutation itself and never on its index.
    """
    text = f"{name} {mutation.start} {mutation.stop} {mutation.text}"
    return blake2b(text.encode(), digest_size=1).digest()[0] % 4 == 0


class _Count(ast.NodeTransformer):
    """Makes every loop iteration and function call use up a step, so that an endless program runs out of steps."""

    def _count(self, node: Any) -> Any:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(ast.Call(ast.Name("step", ast.Load()), [], [])))
        return node

    visit_For = visit_While = visit_FunctionDef = _count


def _counted(source: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Count().visit(ast.parse(source))))
