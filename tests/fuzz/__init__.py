"""Fuzzing of everything that decodes: `make fuzz MINUTES=60`. Inputs that once crashed a target lie
in `examples` and are run by a test."""
