"""Reads samples back from the log, exports and rescores them."""
