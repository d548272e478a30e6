"""Read prompts from their sources, order them, and render them to tokens."""
