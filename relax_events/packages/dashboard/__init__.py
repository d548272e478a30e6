"""The live page of runs: a reader of the log, its HTTP API, and the page itself."""
