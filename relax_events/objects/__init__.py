"""Large things by content-addressed reference: the object store and the claim check. The only place
that knows obstore.
"""

from relax_events.objects.claim_check import check_in, check_out
from relax_events.objects.store import ObjectStore

__all__ = ["ObjectStore", "check_in", "check_out"]
