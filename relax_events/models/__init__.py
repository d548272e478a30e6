"""Models: small ones of real architectures made on this machine, their tokenizers and their
supervised start.
"""
