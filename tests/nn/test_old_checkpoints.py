"""Checkpoints that earlier versions wrote: each loads, and its specs still give its bytes.

    tests/nn/checkpoints/X.Y.pt     what `write` saved with version X.Y

Before the release of X.Y, at the root:  .venv/bin/python -m tests.nn.test_old_checkpoints
"""

from pathlib import Path

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.same_bits import require_same_parts, require_same_results, require_same_weight

FOLDER = Path(__file__).parent / "checkpoints"
# Elements and scale rules, roundings, transforms: one spec each.
SPECS = ("e4m3/tensor", "e5m2/tensor", "e4m3/row+exact", "e4m3/1x128", "mxfp8/32x32")
SPECS += ("mxfp4+sr+rht", "nvfp4/16x16", "nvfp4+pow2+sr+rht32", "nvfp4+4over6")


def values(rows, cols):
    """Returns exact values of 9 binades and both signs, the same under any torch."""
    i = torch.arange(rows * cols)
    return ((i * 37 % 101 - 50) * 2.0 ** (i % 9 - 8)).view(rows, cols)


def casts():
    x = values(24, 40)
    return {s: mf.tensor.quantize(x, s, columnwise="rht" in s, seed=5, stream=7) for s in SPECS}


def model(recipe, **options):
    linears = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    for linear in linears:
        linear.weight.data = values(*linear.weight.shape)
        linear.bias.data = values(1, linear.out_features)[0]
    mf.quantize_(linears, recipe, keep="nothing", **options)
    return linears


def codes_of_weights():
    return model("0: nvfp4; 1: mxfp8", primary=True)


def with_state():
    return model("0: nvfp4; 1: fp8_delayed", seed=3, delayed_scaling=mf.nn.DelayedScaling(2))


def write(file):
    trained = with_state()
    for _ in range(2):
        trained(values(16, 32)).sum().backward()
        mf.step(trained)
    training = mf.training_state(trained)
    torch.save(
        {"casts": casts(), "weights": codes_of_weights().state_dict(), "training": training}, file
    )


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.pt")), ids=lambda file: file.stem)
def test_a_checkpoint_loads_and_specs_give_its_bytes(file):
    saved = torch.load(file)  # weights_only, the default
    now = casts()
    for spec, then in saved["casts"].items():
        require_same_parts(now[spec], then, spec)

    weights = codes_of_weights().requires_grad_(False)
    fresh = weights.state_dict()
    assert fresh.keys() == saved["weights"].keys()
    for name in ("0.weight", "1.weight"):
        require_same_weight(fresh[name], saved["weights"][name], name)
    for parameter in weights.parameters():
        parameter.zero_()
    weights.load_state_dict(saved["weights"])
    for name in ("0.weight", "1.weight"):
        require_same_weight(weights.state_dict()[name], saved["weights"][name], name)

    trained = with_state()
    mf.load_training_state(trained, saved["training"])
    assert saved["training"]["rng"].tolist() == [3, 2]
    assert saved["training"]["1.amax_history"].any()
    require_same_results(mf.training_state(trained), saved["training"])


def test_this_version_has_a_checkpoint():
    assert (FOLDER / f"{'.'.join(mf.__version__.split('.')[:2])}.pt").is_file()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    write(FOLDER / f"{'.'.join(mf.__version__.split('.')[:2])}.pt")
