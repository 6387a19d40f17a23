"""`python -m trigon.cli` is `trigon`."""

import sys

from trigon.cli.main import main

sys.exit(main(sys.argv[1:]))
