"""Shows a run while it works."""
