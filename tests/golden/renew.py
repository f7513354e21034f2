"""Writes the golden files anew, and prints which cases changed.

    PYTHONPATH=python python -m tests.golden.renew

A line whose digest is equal and whose sums are within the tolerance stays as it is, so that another
processor's last bits make no difference of files.
"""

from __future__ import annotations

import sys

import torch

from tests.golden.golden import FAMILIES, TOLERANCES, compute, is_same, path_of, read, write


def main() -> int:
    device = torch.device("cpu")
    for family in FAMILIES:
        got = compute(family, device)
        want = read(family) if path_of(family).exists() else {}
        kept = {
            name: want[name]
            for name in got.keys() & want.keys()
            if is_same(got[name], want[name], TOLERANCES["cpu"])
        }
        write(family, got | kept)
        for name in sorted((got.keys() | want.keys()) - kept.keys()):
            kind = "changed" if name in got and name in want else "new" if name in got else "gone"
            print(f"{family}: {kind}: {name}")
        print(f"{family}: {len(got)} cases, {len(kept)} as before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
