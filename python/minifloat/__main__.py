"""python -m minifloat: the command `minifloat`, for launchers such as torchrun."""

import sys

from .cli import main

sys.exit(main())
