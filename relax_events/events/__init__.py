"""The event types, their Avro codec and packed tensors. Only this package imports fastavro."""
