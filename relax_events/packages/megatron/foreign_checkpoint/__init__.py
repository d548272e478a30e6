"""Reads distributed checkpoints that another person wrote, without running code in them."""
