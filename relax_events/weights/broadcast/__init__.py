"""Sends policy versions from the trainer's memory to the workers over torch.distributed or shared
memory. Each version is verified against the artifact's digest.
"""
