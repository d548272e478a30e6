"""Trainer backends: the protocol, and PyTorch's."""
