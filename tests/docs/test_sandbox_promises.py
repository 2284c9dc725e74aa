"""The promises in the sandbox's README: each names existing tests, and no test file is forgotten."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "sandboxes"
SECTION = (ROOT / "sandbox" / "README.md").read_text().partition("## Promised, and not")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (?!promised|---)(.+) \| (.+) \|$", SECTION, re.MULTILINE)
NAMED = [(promise, name) for promise, names in ROWS for name in names.split(", ")]
WITHOUT_A_PROMISE = {
    "test_asks.py": "questions of a cell, under load",
    "test_chaos_report.py": "what the chaos test says of a wrong end",
    "test_contract.py": "what calls return",
    "test_contract_programs.py": "what programs and shells return",
    "test_engine.py": "engines that are down",
    "test_fork.py": "branches, which are apart against accidents only",
    "test_machine.py": "limits of this machine",
    "test_many.py": "many sandboxes at once",
    "test_payloads.py": "the battery's own form",
    "test_providers.py": "the contract for other providers",
    "test_tls.py": "engines over TLS",
    "test_wire.py": "frames",
}
"""Test files about things that code in a sandbox can't break on purpose, with their topics."""


def functions(path: str) -> list[str]:
    """Return the names of a file's test functions."""
    return re.findall(r"^(?:async )?def (test_\w+)", (TESTS / path).read_text(), re.MULTILINE)


def test_the_table_has_rows() -> None:
    rows = [line for line in SECTION.splitlines() if line.startswith("|")]
    assert len(ROWS) == len(rows) - 2 > 0


@pytest.mark.parametrize(("promise", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_promise_names_one_test(promise: str, name: str) -> None:
    path, colon, part = name.partition(": ")
    assert colon, f"{promise}: name a test in {path}"
    found = [function for function in functions(path) if part in function]
    assert len(found) == 1, f"{promise}: expected {part!r} in exactly one test name, got {found} in {path}"


def test_every_test_file_has_a_promise_or_is_listed_without_one() -> None:
    files = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}
    named = {name.partition(": ")[0] for _, name in NAMED}
    assert files - named == set(WITHOUT_A_PROMISE)
