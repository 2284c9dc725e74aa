"""The bugs of the repository: each replaces one span of text, and no visible test detects it."""

from typing import NamedTuple

NEEDS = {"invoice": ("money", "table")}
"""The parts that a part imports."""
VISIBLE = {
    "money": ["parse('12.50')", "parse('7')", "parse('-3')", "show(1250)", "show(-1999)", "share(900, 3)"],
    "table": ["widths([['name', 'count'], ['fig', '3']])", "render([['name', 'no'], ['fig', '12']])"],
    "invoice": [
        "total([('fig', 1, '1.20'), ('pear', 1, '2')])",
        "total([('fig', 1, '1.00')], 25)",
        "show([('total fig', 1, '1.20')])",
    ],
    "pages": ["count([1] * 7, 3)", "count([], 3)", "page([1, 2, 3, 4], 2, 3)", "neighbors([1] * 9, 2, 3)"],
    "bookings": [
        "Calendar().book(8, 9)",
        "booked((8, 10)).book(9, 11)",
        "booked((9, 12)).free(8, 12)",
        "error_of(Calendar().book, 9, 9)",
    ],
    "query": ["parse('a=1&b=2')", "unquote('a+b')", "unquote('%41b')", "quote('a b')", "parse('')"],
    "plan": ["order({'a': ['b']})", "error_of(order, {'a': ['a']})", "ready({'a': [], 'b': ['a']}, [])"],
}
"""Cases of the repository's tests, by part, as expressions over the part's names."""


class Bug(NamedTuple):
    """A bug, a user's report of it, and the hidden cases that detect it."""

    kind: str
    part: str
    good: str
    bad: str
    issue: str
    hidden: list[str]
    held_out: bool = False
    """Whether it belongs to the test split; no bug is in both splits."""


