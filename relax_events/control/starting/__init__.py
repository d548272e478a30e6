"""Worker processes of this machine, each there at once: forked from a process that has imported what workers need (ADR 25)."""
