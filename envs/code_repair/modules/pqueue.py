"""A priority queue as a binary heap: the smallest priority first, equal ones in their order of arrival."""


class PriorityQueue:
    """Entries are (priority, arrival, item), each at most as large as its two children."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, str]] = []
        self.arrivals = 0

    def __len__(self) -> int:
        return len(self.heap)

    def push(self, item: str, priority: int = 0) -> None:
        """Enter an item."""
        self.heap.append((priority, self.arrivals, item))
        self.arrivals += 1
        at = len(self.heap) - 1
        while at > 0 and self.heap[at] < self.heap[(at - 1) // 2]:
            self._swap(at, (at - 1) // 2)
            at = (at - 1) // 2

    def pop(self) -> str:
        """Take the first item out; IndexError where there is none."""
        if not self.heap:
            raise IndexError("empty")
        self._swap(0, len(self.heap) - 1)
        item = self.heap.pop()[2]
        self._sink(0)
        return item

    def drain(self, count: int = 100) -> list[str]:
        """At most `count` items in their order."""
        return [self.pop() for _ in range(min(count, len(self.heap)))]

    def _sink(self, at: int) -> None:
        while 2 * at + 1 < len(self.heap):
            child = 2 * at + 1
            if child + 1 < len(self.heap) and self.heap[child + 1] < self.heap[child]:
                child += 1
            if self.heap[at] <= self.heap[child]:
                break
            self._swap(at, child)
            at = child

    def _swap(self, one: int, other: int) -> None:
        self.heap[one], self.heap[other] = self.heap[other], self.heap[one]
