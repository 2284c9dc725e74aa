"""A cache that forgets what was not used for longest."""

from typing import Any


class LRUCache:
    """At most `capacity` entries; reading and writing an entry both count as use."""

    def __init__(self, capacity: int = 3) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self.entries: dict[str, Any] = {}
        self.hits = 0
        self.misses = 0

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is not there."""
        if key not in self.entries:
            self.misses += 1
            return default
        self.hits += 1
        value = self.entries.pop(key)
        self.entries[key] = value
        return value

    def put(self, key: str, value: Any) -> None:
        """Enter a value; where there is no room the oldest entry goes."""
        if key in self.entries:
            del self.entries[key]
        elif len(self.entries) >= self.capacity:
            oldest = next(iter(self.entries))
            del self.entries[oldest]
        self.entries[key] = value

    def keys(self) -> list[str]:
        """From the oldest to the one used last."""
        return list(self.entries)

    def ratio(self) -> list[int]:
        """Hits, and all reads."""
        return [self.hits, self.hits + self.misses]
