"""Calculator: arithmetic that a small model can't do on its own, and a tool for it, with three examples of a call."""

import ast
import operator
import random
import re
from functools import partial
from hashlib import blake2b
from typing import Annotated

from pydantic import Field

import agentgym as ag
from agentgym.testing import Reply, call, say
from agentgym.types.messages import Function, ToolCall

COUNT = 1_000_000
"""Number of tasks per split."""
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
BY_NODE = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
EXAMPLES = ("12 * 15", "83 + 41", "64 - 27")


def calculated(expression: str) -> int:
    """Return the value of integers joined by +, - and *, with parentheses.

    Raises:
        ValueError: If the expression is anything else.
    """
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ValueError(f"{expression!r} is not an expression such as 12 * 15") from None


def _value(node: ast.AST) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return int(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BY_NODE:
            return int(BY_NODE[type(op)](_value(left), _value(right)))
    raise ValueError("only integers, +, -, * and parentheses can be calculated")


def example(expression: str) -> list[ag.Message]:
    """Return a conversation in which the tool is called once and its result is the answer."""
    result = str(calculated(expression))
    function: Function = {"name": "calculate", "arguments": {"expression": expression}}
    called: ToolCall = {"id": f"example-{expression}", "type": "function", "function": function}
    return [
        ag.Message(role="user", content=f"What is {expression}?"),
        ag.Message(role="assistant", content="", tool_calls=[called]),
        ag.Message(role="tool", content=result, name="calculate", tool_call_id=called["id"]),
        ag.Message(role="assistant", content=result),
    ]


class CalculatorTask(ag.Task):
    """An expression of two numbers with two digits, and its value."""

    expression: str
    result: int


def make_task(split: ag.Split, index: int) -> CalculatorTask:
    """Create the task of an index; the same arguments always give the same task."""
    rng = random.Random(index)
    expression = draw(rng)
    while is_held_out(expression) != (split == "test"):
        expression = draw(rng)
    asked = ag.Message(role="user", content=f"What is {expression}?")
    shown = [message for text in EXAMPLES for message in example(text)]
    task_id, result = f"calculator-{split}-{index}", calculated(expression)
    return CalculatorTask(id=task_id, prompt=(*shown, asked), expression=expression, result=result)


def draw(rng: random.Random) -> str:
    """Return a random expression."""
    return f"{rng.randint(10, 99)} {rng.choice(list(OPERATORS))} {rng.randint(10, 99)}"


def is_held_out(expression: str) -> bool:
    """Return whether this expression is for evaluation only.

    One in eight is. This depends on the text and not on the index, since two indices can draw the same expression.
    """
    return blake2b(expression.encode(), digest_size=1).digest()[0] % 8 == 0


@ag.register("calculator")
class Calculator(ag.ToolEnv[CalculatorTask]):
    """Reward 1 if the last number of the answer is the result."""

    system = "Use the tool."
    limits = ag.Limits(turns=3, turn_tokens=128)

    @classmethod
    def tasks(cls, split: ag.Split) -> ag.Procedural[CalculatorTask]:
        return ag.Procedural(partial(make_task, split), range(COUNT))

    @ag.tool
    async def calculate(self, expression: Annotated[str, Field(max_length=40)]) -> str:
        """Calculate an arithmetic expression, such as 2 * 3."""
        try:
            return str(calculated(expression))
        except ValueError as error:
            raise ag.ToolError(str(error)) from None

    @ag.reward
    def correct(self) -> float:
        """Return whether the last number is the result."""
        numbers = re.findall(r"-?\d+", self.answer or "")
        return float(numbers[-1:] == [str(self.task.result)])


def oracle(task: CalculatorTask) -> list[Reply]:
    """Return the right call and the right answer; `agentgym check` and the tests play them."""
    return [call("calculate", expression=task.expression), say(str(task.result))]
