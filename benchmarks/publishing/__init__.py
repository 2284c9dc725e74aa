"""Runs of the benchmarks, what they found, and the page that shows it."""
