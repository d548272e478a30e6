"""Kafka clients: producers, consumers, leases, transactions, admin, security and the embedded
broker.

The only package that imports confluent_kafka.
"""
