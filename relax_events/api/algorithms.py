"""What an algorithm of your own imports."""

from relax_events.config.algorithm_spec import AlgorithmSpec

__all__ = ["AlgorithmSpec"]
