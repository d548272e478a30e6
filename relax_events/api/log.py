"""Read and write records of a run's topics, by their names without the run's prefix."""

from relax_events.history.cluster import Cluster
from relax_events.history.run_log import RunLog, TopicPartition
from relax_events.kafka.admin import Admin
from relax_events.kafka.connection import Connection
from relax_events.kafka.log_reader import LogReader
from relax_events.kafka.producer import RecordProducer
from relax_events.kafka.records import ProducerRecord, Record
from relax_events.session.broker_address import open_admin
from relax_events.topics import TopicPlan
from relax_events.topics.names import (
    COMMANDS,
    METRICS,
    POLICY_VERSIONS,
    REWARD_SCORES,
    ROLLOUT_SAMPLES,
    SCHEMAS,
    TRAINING_SAMPLES,
)
from relax_events.topics.plan import belongs_on

__all__ = [
    "COMMANDS",
    "METRICS",
    "POLICY_VERSIONS",
    "REWARD_SCORES",
    "ROLLOUT_SAMPLES",
    "SCHEMAS",
    "TRAINING_SAMPLES",
    "Admin",
    "Cluster",
    "Connection",
    "LogReader",
    "ProducerRecord",
    "Record",
    "RecordProducer",
    "RunLog",
    "TopicPartition",
    "TopicPlan",
    "belongs_on",
    "open_admin",
]
