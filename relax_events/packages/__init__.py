"""What stands on the core and is found by entry points: each folder is a package of its own.

A package imports `relax_events.api`; what else of the core it imports is listed in
tests/unit/repository/test_packages.py, and the list only falls. The core imports no package.
"""
