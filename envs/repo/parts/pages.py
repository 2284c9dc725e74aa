"""Long lists, page by page; the first page is page 1."""


def count(items: list[int], size: int) -> int:
    """Return the number of pages; an empty list has one."""
    return max(1, -(-len(items) // size))


def page(items: list[int], number: int, size: int) -> list[int]:
    """Return the items of a page; ValueError for a page that is not there."""
    if not 1 <= number <= count(items, size):
        raise ValueError(f"there is no page {number}")
    return items[(number - 1) * size : number * size]


def neighbors(items: list[int], number: int, size: int) -> list["int | None"]:
    """Return the numbers of the pages before and behind a page; None where there is none."""
    before = number - 1 if number > 1 else None
    behind = number + 1 if number < count(items, size) else None
    return [before, behind]
