"""The ledger: recomputes from a run's records what the run promised, and names every record that breaks a promise."""

from relax_events.control.ledger.books import Ledger
from relax_events.control.ledger.findings import Finding
from relax_events.control.ledger.reading import read_ledger

__all__ = ["Finding", "Ledger", "read_ledger"]
