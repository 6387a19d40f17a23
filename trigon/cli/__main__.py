"""`python -m trigon.cli` runs the `trigon` command."""

import sys

from trigon.cli.main import main

sys.exit(main(sys.argv[1:]))
