"""`python -m jaxmp`: the command line."""

import sys

from jaxmp._src.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
