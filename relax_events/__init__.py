"""Relax Events: asynchronous reinforcement-learning post-training as an event-driven pipeline on
Apache Kafka.
"""

__version__ = "0.1.0"
