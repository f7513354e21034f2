"""Make `import minifloat` and the command `minifloat` of this .venv use the working tree.

usage: .venv/bin/python tools/link_tree.py

Writes site-packages/minifloat-tree.pth, which puts python/ on the path, and bin/minifloat. The
native libraries need no link: the build leaves them in python/minifloat/lib/. Libraries of other
builds get a package of their own (link_package).
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

COMMAND = """\
#!{python}
import sys

from minifloat.cli import main

sys.exit(main())
"""


def link_package(package: Path) -> None:
    """Links every source of the package into the folder `package`, which has a lib/ of its own."""
    for source in (Path(__file__).resolve().parents[1] / "python" / "minifloat").iterdir():
        target = package / source.name
        if source.name in ("lib", "__pycache__"):
            continue
        if target.is_symlink():
            target.unlink()
        target.symlink_to(source)


def main() -> None:
    if sys.prefix == sys.base_prefix:
        sys.exit("link_tree: expected to run in a virtual environment, this is the system's Python")
    tree = Path(__file__).resolve().parent.parent
    pth = Path(sysconfig.get_path("purelib")) / "minifloat-tree.pth"
    pth.write_text(f"{tree / 'python'}\n", encoding="utf-8")
    command = Path(sysconfig.get_path("scripts")) / "minifloat"
    command.write_text(COMMAND.format(python=sys.executable), encoding="utf-8")
    command.chmod(0o755)
    print(f"link_tree: {pth.name} -> {tree / 'python'}")


if __name__ == "__main__":
    main()
