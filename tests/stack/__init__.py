"""The container stack on one machine, and the programs that test it."""
