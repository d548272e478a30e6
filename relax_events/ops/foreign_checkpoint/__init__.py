"""Reads distributed checkpoints that another person wrote, without running what they contain."""
