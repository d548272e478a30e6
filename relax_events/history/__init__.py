"""Reading a run's log back: runs, samples, lineage, the ledger. Nothing here changes a run, but for
deleting one.
"""
