"""The event types, their Avro codec and packed tensors. The only place that knows fastavro."""
