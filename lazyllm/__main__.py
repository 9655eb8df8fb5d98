"""`python -m lazyllm` is the command `lazyllm`."""

import sys

from lazyllm.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
