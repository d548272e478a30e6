"""One file a role: what `relax worker ROLE CONFIG` runs."""
