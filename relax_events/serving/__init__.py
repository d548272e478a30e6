"""`relax serve`: the engine `transformers` behind SGLang's HTTP API and OpenAI's completion
routes.
"""
