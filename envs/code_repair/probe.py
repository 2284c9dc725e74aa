"""Run a module's cases and say what each came to, as plain JSON.

Standard library only: this text runs on the host, over our own modules, and in the sandbox, over what was submitted.
"""

import ast
import json
from typing import Any


def outcomes(source: str, cases: list[str], **names: Any) -> list[Any]:
    """One outcome a case, each in names of its own: `{"value": ...}` or `{"raised": "ValueError"}`."""
    scope: dict[str, Any] = {"__name__": "module", **names}
    exec(compile(source, "module", "exec"), scope)
    return [outcome(case, dict(scope)) for case in cases]


def outcome(case: str, scope: dict[str, Any]) -> Any:
    """What the case comes to; anything that is not JSON counts as an error of the module."""
    try:
        return {"value": json.loads(json.dumps(value_of(case, scope)))}
    except Exception as error:
        return {"raised": type(error).__name__}


def value_of(case: str, scope: dict[str, Any]) -> Any:
    """The value of the last expression, after the statements before it."""
    *setup, last = ast.parse(case).body
    assert isinstance(last, ast.Expr)
    exec(compile(ast.Module(setup, []), "case", "exec"), scope)
    return eval(compile(ast.Expression(last.value), "case", "eval"), scope)
