"""`python -m podsmith` is the command `podsmith`."""

import sys

from podsmith.cli import main

sys.exit(main())
