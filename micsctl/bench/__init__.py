"""Benchmarks: what is compared, one job that measures it, and what the measurements say."""
