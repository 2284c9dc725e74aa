"""Half-open intervals of integers."""


def merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union as sorted intervals that neither overlap nor touch; empty ones vanish."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if start >= stop:
            continue
        if merged and start <= merged[-1][1]:
            last_start, last_stop = merged[-1]
            merged[-1] = (last_start, max(last_stop, stop))
        else:
            merged.append((start, stop))
    return merged


def covered(intervals: list[tuple[int, int]]) -> int:
    """How many integers lie in at least one of them."""
    return sum(stop - start for start, stop in merge(intervals))


def contains(intervals: list[tuple[int, int]], point: int) -> bool:
    """Whether the point lies in any of them."""
    return any(start <= point < stop for start, stop in intervals)


def gaps(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What lies between the first start and the last stop and in none of them."""
    merged = merge(intervals)
    return [(merged[i][1], merged[i + 1][0]) for i in range(len(merged) - 1)]
