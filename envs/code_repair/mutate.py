"""Small, plausible mistakes: finds every way to put one into a source, each as one replaced span of text.

It replaces text instead of unparsing a tree, so comments and layout stay and only the mistake differs.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

SIGNS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">"),
    ast.LtE: ("<=", "<", ">="),
    ast.Gt: (">", ">=", "<"),
    ast.GtE: (">=", ">", "<="),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
"""How each operator is written, and what may replace it."""
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True, order=True)
class Mutation:
    """A mutation that replaces the characters from `start` to `stop` with `text`."""

    start: int
    stop: int
    text: str
    kind: str


def apply(source: str, mutations: Iterable[Mutation]) -> str:
    """Return the source with all of these mutations, which must not overlap."""
    for mutation in sorted(mutations, reverse=True):
        source = source[: mutation.start] + mutation.text + source[mutation.stop :]
    return source


def overlap(one: Mutation, other: Mutation) -> bool:
    """Return whether two mutations touch the same text."""
    return one.start < other.stop and other.start < one.stop


def mutations(source: str) -> list[Mutation]:
    """Return every single mistake that this module can make in the source, in text order; the source must be ASCII."""
    text = _Text(source)
    return sorted({made for node in _walk(ast.parse(source)) for made in _mistakes(node, text)})


class _Text:
    """A source, and the positions of its syntax tree's nodes in it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt) -> str:
        start, stop = self.span(node)
        return self.source[start:stop]

    def replace(self, node: ast.expr | ast.stmt, text: str, kind: str) -> Mutation:
        return Mutation(*self.span(node), text, kind)

    def operator(self, left: ast.expr, op: ast.AST, right: ast.expr, kind: str) -> Iterator[Mutation]:
        """Return the mutation that replaces the operator between two operands; brackets around them stay."""
        sign, *others = SIGNS.get(type(op), ("",))
        start = self.source.index(sign, self.span(left)[1], self.span(right)[0])
        yield from (Mutation(start, start + len(sign), other, kind) for other in others)


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    yield tree
    for node in ast.iter_child_nodes(tree):
        # Before Python 3.12, nodes inside an f-string have no usable position.
        if not isinstance(node, ast.JoinedStr):
            yield from _walk(node)


def _mistakes(node: ast.AST, text: _Text) -> Iterator[Mutation]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=rest):
            for (one, other), op in zip(pairwise([left, *rest]), ops, strict=True):
                yield from text.operator(one, op, other, "comparison")
        case ast.BinOp(left=left, op=op, right=right):
            yield from text.operator(left, op, right, "operator")
        case ast.AugAssign(target=ast.Name() | ast.Attribute() | ast.Subscript() as target, op=op, value=value):
            yield from text.operator(target, op, value, "operator")
        case ast.BoolOp(op=op, values=values):
            for one, other in pairwise(values):
                yield from text.operator(one, op, other, "boolean")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield text.replace(node, text.of(operand), "boolean")
        case ast.Constant(value=bool(value)):
            yield text.replace(node, str(not value), "constant")
        case ast.Constant(value=int(value)):
            yield from (text.replace(node, str(near), "off by one") for near in (value - 1, value + 1) if near >= 0)
        case ast.Call():
            yield from _wrong_call(node, text)
        case ast.FunctionDef(body=body) | ast.For(body=body) | ast.While(body=body) | ast.If(body=body):
            yield from _dropped(body, text)


def _wrong_call(call: ast.Call, text: _Text) -> Iterator[Mutation]:
    if isinstance(call.func, ast.Name) and call.func.id in TWINS:
        yield text.replace(call.func, TWINS[call.func.id], "wrong function")
    if len(call.args) >= 2:
        (start, one), (other, stop) = text.span(call.args[0]), text.span(call.args[1])
        swapped = text.source[other:stop] + text.source[one:other] + text.source[start:one]
        yield Mutation(start, stop, swapped, "swapped arguments")


def _dropped(body: list[ast.stmt], text: _Text) -> Iterator[Mutation]:
    """Yield the mutation that removes an `if` without an else, with its whole body."""
    for statement in body if len(body) > 1 else []:
        if isinstance(statement, ast.If) and not statement.orelse:
            start, stop = text.span(statement)
            if text.source.startswith("if", start):
                yield Mutation(text.source.rindex("\n", 0, start) + 1, stop + 1, "", "dropped branch")
