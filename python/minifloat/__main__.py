"""python -m minifloat: the same as `minifloat`, for launchers such as torchrun."""

import sys

from .cli import main

sys.exit(main())
