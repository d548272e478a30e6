"""Where versions, samples and prompts come from, and what became of them."""
