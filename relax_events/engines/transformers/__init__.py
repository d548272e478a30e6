"""The engine `transformers`: continuous batching over a Hugging Face model in the rollout worker's
process.
"""
