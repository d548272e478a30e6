"""From prompt groups to packed micro-batches."""
