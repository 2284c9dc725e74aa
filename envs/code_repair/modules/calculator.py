"""Whole-number arithmetic: tokens, then their value."""

SIGNS = "+-*/()"


def tokens(text: str) -> list[str]:
    """Numbers and signs in their order; ValueError for anything else."""
    found: list[str] = []
    at = 0
    while at < len(text):
        character = text[at]
        if character.isdigit():
            stop = at
            while stop < len(text) and text[stop].isdigit():
                stop += 1
            found.append(text[at:stop])
            at = stop
            continue
        if character in SIGNS:
            found.append(character)
        elif character != " ":
            raise ValueError(f"unexpected {character!r}")
        at += 1
    return found


def evaluate(text: str) -> int:
    """The value; division rounds down, a product goes before a sum."""
    rest = tokens(text)
    value = _sum(rest)
    if rest:
        raise ValueError(f"unexpected {rest[0]!r}")
    return value


def _sum(rest: list[str]) -> int:
    value = _product(rest)
    while rest and rest[0] in "+-":
        sign = rest.pop(0)
        value = value + _product(rest) if sign == "+" else value - _product(rest)
    return value


def _product(rest: list[str]) -> int:
    value = _atom(rest)
    while rest and rest[0] in "*/":
        sign = rest.pop(0)
        value = value * _atom(rest) if sign == "*" else value // _atom(rest)
    return value


def _atom(rest: list[str]) -> int:
    if not rest:
        raise ValueError("unexpected end")
    token = rest.pop(0)
    if token == "-":
        return -_atom(rest)
    if token == "(":
        value = _sum(rest)
        if not rest or rest.pop(0) != ")":
            raise ValueError("a bracket is open")
        return value
    return int(token)
