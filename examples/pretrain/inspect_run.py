"""Measures what recipes do to each layer of a model that pretrain.py trained, and chooses by it.

    python examples/pretrain/inspect_run.py runs/train/runs/bf16 [--recipes mxfp8,nvfp4]
        [--share 0.9] [--out runs/inspect]

It prints the table and a recipe map: the last of --recipes for the share of the operations that it
harms least, bf16 for the others. Another run takes the map:

    make train RECIPES="bf16,mapped=$(cat runs/inspect/recipe_map.txt)"
"""

import argparse
import json
import sys
from pathlib import Path

import minifloat as mf
import numpy as np
from pretrain import last_checkpoint
from text import Windows
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

SEQUENCES = 4  # of the batch


def load_run(run):
    """Returns the model of the folder OUT/runs/RUN, and its job's training and validation text."""
    folder = run if (run / "result.json").exists() else last_checkpoint(run)
    if folder is None:
        sys.exit(f"inspect_run.py: expected a run with a complete checkpoint, got {run}")
    model = AutoModelForCausalLM.from_pretrained(folder)
    seq = json.loads((run.parents[1] / "job.json").read_text())["seq"]
    with np.load(run.parents[1] / "tokens.npz") as tokens:
        return model, Windows(tokens["train"], seq), Windows(tokens["validation"], seq)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("run", type=Path, help="a run of pretrain.py, such as runs/train/runs/bf16")
    add("--recipes", default="fp8_rowwise,mxfp8,nvfp4", help="comma-separated")
    add("--share", type=float, default=0.9, help="of the operations, to the last of --recipes")
    add("--out", type=Path, default=Path("runs/inspect"), help="folder of results")
    options = parser.parse_args()
    model, train, _ = load_run(options.run.resolve())
    batch = default_collate([train[i] for i in range(SEQUENCES)])
    recipes = options.recipes.split(",")
    found = mf.inspect(model, batch, recipes, loss=lambda model, batch: model(**batch).loss)
    chosen = found.recipe_map(options.share, recipes[-1])
    options.out.mkdir(parents=True, exist_ok=True)
    text = f"# Layers\n\n{found.table()}\n\n# Operands\n\n{found.operand_table()}\n"
    (options.out / "inspect.md").write_text(text)
    (options.out / "recipe_map.txt").write_text(chosen.text)
    found.plot(options.out / "inspect.png")
    print(f"{found.table()}\n{options.out}/inspect.md, inspect.png, recipe_map.txt:\n{chosen}")


if __name__ == "__main__":
    main()
