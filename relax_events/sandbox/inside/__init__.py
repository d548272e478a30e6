"""The code that runs inside the sandbox.

It uses only the standard library and is started as a file; the library imports only its names.
"""
