"""Paired measurements: both sides in one run, medians and ratios, the machine named. `make bench`
writes docs/benchmarks."""
