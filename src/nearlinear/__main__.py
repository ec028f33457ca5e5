"""`python -m nearlinear`: the command line where the command itself is not on the path."""

import sys

from nearlinear.cli.main import main

sys.exit(main())
