"""`python -m unshard`: the command `unshard`."""
import sys

from unshard.cli import main

sys.exit(main())
