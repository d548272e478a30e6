"""Models of megatron-core's layers: how their parameters correspond to those of transformers."""
