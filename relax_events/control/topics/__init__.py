"""Tools for a run's topics: plan and apply, check, lag, tail, reset, purge."""
