"""State as a fold of the log: a projection is given every event in order, and answers questions."""
