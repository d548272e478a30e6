"""Media from the row of a dataset to what a model is shown: read, checked, stored, fetched,
processed and shared.
"""
