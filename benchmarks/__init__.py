"""Paired measurements: both sides in one run, medians and ratios, the machine named. `make bench`
writes .relax/benchmarks, and `docs/benchmarks.md` has the results with their machines and days."""
