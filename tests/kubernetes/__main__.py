"""`python -m tests.kubernetes`."""

import sys

from tests.kubernetes.proof import main

sys.exit(main())
