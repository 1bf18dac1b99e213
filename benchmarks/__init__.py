"""Benchmarks of speed and memory, as ratios to a named baseline measured in the same run."""
