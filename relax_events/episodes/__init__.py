"""Episodes: the sessions of multi-turn samples, their token history, and what drives them."""
