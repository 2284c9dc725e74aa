"""Runs the benchmarks, stores their results, and writes the pages about them."""
