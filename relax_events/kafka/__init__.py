"""The only place that knows confluent_kafka: producers, consumers, the share queue, transactions,
admin; the embedded broker.
"""
