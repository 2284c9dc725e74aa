"""Seeds: one function derives the seed of everything random."""

from agentgym.seeds.derivation import VERSION, Purpose, seed_for

__all__ = ["VERSION", "Purpose", "seed_for"]
