"""Which casts of layers write swizzled scales: those that the planned product reads so.

Tensors are fake, of a device "cuda" that need not be there, and engines those of a compute
capability that the test assumes. A fake product computes nothing, so the plan alone is seen, of
forward alone: autograd's engine needs the device. tests/gpu/test_swizzled.py runs both passes.
"""

from collections import Counter

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.capability import assumed_capability
from tests.support.same_bits import require_same_bytes

BLACKWELL, RTX, HOPPER = (10, 0), (12, 0), (9, 0)
CASTS = ("quantize", "quantize_activation", "quantize_activation_backward")


class Casts(TorchDispatchMode):
    """Counts the scales of casts by their form, and calls of swizzle_scales."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("minifloat::")
        if name in CASTS:
            arguments = [a.name for a in func._schema.arguments]
            given = {**dict(zip(arguments, args, strict=False)), **(kwargs or {})}
            sides = (("row", given["row"]), ("col", given["col"]), ("h", given.get("h_col")))
            for side, spec in sides:
                if spec:
                    form = "swizzled" if given.get(f"swizzled_{side}") else "row-major"
                    self.found[form] += 1
        if "swizzle" in name:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def casts_of(step, capability):
    """Returns the counts of a layer's forward, over a factory of fake tensors."""

    def tensor(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    with assumed_capability(*capability), FakeTensorMode(), Casts() as casts:
        step(tensor)
    return casts.found


def linear(recipe, m=256, k=128, n=384, **options):
    def step(tensor):
        rng = torch.zeros(3, dtype=torch.int64, device="cuda")
        return mf.linear(tensor(m, k), tensor(n, k), None, recipe, rng=rng, **options)

    return step


@pytest.mark.parametrize("capability", [BLACKWELL, RTX])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "nvfp4_pow2"])
def test_blackwell_layers_ask_for_swizzled_scales(recipe, capability):
    """x and W for fprop, and for backward, which saves them."""
    assert casts_of(linear(recipe), capability) == {"swizzled": 4}


def test_other_engines_read_row_major_scales():
    assert casts_of(linear("mxfp8"), HOPPER) == {"row-major": 4}
    assert casts_of(linear("mxfp4"), BLACKWELL) == {"swizzled": 4}
    assert casts_of(linear("mxfp4"), RTX) == {"row-major": 4}  # an FP8 product


def test_products_of_sizes_that_the_engine_does_not_take():
    """40 tokens are no multiple of 32, the length that wgrad contracts."""
    assert casts_of(linear("mxfp8", m=40), BLACKWELL) == {"swizzled": 3, "row-major": 1}
    assert casts_of(linear("mxfp8", k=72), BLACKWELL) == {"row-major": 4}


def test_codes_that_backward_dequantizes_are_row_major():
    """Backward reads the values of fprop's codes of x and W, and has g in bf16."""
    recipe = "fprop=mxfp8*mxfp8 dgrad=mxfp8*fprop.w wgrad=mxfp8*fprop.x"
    assert casts_of(linear(recipe), BLACKWELL) == {"row-major": 2}


def test_feed_forwards():
    """x and three weights for both passes, and h, which backward casts anew."""

    def step(tensor):
        w = [tensor(384, 128), tensor(384, 128), tensor(128, 384)]
        return ops.mlp(tensor(256, 128), w, [None] * 3, "mxfp8", "silu")

    assert casts_of(step, BLACKWELL) == {"swizzled": 9}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_recorded_layers_return_either_form(recipe):
    """The op returns W for backward as its caller planned, and backward reads either."""
    x, w, grad = torch.randn(64, 96), torch.randn(48, 96), torch.randn(64, 48)
    rng, r = torch.tensor([1, 2, 3]), mf.Recipe(recipe)
    left = ops.quantize(x, r.fprop.a, "")[:4]
    of_x = ops.quantize(x, "", r.wgrad.b, rng=rng)[4:7]
    layer = (r.text, torch.float32, True, "", rng, None, 0)
    results = []
    for swizzled in (False, True):
        y, codes, scale, amax = ops.linear_forward(*left, w, None, *layer, swizzled=swizzled)
        assert scale.dim() == (3 if swizzled else 2)
        dtypes = [torch.float32] * 3
        needed = [True, True, False]
        arguments = (r.text, needed, 96, *dtypes, None, rng, None, 0)
        gradients = ops.linear_backward(grad, [*of_x, codes, scale, amax], *arguments)
        results.append([y, *gradients])
    for got, want in zip(*results, strict=True):
        require_same_bytes(got, want)
