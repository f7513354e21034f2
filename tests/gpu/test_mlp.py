"""The op mlp on the GPU: the bytes of `linear`, `activation` and `linear`, gradients too."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.mlp_cases import Case
from tests.support.same_bits import require_same_results

pytestmark = pytest.mark.gpu
# K, hidden, N: whole tiles, for which kernels are fused, and others.
SIZES = [(256, 384, 128), (96, 160, 64)]


@pytest.mark.parametrize("recipe", torch.ops.minifloat.preset_names())
def test_bytes_equal_the_composition(device, recipe):
    for sizes, is_gated, has_bias in itertools.product(SIZES, (True, False), (False, True)):
        for activation in ("silu", "gelu"):
            case = Case(
                recipe, is_gated, has_bias, tokens=(2, 128), activation=activation,
                sizes=sizes, device=str(device),
            )  # fmt: skip
            require_same_results(case.results(case.fused), case.results(case.composed))
