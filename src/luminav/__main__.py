"""``python -m luminav``: the command line."""

import sys

from luminav.cli import main

sys.exit(main())
