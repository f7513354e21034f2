"""Text that lowers a tiny model's loss."""

import random


def write_text(folder):
    """Writes files of text into a folder, which it makes."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    for i in range(8):
        lines = (" ".join(draw.choices(words, k=8)) for _ in range(120))
        (folder / f"{i}.txt").write_text("\n".join(lines))
