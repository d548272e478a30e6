"""What every worker is made of: consume, process, produce, commit; leases, joins, dead letters,
heartbeats, drain; the ledger.
"""
