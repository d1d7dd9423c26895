"""`python -m lmwright` is the command `lmwright`."""

import sys

from lmwright.cli.main import main

sys.exit(main())
