"""`python -m lmwright` is the command `lmwright`."""

import sys

from lmwright.cli import main

sys.exit(main())
