"""Seeds: one function derives the seed of everything random."""

from hashlib import blake2b
from typing import Literal, TypeAlias

__all__ = ["VERSION", "Purpose", "seed_for"]


VERSION = 2
"""The version of the derivation. A run or an evaluation that was begun with another one is not resumed."""

Purpose: TypeAlias = Literal[
    "adapter",
    "attempt",
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
"""What a seed is for. Each purpose is used in one place of the code only, so no two uses share a stream."""


def seed_for(purpose: Purpose, *of: int | str, bits: int = 63) -> int:
    """Derive the seed of one use from everything that distinguishes it from all others.

    Seeds for other purposes or other parts are unrelated to it, even if the parts are neighboring numbers. The same
    call gives the same seed in every process, on every machine and in every version of Python.

    Args:
        purpose: What the seed is for.
        of: What distinguishes this use from others of its purpose, such as the run's seed, an id and a number.
        bits: The size of the seed: 63 for agentgym's own generators and engines, 31 if it goes to code that may pass it
            on to a generator with 32 bits, such as NumPy's `seed`.
    Returns:
        A whole number from 0 to 2**bits - 1.
    """
    # `ascii` of a tuple is unambiguous: texts are quoted and escaped, and numbers are not.
    parts = (purpose, *(part if type(part) is str or type(part) is int else _plain(part) for part in of))
    digest = blake2b(ascii(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - bits)


def _plain(part: int | str) -> int | str:
    """Return a number of NumPy or a member of an enum as the plain value that it equals."""
    return str.__str__(part) if isinstance(part, str) else part.__index__()
