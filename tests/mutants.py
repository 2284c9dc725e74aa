# ruff: noqa: T201 - its output is printed
"""Mutation tests: put one small fault after another into the code; the tests must notice each.

`python tests/mutants.py [--count 300] [--seed 0] [FILE ..]` prints each fault that no test notices, and ends with a
line of JSON for each file and one for all. The exit code is 1 if more than one in twenty survives. mutants.toml names
the tests of each file, and the faults that change nothing visible to a caller, each with the reason.
"""

import argparse
import ast
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("hypothesis", "numpy", "peft", "pydantic", "pytest_asyncio", "rich", "torch", "transformers", "tyro")
"""Third-party modules that the tests import: loaded once, before the forks."""

SWAPS: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.And: "or", ast.Or: "and",
}  # fmt: skip


class Mutant(NamedTuple):
    """One fault: the source of `file` from byte `start` to byte `stop` becomes `text`."""

    file: str
    line: int
    start: int
    stop: int
    text: str

    def applied(self, source: bytes) -> bytes:
        """Return the faulty source."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def key(self) -> tuple[str, str, str]:
        """Return the fault's key in mutants.toml: its file, its line without the comment, and the inserted text."""
        return self.file, code_lines(self.file)[self.line - 1], self.text.strip()


def code_lines(file: str) -> list[str]:
    """Return the file's lines without indentation and trailing comments."""
    return [line.partition("  # ")[0].strip() for line in (ROOT / file).read_text().splitlines()]


def stale(known: dict[str, Any]) -> list[str]:
    """Return the entries of mutants.toml that excuse no fault of their file."""
    entries = {(entry["file"], entry["line"], entry["fault"]) for entry in known["equivalent"]}
    there = {mutant.key() for file in {file for file, *_ in entries} for mutant in mutants(file)}
    return [f"{file}: {line} -> {fault}" for file, line, fault in sorted(entries - there)]


def mutants(file: str) -> list[Mutant]:
    """Return every fault of one operator, number, condition, statement or returned value that still compiles."""
    source = (ROOT / file).read_bytes()
    starts = [0]  # of each line, in bytes, as ast counts columns
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source)
    left_out = {id(part) for node in ast.walk(tree) for whole in declarations(node) for part in ast.walk(whole)}
    found = []
    for node in ast.walk(tree):
        for first, last, text in faults(node) if id(node) not in left_out else ():
            begin, end = (first.lineno, first.col_offset), (last.end_lineno, last.end_col_offset)
            if first is not last:  # the operator between two nodes
                begin, end = (first.end_lineno, first.end_col_offset), (last.lineno, last.col_offset)
            start, stop = (starts[line - 1] + column for line, column in (begin, end))
            opening = source[start:stop].count(b"(") if first is not last else 0
            closing = source[start:stop].count(b")") if first is not last else 0
            mutant = Mutant(file, begin[0], start, stop, ")" * closing + text + "(" * opening)
            if compiles(mutant.applied(source)):
                found.append(mutant)
    return found


def declarations(node: ast.AST) -> list[Any]:
    """Return the parts of the node that get no faults: decorators, overloads and f-strings."""
    if isinstance(node, ast.JoinedStr):  # Before Python 3.12, the columns inside are not those of the file.
        return [node]
    found = node.decorator_list if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
    return [node] if any(isinstance(name, ast.Name) and name.id == "overload" for name in found) else found


def faults(node: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield the text to write for the node itself (a, a, text), or for the operator between two nodes (a, b, text)."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield node.left, node.comparators[0], f" {SWAPS[type(node.ops[0])]} "
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield node.left, node.right, f" {SWAPS[type(node.op)]} "
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield left, right, f" {SWAPS[type(node.op)]} "
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, node, repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await):
        yield node, node, "pass"
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield node.value, node.value, "None"
    if isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield node.test, node.test, f"(not ({ast.unparse(node.test)}))"


def compiles(source: bytes) -> bool:
    """Return whether the faulty source compiles."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def outcome(mutant: Mutant, copy: Path, tests: list[str], limit_s: int) -> str:
    """Run the tests with the fault in place: "killed", "hung" (longer than the limit) or "survived"."""
    path = copy / mutant.file
    sound, written = path.read_bytes(), path.stat().st_mtime_ns
    path.write_bytes(mutant.applied(sound))
    os.utime(path, (0, 0))  # So that no bytecode of the correct file is used.
    try:
        code = run(copy, tests, limit_s)
    finally:
        path.write_bytes(sound)
        os.utime(path, ns=(written, written))
    return "survived" if code == 0 else "hung" if code == -signal.SIGALRM else "killed"


def run(copy: Path, tests: list[str], limit_s: int = 0) -> int:
    """Run the tests in a fork of this process, which has the heavy imports, and return the fork's exit code."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = play(copy, tests, limit_s)
        finally:  # Whatever was raised: the fork must never continue as its parent.
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def play(copy: Path, tests: list[str], limit_s: int) -> int:
    """Run the tests of the copy in this process, and return pytest's exit code."""
    os.setsid()
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path.insert(0, str(copy))
    if limit_s:  # Bytecode belongs to the correct files.
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(1, 2)
    signal.alarm(limit_s)
    return int(
        pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *tests])
    )


def limits(copy: Path, tests: dict[str, list[str]]) -> dict[str, int]:
    """Return how many seconds the tests of each file may take with a fault; exit if they fail without one."""
    found: dict[tuple[str, ...], int] = {}
    for file, beside in tests.items():
        if tuple(beside) in found:
            continue
        begun = time.monotonic()
        if run(copy, beside):
            sys.exit(f"{file}: its tests fail even without a fault: {' '.join(beside)}")
        found[tuple(beside)] = 60 + 10 * int(time.monotonic() - begun)
    return {file: found[tuple(beside)] for file, beside in tests.items()}


def main() -> int:
    """Try the faults that the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="files named in mutants.toml; all by default")
    parser.add_argument("--count", type=int, default=300, help="how many faults to try, chosen at random; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice")
    given = parser.parse_args()
    known = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    equivalent = {(entry["file"], entry["line"], entry["fault"]) for entry in known["equivalent"]}
    drawn = [mutant for file in given.files or known["tests"] for mutant in mutants(file)]
    if missing := stale(known):
        sys.exit(f"mutants.toml: these faults don't exist: {missing}")
    random.Random(given.seed).shuffle(drawn)
    drawn = drawn[: given.count or None]
    counts: dict[str, Counter[str]] = {mutant.file: Counter() for mutant in drawn}
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "runs"))
        limit_s = limits(copy, {file: known["tests"][file] for file in counts})
        for number, mutant in enumerate(drawn, 1):
            result = outcome(mutant, copy, known["tests"][mutant.file], limit_s[mutant.file])
            if result == "survived" and mutant.key() in equivalent:
                result = "equivalent"
            counts[mutant.file][result] += 1
            if result != "killed":
                print(f"{result} {mutant.file}:{mutant.line}: {' -> '.join(mutant.key()[1:])}", flush=True)
            print(f"{number}/{len(drawn)}", end="\r", file=sys.stderr, flush=True)
    for file, count in sorted(counts.items()):
        print(json.dumps({"file": file, "mutants": count.total(), **count}))
    total = sum(counts.values(), Counter[str]())
    share = total["survived"] / max(total.total() - total["equivalent"], 1)
    print(json.dumps({"mutants": total.total(), **total, "share": round(share, 4)}))
    return int(share > 0.05)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
