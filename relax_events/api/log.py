"""Read and write records of a run's topics."""

from relax_events.history.cluster import Cluster
from relax_events.history.run_log import RunLog
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.topics import TopicPlan

__all__ = [
    "Admin",
    "Cluster",
    "Connection",
    "LogReader",
    "ProducerRecord",
    "Record",
    "RecordProducer",
    "RunLog",
    "TopicPlan",
]
