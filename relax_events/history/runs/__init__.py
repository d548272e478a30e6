"""Lists, shows, deletes, replays and forks the runs of a cluster."""
