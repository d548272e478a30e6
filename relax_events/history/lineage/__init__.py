"""The lineage of versions, samples and prompts: their origin and outcome."""
