"""The rules of dividing: offers, what they are worth, and a rule-based player."""

import random
import re
from collections.abc import Iterator
from itertools import product

from agentgym.testing import Reply, say

TOTAL = 10
"""The value of the whole pool to each player."""
Things = dict[str, int]
"""A number per kind of thing: how many there are, or what one of it is worth."""


def listed(things: Things) -> str:
    """Return things as text, such as `book 2, hat 1`."""
    return ", ".join(f"{name} {count}" for name, count in things.items())


def read_things(text: str) -> Things:
    """Parse a text such as `book 2, hat 1`."""
    return {name: int(count) for name, count in re.findall(r"\b(\w{1,9}) (\d{1,3})\b", text)}


def last_offer(text: str, pool: Things) -> Things | None:
    """Return the last offer in a text that the pool can satisfy, or None if there is none."""
    offers = [read_things(line) for line in re.findall(r"^OFFER: ([\w ,]+)", text, re.MULTILINE)]
    possible = (o for o in reversed(offers) if o.keys() == pool.keys() and all(o[name] <= pool[name] for name in pool))
    return next(possible, None)


def rest(pool: Things, taken: Things) -> Things:
    """Return the rest of the pool, which the other player gets."""
    return {name: count - taken[name] for name, count in pool.items()}


def worth(things: Things, values: Things) -> int:
    """Return the value of things to a player with these values."""
    return sum(count * values[name] for name, count in things.items())


def parts(pool: Things) -> Iterator[Things]:
    """Yield every part of the pool that a player could get."""
    for counts in product(*(range(count + 1) for count in pool.values())):
        yield dict(zip(pool, counts, strict=True))


def best_split(pool: Things, first: Things, second: Things) -> Things:
    """Return the first player's part of the split with the largest product of both values (Nash, 1950)."""
    return max(parts(pool), key=lambda part: worth(part, first) * worth(rest(pool, part), second))


def draw_values(rng: random.Random, pool: Things) -> Things:
    """Draw a player's value of one of each thing, so that the whole pool is worth TOTAL."""
    while True:
        values = {name: rng.randint(0, TOTAL // count) for name, count in pool.items()}
        if worth(pool, values) == TOTAL:
            return values


def quoted(text: str) -> str:
    """Quote one player's message for the other, so that none of its lines can be taken for anything else."""
    return "\n".join(f"> {line}" for line in text.splitlines())


def conceder(text: str) -> Reply:
    """Play a side by rule: demand less with each message, and accept an offer that is good enough.

    This is the fallback model of `opponent`.
    """
    pool, values = (read_things(line) for line in re.findall(r"(?:things|worth to you): ([\w ,]+)\.", text)[:2])
    heard = "\n".join(re.findall(r"^> (.*)$", text, re.MULTILINE))
    enough = TOTAL + 2 - 2 * len(re.findall(r"^<\|im_start\|>assistant$", text, re.MULTILINE))
    left = rest(pool, last_offer(heard, pool) or pool)
    wanted = [part for part in parts(pool) if worth(part, values) >= enough]
    own = left if worth(left, values) >= enough else min(wanted, key=lambda part: sum(part.values()))
    return say(f"OFFER: {listed(own)}")
