"""Fuzzing of all decoders: `make fuzz MINUTES=60`. Inputs that once crashed a target are in
`examples`, and a test runs them.
"""
