"""The stack on one machine: containers for every part of a run, and what tries it out."""
