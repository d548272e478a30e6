"""An embedded broker: a one-node Apache Kafka on this machine's Java, downloaded, formatted,
started and stopped from Python.

It listens on the loopback interface only; for a cluster set its bootstrap servers instead.
"""

from relax_events.kafka.embedded.broker import EmbeddedBroker
from relax_events.kafka.embedded.directory import BrokerBusy

__all__ = ["BrokerBusy", "EmbeddedBroker"]
