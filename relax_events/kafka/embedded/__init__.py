"""A real one-node Apache Kafka on this machine's Java: fetched once, checked, formatted, started
and stopped from Python.

It binds to the loopback interface only and is meant for one machine; a cluster is reached by its
bootstrap servers instead.
"""

from relax_events.kafka.embedded.broker import EmbeddedBroker
from relax_events.kafka.embedded.directory import BrokerBusy

__all__ = ["BrokerBusy", "EmbeddedBroker"]
