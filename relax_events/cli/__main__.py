"""`python -m relax_events.cli`."""

from relax_events.cli import main

main()
