"""What runs inside of the sandbox: standard library alone, started as a file, never imported by the
library but for names and tests.
"""
