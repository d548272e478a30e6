"""Training recorded batches again: recovery, `relax runs replay`, and forks."""
