"""python -m minifloat: the command `minifloat`."""

import sys

from .cli import main

sys.exit(main())
