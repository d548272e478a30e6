"""Model folders and families: loading, checkpoint facts, tokenizers, and the routers of mixtures of
experts.
"""
