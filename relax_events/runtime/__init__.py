"""The parts that all workers share: consume, process, produce, commit; joins, dead letters,
heartbeats and drain.
"""
