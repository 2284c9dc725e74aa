"""Runs a module's cases and reports each outcome as plain JSON.

It only needs the standard library. This text runs on the host for our own modules, and in the sandbox for submitted
ones.
"""

import ast
import json
from typing import Any


def outcomes(source: str, cases: list[str], **names: Any) -> list[Any]:
    """Return one outcome per case, each run in a separate namespace: `{"value": ...}` or `{"raised": "ValueError"}`."""
    scope: dict[str, Any] = {"__name__": "module", **names}
    exec(compile(source, "module", "exec"), scope)
    return [outcome(case, dict(scope)) for case in cases]


def outcome(case: str, scope: dict[str, Any]) -> Any:
    """Return the outcome of a case; a value that JSON can't represent counts as an error of the module."""
    try:
        return {"value": json.loads(json.dumps(value_of(case, scope)))}
    except Exception as error:
        return {"raised": type(error).__name__}


def value_of(case: str, scope: dict[str, Any]) -> Any:
    """Return the value of the last expression, after running the statements before it."""
    *setup, last = ast.parse(case).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(setup, []), "case", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "case", "eval"), scope)
