"""The engine `transformers` behind SGLang's HTTP API, and as much of OpenAI's as people ask a model
by: what `relax serve` serves.
"""
