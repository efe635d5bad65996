"""Benchmarks and their reports: what a step takes, in time and memory, cell by cell."""
