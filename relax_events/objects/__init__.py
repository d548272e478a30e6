"""Stores large arrays and media outside of the log: the content-addressed object store and the
claim check.

The only package that imports obstore.
"""

from relax_events.objects.claim_check import check_in, check_out
from relax_events.objects.store import ObjectStore

__all__ = ["ObjectStore", "check_in", "check_out"]
