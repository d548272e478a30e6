"""Model folders and families: loading, checkpoint facts, tokenizers, routers of mixtures of
experts.
"""
