"""The cases of each module: programs that end in an expression, whose value is compared with the original module's.

The visible ones become a test file of the repository. The hidden ones don't enter the sandbox before `submit`, and
their right values never enter it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cases:
    """Programs over a module's names, one per string."""

    visible: tuple[str, ...]
    hidden: tuple[str, ...]


def _queue(order: str, *pushes: tuple[str, int]) -> str:
    entered = "; ".join(f"q.push({item!r}, {priority})" for item, priority in pushes)
    return f"q = PriorityQueue(); {entered}; {order}"


CASES: dict[str, Cases] = {
    "intervals": Cases(
        visible=(
            "merge([(5, 8), (1, 3), (2, 4)])",
            "merge([(1, 3), (3, 6), (7, 7), (9, 5)])",
            "merge([(1, 10), (2, 3)])",
            "merge([(0, 1), (4, 6), (5, 7), (7, 9)])",
            "covered([(0, 5), (3, 9), (20, 21)])",
            "[contains([(2, 4), (8, 9)], point) for point in range(10)]",
            "gaps([(8, 9), (0, 2), (3, 5)])",
        ),
        hidden=(
            "merge([])",
            "merge([(4, 4)])",
            "merge([(10, 12), (3, 9), (9, 10), (-5, -1), (-2, 0)])",
            "merge([(0, 100), (5, 6), (7, 8), (99, 101)])",
            "merge([(6, 2), (1, 2), (2, 3), (3, 4), (5, 6)])",
            "covered([(4, 9), (4, 9), (1, 2)])",
            "covered([(9, 4)])",
            "[contains([(-3, 0), (5, 6)], point) for point in range(-5, 8)]",
            "contains([], 3)",
            "gaps([(0, 1), (1, 2)])",
            "gaps([(30, 40), (10, 12), (11, 20), (50, 51)])",
            "gaps([(7, 9)])",
        ),
    ),
    "roman": Cases(
        visible=(
            "[to_roman(n) for n in (1, 4, 9, 14, 40, 90, 400, 900)]",
            "to_roman(1987)",
            "to_roman(3999)",
            "to_roman(0)",
            "from_roman('MCMXCIV')",
            "from_roman('IIII')",
            "[from_roman(to_roman(n)) for n in (3, 58, 449, 2026)]",
        ),
        hidden=(
            "[to_roman(n) for n in range(1, 60)]",
            "[to_roman(n) for n in (99, 444, 555, 666, 949, 1500, 3888)]",
            "to_roman(4000)",
            "to_roman(-1)",
            "from_roman('')",
            "from_roman('VX')",
            "from_roman('MMMM')",
            "from_roman('MMMCMXCIX')",
            "[from_roman(s) for s in ('I', 'XLII', 'CDXLIV', 'DCCC', 'MDCLXVI')]",
            "from_roman('XIZ')",
            "all(from_roman(to_roman(n)) == n for n in range(1, 2000, 61))",
        ),
    ),
    "lru": Cases(
        visible=(
            "c = LRUCache(2); c.put('a', 1); c.put('b', 2); c.put('c', 3); c.keys()",
            "c = LRUCache(2); c.put('a', 1); c.put('b', 2); c.get('a'); c.put('c', 3); [c.get('a'), c.get('b')]",
            "c = LRUCache(2); c.put('a', 1); c.put('b', 2); c.put('a', 9); c.put('c', 3); [c.keys(), c.get('a')]",
            "c = LRUCache(); [c.put(k, k) for k in 'abcd']; c.keys()",
            "c = LRUCache(1); c.put('x', 5); [c.get('x'), c.get('y', 7), c.get('z'), c.ratio()]",
            "LRUCache(0)",
        ),
        hidden=(
            "c = LRUCache(1); c.put('a', 1); c.put('b', 2); [c.get('a', 0), c.get('b', 0), c.keys()]",
            "c = LRUCache(3); [c.put(k, i) for i, k in enumerate('abcad')]; [c.keys(), c.get('a')]",
            "c = LRUCache(4); [c.put(k, i) for i, k in enumerate('wxyz')]; [c.get(k) for k in 'wyq']; c.put('n', 1);"
            " [c.keys(), c.ratio()]",
            "[LRUCache(-2)]",
            "LRUCache(capacity=0)",
            "c = LRUCache(2); [c.get('m'), c.get('m', 3), c.ratio(), c.keys()]",
            "c = LRUCache(5); [c.put(k, 0) for k in 'aaaa']; [c.keys(), c.ratio()]",
            "c = LRUCache(2); c.put('n', None); [c.get('n', 4), c.ratio()]",
            "c = LRUCache(); [c.put(k, k) for k in 'abc']; [c.get(k) for k in 'ca']; c.put('d', 'd'); c.keys()",
            "LRUCache(1).keys()",
        ),
    ),
    "matrix": Cases(
        visible=(
            "transpose([[1, 2, 3], [4, 5, 6]])",
            "multiply([[1, 2], [3, 4]], [[5, 6], [7, 8]])",
            "multiply([[1, 2]], [[1, 2]])",
            "identity(3)",
            "power([[1, 1], [1, 0]], 7)",
            "power([[2]], 0)",
            "power([[2]], -1)",
            "determinant([[2, 0, 1], [1, 3, 2], [1, 1, 4]])",
        ),
        hidden=(
            "transpose([[7]])",
            "multiply([[1, -2, 3]], [[4], [5], [6]])",
            "multiply([[4], [5], [6]], [[1, -2, 3]])",
            "multiply([[1], [2]], [[3], [4]])",
            "identity(1)",
            "identity(4)",
            "power([[3, 1], [2, 5]], 0)",
            "power([[1, 2], [3, 4]], 2)",
            "power([[3, 1], [2, 5]], 1)",
            "power([[0, 2, 1], [1, 0, 0], [0, 1, 3]], 5)",
            "power([[1, 0], [0, 1]], -3)",
            "determinant([[-9]])",
            "determinant([[3, 8], [4, 6]])",
            "determinant([[1, 2, 3, 4], [2, 0, 1, -1], [3, 1, -2, 5], [0, 4, 1, 2]])",
        ),
    ),
    "wrapping": Cases(
        visible=(
            "wrap('the quick brown fox jumps over the lazy dog', 10)",
            "wrap('one two three four five six')",
            "wrap('ab abcdefghijkl cd', 5)",
            "wrap('', 5)",
            "wrap('ab cdefghijkl', 4)",
            "[center('abc', 8, '.'), center('abcdef', 4)]",
            "center('mid')",
            "indent('a\\n\\n  b', 2)",
            "indent('x')",
        ),
        hidden=(
            "wrap('aaaa bbbb cccc', 9)",
            "wrap('aaaa bbbb cccc', 8)",
            "wrap('abcdef', 3)",
            "wrap('x abcdefg', 3)",
            "wrap('  many   spaces  here ', 7)",
            "wrap('a b c d', 1)",
            "wrap('it was the best of times it was the worst of times')",
            "wrap('exactly twenty chars and more', 20)",
            "[center('a', 2, '-'), center('a', 3, '-'), center('', 3, '-'), center('abc', 3)]",
            "center('four', width=9)",
            "indent('a\\nb\\n', 1)",
            "indent('', 3)",
            "indent('q\\nr')",
        ),
    ),
    "calculator": Cases(
        visible=(
            "tokens('12 + (3*4)')",
            "tokens('7-x')",
            "evaluate('2 + 3 * 4')",
            "evaluate('(2 + 3) * 4 - 1')",
            "evaluate('20 / 3 - -2')",
            "evaluate('(1 + 2')",
            "evaluate('4 *')",
            "evaluate('1 2')",
            "evaluate('10 - 3 - 2')",
        ),
        hidden=(
            "tokens('')",
            "tokens('007/(-1)')",
            "tokens('1.5')",
            "evaluate('8 / 2 / 2')",
            "evaluate('2 * (3 + (4 - 5) * 6) - 7')",
            "evaluate('-(1 + 2) * -3')",
            "evaluate('100')",
            "evaluate('3 +')",
            "evaluate('')",
            "evaluate(')')",
            "evaluate('(1))')",
            "evaluate('7 / 0')",
            "evaluate('1 - 2 + 3 * 4 / 5 - (6 - 7)')",
            "evaluate('((9))')",
        ),
    ),
    "ledger": Cases(
        visible=(
            "b = Ledger(); b.open('a', 100); b.open('b'); b.transfer('a', 'b', 30); [b.balances, b.moved('a')]",
            "b = Ledger(2); b.open('a', 10); b.open('b'); b.transfer('a', 'b', 8); [b.balances, b.total()]",
            "b = Ledger(2); b.open('a', 10); b.open('b'); b.transfer('a', 'b', 9)",
            "b = Ledger(); b.open('a', 1, 5); b.open('b', 3); b.transfer('a', 'b', 6); [b.balances, b.moved('b')]",
            "b = Ledger(); b.open('a'); b.open('a')",
            "b = Ledger(); b.open('a', -1)",
            "b = Ledger(); b.open('a', 5); b.transfer('a', 'a', 1)",
            "b = Ledger(); b.open('a', 5); b.open('b'); b.transfer('a', 'b', 1); b.balances",
            "b = Ledger(); b.open('a', 5); b.open('b'); b.transfer('a', 'b', 0)",
            "b = Ledger(); b.open('a', 250); b.open('b', 10, 99); b.transfer('b', 'a', 60); b.interest(7); b.balances",
        ),
        hidden=(
            "b = Ledger(); [b.total(), b.moved('nobody')]",
            "b = Ledger(1); b.open('a', 0, 10); b.open('b'); b.transfer('a', 'b', 9); [b.balances, b.history]",
            "b = Ledger(1); b.open('a', 0, 10); b.open('b'); b.transfer('a', 'b', 10)",
            "b = Ledger(); b.open('a', 5, -1)",
            "b = Ledger(); b.open('a', 0, 0); b.balances",
            "b = Ledger(); b.open('a', 5); b.open('b'); b.transfer('a', 'b', -3)",
            "b = Ledger(); b.open('a', 5); b.open('b'); b.transfer('a', 'b', 1); b.transfer('b', 'a', 1); b.history",
            "b = Ledger(); b.open('a', 5); b.open('b'); b.transfer('a', 'b', 0)",
            "b = Ledger(); b.open('q', 4); b.open('q', 4)",
            "b = Ledger(); b.open('a', 5); b.open('b'); b.transfer('a', 'b', 6)",
            "b = Ledger(); b.open('a', 199); b.open('z'); b.interest(5); [b.balances, b.total()]",
            "b = Ledger(); b.open('a', 0, 40); b.open('b', 1); b.transfer('a', 'b', 33); b.interest(3); b.balances",
            "b = Ledger(3); b.open('a', 90); b.open('b', 9); b.open('c'); b.transfer('a', 'b', 20);"
            " b.transfer('b', 'c', 4); [b.total(), b.moved('a'), b.moved('b'), b.moved('c'), b.balances]",
            "b = Ledger(); b.open('a', 1); b.transfer('a', 'q', 1)",
        ),
    ),
    "pqueue": Cases(
        visible=(
            _queue("q.drain()", ("c", 3), ("a", 1), ("b", 2)),
            _queue("q.drain()", ("x", 5), ("y", 5), ("z", 5), ("w", 5)),
            _queue("[q.drain(2), len(q), q.pop()]", ("e", 9), ("d", 8), ("f", 7), ("g", 1), ("h", 3)),
            "q = PriorityQueue(); q.push('low', 1); q.push('default'); q.push('neg', -4); q.drain()",
            "PriorityQueue().pop()",
            _queue("q.drain()", *((chr(97 + i), i * 7 % 11) for i in range(11))),
        ),
        hidden=(
            _queue("[q.pop(), len(q)]", ("only", 4)),
            _queue("q.drain()", *((f"n{i}", i * 5 % 13) for i in range(13))),
            _queue("q.drain()", *((f"n{i}", -i) for i in range(9))),
            _queue("q.drain()", *((f"n{i}", i // 3) for i in range(10))),
            _queue("[q.drain(3), q.push('late', 0), q.drain(1), q.drain()]", *((f"n{i}", 6 - i) for i in range(7))),
            "q = PriorityQueue(); [q.push(f'i{i}', i % 4) for i in range(120)]; [len(q.drain()), len(q), q.drain()]",
            "q = PriorityQueue(); [q.drain(), len(q)]",
            _queue("[q.drain(0), q.drain(1), q.pop(), q.pop()]", ("a", 2), ("b", 1)),
            "q = PriorityQueue(); q.push('p', 1); q.push('q', -1); q.push('r'); [q.pop(), q.pop(), q.pop()]",
        ),
    ),
}
