"""Shared parts of our HTTP servers: the listening socket, the request guard, and text responses."""
