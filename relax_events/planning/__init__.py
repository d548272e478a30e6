"""What a run takes on a machine: defaults derived from model and machine, memory by device, an
estimate of a step's time. Pure arithmetic, without torch and Kafka.
"""
