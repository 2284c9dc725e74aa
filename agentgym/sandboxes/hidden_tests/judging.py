"""The host's verdict on hidden tests: each case is judged when it is reported, and its full output is discarded."""

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.errors.tracebacks import encodable
from agentgym.sandboxes.protocol import ExecResult, Expected, Verdict
from agentgym.sandboxes.protocol.programs import cut_middle
from agentgym.sandboxes.remote.refusals import with_advice

MAX_OUTPUT = 1 << 20
"""Maximum characters of output in a verdict, for all cases together."""
MAX_REASON = 1000
"""Maximum characters of a failure reason."""


class Judging:
    """Judges the cases as they are reported, one by one, so that their full outputs need not be stored."""

    def __init__(self, kind: str, names: Sequence[str], expect: Mapping[str, Expected] | None) -> None:
        """Prepare to judge cases of one kind.

        Args:
            kind: "function", "value", "command" or "shell", as in the plan of the tests.
            names: The names of the cases.
            expect: The expected value, or a function that judges a value, for each case; None if values are not
                compared.

        Raises:
            ValueError: If an expected value can't be written as JSON.
        """
        self.kind, self.names, self.expect = kind, names, expect
        self.cases: dict[str, str | None] = {}
        self.printed: list[str] = []
        self.kept = self.cut = 0
        self.lacks = ""
        """Name of the module that the command runs but the sandbox lacks; "" if none is missing."""
        if kind == "value":
            self.expect = {name: value if callable(value) else plain(value) for name, value in (expect or {}).items()}

    def report(self, name: str | None, heard: Mapping[str, Any]) -> None:
        """Judge a case by `heard`, the harness's report on it with its output.

        If `name` is None, the report says which module the sandbox lacks, and that is recorded instead.
        """
        if name is None:
            self.lacks = str(heard["lacks"])
            return
        if self.kind == "command" and isinstance(cases := heard.get("cases"), dict) and cases:
            self.cases |= {encodable(case): None if why is None else reason(why) for case, why in cases.items()}
        else:
            why_not = self.judge(name, heard)
            self.cases[name] = None if why_not is None else reason(why_not)
        self.keep(str(heard.get("printed", "")))
        self.keep(str(heard.get("beside", "")))  # The case's stderr, if only its stdout is compared.

    def keep(self, printed: str) -> None:
        """Store a case's output, up to MAX_OUTPUT characters for all cases, and count the characters that are cut."""
        head = encodable(printed[: MAX_OUTPUT - self.kept])[: MAX_OUTPUT - self.kept]
        if head:
            self.printed.append(head)
        self.kept += len(head)
        self.cut += len(printed) - len(head)

    def judge(self, name: str, heard: Mapping[str, Any]) -> str | None:
        """Return why a case failed, or None if it passed; each kind of case has one criterion."""
        if "failed" in heard:
            return str(heard["failed"])
        if self.kind == "command":
            return "no test ran"
        if self.kind == "function":
            return None if heard.get("passed") is True else "the test did not report that it passed"
        if self.kind == "shell":
            if heard.get("exit_code") != 0:
                return f"exit code {heard.get('exit_code')}"
            return None if self.expect is None else of_value(str(heard.get("printed")), self.expect[name], printed=True)
        assert self.expect is not None
        try:
            value = json.loads(heard["value"])
        except (KeyError, TypeError, ValueError, RecursionError):
            return "the value is not JSON"
        return of_value(value, self.expect[name], printed=False)

    def verdict(self, result: ExecResult) -> Verdict:
        """Return the verdict; a case that was not reported counts as failed.

        Raises:
            ValueError: If the sandbox lacks the test runner.
        """
        if self.lacks:
            raise ValueError(
                f"command: the sandbox has no {self.lacks}, so no test can pass: install it, for example with "
                f'ag.AnySandbox(pip=("{self.lacks}",)), or run the tests with `python3 -m unittest`'
            )
        if self.kind != "command" or not self.cases:
            why = reason(f"the tests did not finish: {result.text(500) or 'the process ended'}")
            self.cases = {**dict.fromkeys(self.names, why), **self.cases}
        note = f"\n[... {self.cut} characters cut ...]\n" if self.cut else ""
        return Verdict(cases=self.cases, output="".join([*self.printed, note]), result=result)


def reason(why: object) -> str:
    """Return why a case failed, as text that UTF-8 can encode.

    If the sandbox ran out of space or memory, the text names the setting to raise.
    """
    return with_advice(cut_middle(encodable(str(why)), MAX_REASON))


def of_value(value: Any, expected: Expected, *, printed: bool) -> str | None:
    """Return why a value is wrong, or None if it is right.

    In printed text, trailing whitespace of each line is ignored.
    """
    if callable(expected):
        try:
            said = expected(value)
            if inspect.isawaitable(said):
                raise TypeError("the function is async; give a function that is not")
            right = bool(said)
        except Exception as error:  # The tested code chose the value, so only this case fails, not the rollout.
            return f"the function in expect raised {type(error).__name__} for {shown(value)}: {error}"
    elif printed:
        right = lines(value) == lines(str(expected))
    else:
        right = same(value, expected)
    return None if right else f"{shown(value)} is not right"


def shown(value: Any) -> str:
    """Return the beginning of a value's text."""
    try:
        return repr(str(value)[:200])
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def lines(text: str) -> list[str]:
    """Return the lines of a text without trailing whitespace and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def plain(value: object) -> Any:
    """Return the value after a JSON round trip.

    Raises:
        ValueError: If it can't be written as JSON.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"expect: {value!r} is not JSON; give a function that takes the value instead") from error


def same(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; 1 equals 1.0 but not true, and NaN equals itself."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
