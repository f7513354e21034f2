"""FSDP2 with gradients of micro-batches added in float32, without a rounding to bfloat16."""

from types import SimpleNamespace

import minifloat as mf
import pytest
import torch
from minifloat.distributed.fsdp.private_state import UnknownFsdpError, policy_of
from minifloat.distributed.register import accumulate_gradients
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.collectives import Begun
from tests.support.sharded_models import Model, batch, sharded
from tests.support.worlds import run_world

MICRO_BATCHES = 3
BF16, FP32 = torch.bfloat16, torch.float32


def built(recipe, accumulate, dtype=FP32, gather="codes", **options):
    torch.manual_seed(0)
    model = Model(**options).to(dtype)
    mf.quantize_(
        model,
        recipe,
        keep="nothing",
        accumulate=accumulate,
        gather=gather,
        data_parallel_rank=0,
    )
    return model


def run(model, dtype, sync=lambda i: None):
    for i in range(MICRO_BATCHES):
        sync(i)
        model(batch(i, dtype=dtype)).float().square().mean().backward()


def linear_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def check_sums(rank, recipes):
    """Compares with main_grad of one process, which has the weights that FSDP2 gathers."""
    for recipe in recipes:
        alone = built(recipe, "main_grad", BF16)
        for layer in linear_layers(alone).values():
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
        run(alone, BF16)
        for gather in ("codes", "compute_dtype"):
            for reduces in ("last", "each"):
                policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
                for options in ({}, {"reshard_after_forward": False}):
                    model = sharded(
                        built(recipe, "grad", gather=gather), mp_policy=policy, **options
                    )

                    def sync(i, model=model, reduces=reduces):
                        is_last = i == MICRO_BATCHES - 1
                        model.set_requires_gradient_sync(is_last or reduces == "each")

                    run(model, BF16, sync)
                    for name, layer in linear_layers(model).items():
                        grad = layer.weight.grad
                        assert grad.dtype == FP32
                        want = linear_layers(alone)[name].weight.main_grad
                        what = (recipe, gather, reduces, options, name)
                        assert torch.equal(grad.full_tensor(), want), what


def test_sums_equal_one_process():
    run_world(2, check_sums, ["fp8_tensorwise", "nvfp4", "mxfp8"])


def check_added_in_place(rank):
    """The second product is added to the tensor that FSDP2 keeps."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model = sharded(built("fp8_rowwise", "grad"), mp_policy=policy)
    model.set_requires_gradient_sync(False)
    with Begun("add_scaled_mm") as begun:
        run(model, BF16)
    assert len(begun.names) == (MICRO_BATCHES - 1) * len(linear_layers(model))
    found = [
        p._unsharded_param.grad
        for block in model.blocks
        for p in block._get_fsdp_state()._fsdp_param_group.fsdp_params
    ]
    assert len(found) == 10
    assert all(grad is not None and grad.dtype == FP32 for grad in found)


def test_sums_stay_in_float32():
    run_world(2, check_added_in_place)


def check_reduction_in_bf16(rank):
    for reduce_dtype in (BF16, None):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
        model = sharded(built("fp8_rowwise", "grad"), mp_policy=policy)
        with pytest.raises(ValueError, match="expected fully_shard with MixedPrecisionPolicy"):
            model(batch(0, dtype=BF16))


def test_other_reductions_are_refused():
    run_world(2, check_reduction_in_bf16)


def check_compiled(rank):
    """A compiled backward would round the gradient: such a layer is computed outside the graph."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    models = []
    for options in (None, {}, {"fullgraph": True}):
        model = built("fp8_rowwise", "grad", gather="compute_dtype")
        models.append(sharded(model, mp_policy=policy))
        for block in model.blocks if options is not None else ():
            block.compile(**options)
    eager, compiled, whole = models
    for model in (eager, compiled):
        run(model, BF16)
    for name, layer in linear_layers(compiled).items():
        want = linear_layers(eager)[name].weight.grad
        assert torch.equal(layer.weight.grad.full_tensor(), want.full_tensor()), name
    torch._dynamo.reset()  # which remembers code that it could not trace
    with pytest.raises(Exception, match=r"expected a float32 weight under torch\.compile"):
        whole(batch(0, dtype=BF16))


