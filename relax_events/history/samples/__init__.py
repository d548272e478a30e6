"""Reads samples back from the log, exports them, scores them anew."""
