"""The runs of a cluster: listed, shown, deleted, replayed, forked."""
