"""A router over several engine replicas: prompt groups are routed, and move when a replica is
lost.
"""
