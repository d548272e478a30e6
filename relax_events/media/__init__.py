"""Media from a dataset row to a model's input: read, check, store, fetch, preprocess and cache."""