def test_compiled_blocks_round_nothing():
    run_world(2, check_compiled)


def check_tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2,))
    for accumulate in ("main_grad", "grad"):
        model = built("fp8_rowwise", accumulate)
        parallelize_module(model.blocks[0], mesh, {"up": ColwiseParallel()})
        with pytest.raises(ValueError, match="expected a weight that tensor parallelism has not"):
            model(batch(0))
        with torch.no_grad():
            model.blocks[0].up(batch(0))


def test_tensor_parallel_weights_are_refused():
    run_world(2, check_tensor_parallel)


def check_float32(rank):
    """Without mixed precision, .grad is float32 already, and torch adds what it reduces."""
    alone, model = built("mxfp8", "main_grad"), sharded(built("mxfp8", "grad"))
    for layer in linear_layers(alone).values():
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    run(alone, FP32)
    run(model, FP32, lambda i: model.set_requires_gradient_sync(i == MICRO_BATCHES - 1))
    for name, layer in linear_layers(model).items():
        want = linear_layers(alone)[name].weight.main_grad
        assert torch.equal(layer.weight.grad.full_tensor(), want)


def test_float32_weights():
    run_world(2, check_float32)


def check_ddp(rank):
    """DistributedDataParallel reduces .grad, also one that the layer has added to."""
    for is_view in (False, True):
        alone = built("mxfp8", "grad")
        run(alone, FP32)
        model = built("mxfp8", "grad")
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=is_view)
        with ddp.no_sync():
            for i in range(MICRO_BATCHES - 1):
                ddp(batch(i)).square().mean().backward()
        ddp(batch(MICRO_BATCHES - 1)).square().mean().backward()
        for name, layer in linear_layers(model).items():
            assert torch.equal(layer.weight.grad, linear_layers(alone)[name].weight.grad), name


def test_ddp():
    run_world(2, check_ddp)


def check_main_grad(rank):
    """main_grad of a parameter that FSDP2 shards would miss the reduction."""
    model = built("mxfp8", "main_grad")
    fully_shard(model)
    with pytest.raises(ValueError, match="expected an attribute main_grad"):
        model(batch(0))


def test_main_grad_of_sharded_weights_is_refused():
    run_world(2, check_main_grad)


def test_other_private_names_of_fsdp2_are_an_error(monkeypatch):
    layer = nn.Linear(4, 4).to(BF16)
    accumulate_gradients(layer, layer.weight)  # not FSDP2's: the forward checks its dtype
    assert layer.weight.grad_dtype == BF16
    state = object.__new__(FSDPState)
    with monkeypatch.context() as patch:
        patch.setitem(_composable_state._module_state_mapping, layer, lambda: state)
        with pytest.raises(
            RuntimeError, match=r"names as in torch 2\.11, got .*_fsdp_param_group'"
        ):
            accumulate_gradients(layer, layer.weight)
    monkeypatch.delattr(_composable_state, "_module_state_mapping")
    with pytest.raises(
        RuntimeError, match=r"names as in torch 2\.11, got .*_module_state_mapping'"
    ):
        accumulate_gradients(layer, layer.weight)


def test_the_policy_of_a_group_or_from_torch_2_15_on_of_its_parameters():
    policy = MixedPrecisionPolicy(reduce_dtype=FP32)
    assert policy_of(SimpleNamespace(mp_policy=policy, fsdp_params=[])) is policy
    assert policy_of(SimpleNamespace(fsdp_params=[SimpleNamespace(mp_policy=policy)])) is policy
    with pytest.raises(UnknownFsdpError, match="mp_policy"):
        policy_of(SimpleNamespace(fsdp_params=[SimpleNamespace()]))