BUGS = (
    Bug(
        *("sign", "money", 'sign * (int(whole) * 100 + int((part + "00")[:2]))'),
        'sign * int(whole) * 100 + int((part + "00")[:2])',
        "Credit notes are wrong. I enter -1.50, and the books say that it is 50 cents.",
        ["parse('-1.50')", "parse('-0.05')", "parse('-20.99')", "parse('0.5')"],
    ),
    Bug(
        *("padding", "money", "{part:02}", "{part}"),
        "A price of 4 euros and 5 cents is printed as 4.5, and one of 3 euros as 3.0.",
        ["show(405)", "show(300)", "show(-1009)", "show(0)", "show(99)"],
    ),
    Bug(
        *("rest", "money", "[each + (place < left) for place in range(people)]", "[each] * people"),
        "Three of us shared a bill of 10.00, each paid 3.33, and a cent was missing.",
        ["share(1000, 3)", "share(5, 3)", "share(1, 4)", "share(0, 2)"],
        held_out=True,
    ),
    Bug(
        *("first only", "table", "max(len(cell) for cell in column)", "len(column[0])"),
        "Columns do not line up when a cell is longer than the head of its column.",
        ["widths([['no', 'x'], ['fig', 'long']])", "render([['a', 'b'], ['long', 'c'], ['d', 'longer']])"],
    ),
    Bug(
        *("blanks", "table", "join(line.rstrip() for line in lines)", "join(lines)"),
        "Our linter finds blanks at the ends of lines in the tables that we print.",
        ["render([['a', 'long'], ['b', 'c']])", "render([['a', ''], ['', '']])", "render([])"],
    ),
    Bug(
        *("count", "invoice", "sum(count * money.parse(price)", "sum(money.parse(price)"),
        "Who buys three of something pays for one: the sum to be paid is too small, though the lines are right.",
        ["total([('fig', 3, '1.20')])", "show([('fig', 3, '1.20'), ('pear', 2, '0.05')])"],
    ),
    Bug(
        *("left out", "invoice", "money.show(total(lines, discount))", "money.show(total(lines))"),
        "We grant 10 percent, and the sum that the program computes is right, but the printed one is the full price.",
        ["show([('fig', 1, '10.00')], 10)", "show([('fig', 2, '0.99'), ('pear', 1, '5')], 50)"],
    ),
    Bug(
        *("rounding", "invoice", "full * discount // 100", "round(full * discount / 100)"),
        "Our lawyer says that we grant a cent too much: one percent off 0.99 is nothing, for we round down.",
        ["total([('fig', 1, '0.99')], 1)", "total([('fig', 3, '0.33')], 2)", "total([('fig', 1, '10.00')], 3)"],
        held_out=True,
    ),
    Bug(
        *("exact multiple", "pages", "max(1, -(-len(items) // size))", "len(items) // size + 1"),
        "With 20 entries, 10 on a page, there is a third page, and nothing is on it.",
        ["count([1] * 6, 3)", "count([1], 1)", "count([1, 2], 3)", "neighbors([1] * 6, 2, 3)"],
    ),
    Bug(
        *("lower bound", "pages", "if not 1 <= number <=", "if not number <="),
        "Somebody opened page 0, and page -1, and got a page in place of an error.",
        ["error_of(page, [1, 2, 3], 0, 2)", "error_of(page, [1, 2, 3], -1, 2)", "error_of(page, [1], 2, 2)"],
        held_out=True,
    ),
    Bug(
        *("last one", "pages", "if number < count(items, size)", "if number <= count(items, size)"),
        "On the last page there is still a link to a next one, and it leads to an error.",
        ["neighbors([1] * 9, 3, 3)", "neighbors([], 1, 3)", "neighbors([1] * 9, 1, 3)"],
    ),
    Bug(
        *("touching", "bookings", "start < until and since < end", "start <= until and since <= end"),
        "The room is booked from 8 to 9, and I cannot have it from 9 to 10.",
        ["booked((8, 9)).book(9, 10)", "booked((8, 9)).book(7, 8)", "booked((8, 9), (9, 10)).bookings"],
    ),
    Bug(
        *("around", "bookings", "start < until and since < end", "since <= start < until"),
        "Two of us were in the room: I had it from 9 to 10, and somebody else could book it from 8 to 12.",
        ["booked((9, 10)).book(8, 12)", "booked((9, 10)).book(8, 10)", "booked((9, 12)).book(10, 11)"],
    ),
    Bug(
        *(
            "the end",
            "bookings",
            "        if start < end:\n            found.append((start, end))\n        return found",
        ),
        "        return found",
        "The evening is never offered: free times behind the last booking of the day are missing.",
        ["booked((9, 10)).free(8, 12)", "Calendar().free(1, 2)", "booked((1, 3), (5, 6)).free(2, 9)"],
    ),
    Bug(
        *("repeated", "query", "found.setdefault(unquote(name), []).append(unquote(value))"),
        "found[unquote(name)] = [unquote(value)]",
        "I tick two colors in the filter, and see the articles of the last one alone (color=red&color=blue).",
        ["parse('a=1&a=2')", "parse('a=1&b=3&a=')", "parse('a&a')"],
    ),
    Bug(
        *("first sign", "query", 'part.partition("=")', 'part.rpartition("=")'),
        "A search for x=y, in the address as q=x=y, comes in under the name q=x.",
        ["parse('q=x=y')", "parse('flag')", "parse('a==')"],
        held_out=True,
    ),
    Bug(
        *("some of them", "query", 'first, *rest = text.replace("+", " ").split("%")'),
        'first, *rest = text.split("%")\n    first = first.replace("+", " ")',
        "Searches for names with an umlaut keep their plus signs: %FCber+uns comes in as über+uns.",
        ["unquote('%FCber+uns')", "unquote('a+b%20c+d')", "parse('q=%41+b')"],
    ),
    Bug(
        *("two places", "query", "{ord(sign):02X}", "{ord(sign):X}"),
        "Texts with line breaks or tabs come back broken after they were escaped.",
        ["quote('a\\nb')", "unquote(quote('a\\tb\\n'))", "quote('/')"],
    ),
    Bug(
        *("circle", "plan", "if step in above:", "if above and step == above[-1]:"),
        "Steps that need each other, a needs b and b needs a, give a RecursionError and no clear error.",
        ["error_of(order, {'a': ['b'], 'b': ['a']})", "error_of(order, {'a': ['b'], 'b': ['c'], 'c': ['a']})"],
    ),
    Bug(
        *("twice", "plan", "        if step in done:\n            return\n        for need"),
        "        for need",
        "The database is set up twice: two steps need it, and it is in the order two times.",
        ["order({'a': ['c'], 'b': ['c'], 'c': []})", "order({'c': [], 'a': ['c']})"],
        held_out=True,
    ),
    Bug(
        *("done", "plan", "if step not in done and all(", "if all("),
        "Steps that are done are offered again and again.",
        ["ready({'a': [], 'b': ['a']}, ['a'])", "ready({'a': [], 'b': ['a']}, ['a', 'b'])"],
    ),
)
