"""FSDP2 with feed-forwards that are one op: the bits of their layers and activation one by one.

Their weights are gathered as codes, or in the compute dtype.
"""

import minifloat as mf
import pytest
import torch
from minifloat.distributed.fsdp.gather import plan_gather
from minifloat.nn.fuse import mlp
from minifloat.tensor.quantized_tensor import QuantizedTensor
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from tests.support import fused_models
from tests.support.compiled import compiled
from tests.support.fused_models import (
    PRESETS,
    READ_AS_VALUES,
    block,
    hidden,
    results,
    unfused,
    without_up_inputs,
)
from tests.support.same_bits import require_same_results
from tests.support.worlds import run_world

RECIPES = [name for name in PRESETS if name not in READ_AS_VALUES]
# W in two formats, in one, and in both with random bits or histories.
RECOMPUTED = ["fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4", "mxfp8_nvfp4"]
COMPILED = ["mxfp8_nvfp4"]  # two formats, random bits
STEPS = 2


def sharded(model, run):
    blocks = [checkpoint_wrapper(b) if run == "checkpoint" else b for b in model]
    if run == "compiled":
        torch.compiler.reset()
        for module in blocks:
            module.forward = compiled(module.forward)
    for module in blocks:
        fully_shard(module)
    return fully_shard(nn.Sequential(*blocks))


def passes(model):
    """Returns the results of two steps, of this rank's shards."""
    found = []
    for seed in range(STEPS):
        of_step = results(model, None, hidden(next(model.parameters()).dtype, seed))
        mf.step(model)
        found.append({n: getattr(t, "_local_tensor", t) for n, t in of_step.items()})
        found[-1] = {n: getattr(t, "shard", t) for n, t in found[-1].items()}
    return found


def check(rank, run, recipes, width=128, is_fused=True, **options):
    for recipe in recipes:
        check_recipe(recipe, run, width, is_fused, options)


def check_recipe(recipe, run, width, is_fused, options):
    kinds, real = [], mlp.one_op

    def called(module, x, layers):
        kinds.append(isinstance(module.w1.weight, QuantizedTensor))
        return real(module, x, layers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_models, "HIDDEN", width)
        patch.setattr(mlp, "one_op", called)
        model = nn.Sequential(*(block(recipe, seed=seed, **options) for seed in range(2)))
        plain = unfused(model, activation_of_torch=not is_fused)
        got = passes(sharded(model, run))
        of_codes, kinds[:] = set(kinds), []
        want = passes(sharded(plain, "eager" if run == "compiled" else run))
    assert not kinds, (recipe, run)
    plan, _ = plan_gather(mf.Recipe(recipe))
    gathers_codes = plan is not None and options.get("gather") != "compute_dtype"
    assert of_codes == ({gathers_codes} if is_fused else set())
    for a, b in zip(got, want):
        require_same_results(without_up_inputs(a), without_up_inputs(b))


@pytest.mark.parametrize(
    ("run", "recipes"),
    [
        ("eager", RECIPES),
        ("checkpoint", RECOMPUTED),
        ("compiled", COMPILED),
        pytest.param("compiled", ["fp8_rowwise", "nvfp4"], marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_the_layers(run, recipes):
    run_world(2, check, run, recipes)


def check_other_weights(rank):
    check(rank, "eager", ["fp8_tensorwise", "nvfp4"], gather="compute_dtype")
    # Of 48 rows a rank, w1 and w3 are no codes: dgrad's transform takes 32 rows. w2 is.
    check(rank, "eager", ["mxfp4"], width=96, is_fused=False)
    check(rank, "eager", ["fp8_tensorwise", "mxfp8"], dtype=torch.float32, accumulate="grad")


def test_other_weights():
    run_world(2, check_other_weights)
