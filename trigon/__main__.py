"""`python -m trigon` is the command `trigon`."""

import sys

from trigon.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
