"""`relax run` and `relax doctor`: preparation, the supervisor, the fork server."""
