"""The run as a whole: its state rebuilt from the control log, the processes on this machine, the report, the ledger."""
