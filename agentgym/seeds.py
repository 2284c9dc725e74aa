"""Seeds: one function derives the seed of everything random."""

from hashlib import blake2b
from typing import Literal, TypeAlias

__all__ = ["VERSION", "Purpose", "seed_for"]


VERSION = 2
"""Version of the way in which seeds are derived. A run or an evaluation that started with another version isn't
resumed.
"""

Purpose: TypeAlias = Literal[
    "adapter",
    "attempt",
    "call id",
    "critic",
    "demonstration",
    "env",
    "episode",
    "evaluation",
    "game",
    "generator",
    "group",
    "group reward",
    "opponent",
    "question",
    "rescore",
    "task order",
    "turn",
]
"""The use of a seed. Each purpose is used in only one place of the code, so no two uses share a stream."""


def seed_for(purpose: Purpose, *of: int | str, bits: int = 63) -> int:
    """Derive the seed of one use from everything that distinguishes it from all others.

    Seeds for other purposes or other parts are unrelated to it, even if the parts are neighboring numbers. The same
    call returns the same seed in every process, on every machine and in every version of Python.

    Args:
        purpose: The use of the seed.
        of: The parts that distinguish this use from others with its purpose, such as the run's seed, an id and a
            number.
        bits: The size of the seed: 63 for agentgym's own generators and engines, 31 if code may pass it on to a
            32-bit generator, such as NumPy's `seed`.

    Returns:
        An integer from 0 to 2**bits - 1.
    """
    # `ascii` of a tuple is unambiguous: strings are quoted and escaped, and numbers are not.
    parts = (purpose, *(part if type(part) is str or type(part) is int else _plain(part) for part in of))
    digest = blake2b(ascii(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


def _plain(part: int | str) -> int | str:
    """Return a NumPy number or an enum member as the plain value that it equals."""
    return str.__str__(part) if isinstance(part, str) else part.__index__()
