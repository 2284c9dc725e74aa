"""Roman numerals from 1 to 3999."""

SYMBOLS = [
    ("M", 1000),
    ("CM", 900),
    ("D", 500),
    ("CD", 400),
    ("C", 100),
    ("XC", 90),
    ("L", 50),
    ("XL", 40),
    ("X", 10),
    ("IX", 9),
    ("V", 5),
    ("IV", 4),
    ("I", 1),
]


def to_roman(number: int) -> str:
    """The numeral; ValueError outside 1..3999."""
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} has no numeral")
    numeral = ""
    for symbol, value in SYMBOLS:
        count = number // value
        numeral += symbol * count
        number -= value * count
    return numeral


def from_roman(numeral: str) -> int:
    """The number; ValueError for what `to_roman` would not write."""
    rest = numeral
    number = 0
    for symbol, value in SYMBOLS:
        while rest.startswith(symbol):
            number += value
            rest = rest[len(symbol) :]
    if rest or not 1 <= number <= 3999 or to_roman(number) != numeral:
        raise ValueError(f"{numeral!r} is no numeral")
    return number
