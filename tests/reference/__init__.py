"""Slow, literal float64 versions of the formulas that the fast code is tested against."""
