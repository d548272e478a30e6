"""Requests of Kafka's protocol that librdkafka has no call for."""
