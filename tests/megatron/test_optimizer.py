"""Megatron-Core's DistributedOptimizer with weights that are codes, on 2 and 4 ranks over gloo."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist

from tests.support import megatron_models as models
from tests.support.megatron_jobs import Job, linear_layers
from tests.support.megatron_models import begin
from tests.support.worlds import run_world

pytest.importorskip("megatron.core")

STEPS = 4
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}
RECIPES = ["fp8_tensorwise", "fp8_blockwise", "mxfp8_2d", "nvfp4"]


def cast_like(codes, values):
    if isinstance(codes, mf.QuantizedTensor):
        values = mf.QuantizedTensor.from_tensor(values.to(codes.dtype), *codes.specs)
    return values.detach().float()


def can_hold(recipe):
    from minifloat.megatron.versions import HAS_4_BIT_BUFFERS

    return recipe != "nvfp4" or HAS_4_BIT_BUFFERS


def check_losses(rank, tensor_parallel, recipes, options):
    """Weights that are codes train as weights in bf16 that each forward casts, bit for bit."""
    for recipe in filter(can_hold, recipes):
        begin(tensor_parallel)
        plain, held = (Job(recipe, holds, **options) for holds in (False, True))
        weights = [p for p in held.model.parameters() if isinstance(p, mf.QuantizedTensor)]
        assert len(weights) == 4 * held.config.num_layers
        assert not any(hasattr(w, "get_high_precision_init_val") for w in weights)  # freed
        losses = [[job.step(i)[0] for i in range(STEPS // 2)] for job in (plain, held)]
        plain.pause(), held.pause()
        for job, of_job in zip((plain, held), losses):
            of_job += [job.step(i)[0] for i in range(STEPS // 2, STEPS)]
        assert losses[0] == losses[1], (recipe, losses)
        assert losses[0][-1] < losses[0][0]
        want, got = plain.values(), held.values()
        for name, parameter in held.model.named_parameters():
            assert torch.equal(got[name], cast_like(parameter, want[name])), (recipe, name)
            assert vars(parameter).get("tensor_model_parallel") == vars(
                plain.model.get_parameter(name)
            ).get("tensor_model_parallel")
        require_bytes_of_codes(held, weights, recipe)


def check_experts(rank):
    """Experts that ranks divide have an optimizer of their own, beside that of dense layers."""
    for recipe, is_grouped in (("fp8_tensorwise", False), ("mxfp8_2d", True)):
        begin(ep=2)
        dispatch = {"moe_token_dispatcher_type": "allgather", "moe_grouped_gemm": is_grouped}
        model = models.EXPERTS | dispatch
        plain, held = (Job(recipe, holds, model=model, **OVERLAPS) for holds in (False, True))
        weights = [p for p in held.model.parameters() if isinstance(p, mf.QuantizedTensor)]
        assert len(weights) == 2 * (2 + 2 * 2)
        assert not any(hasattr(w, "get_high_precision_init_val") for w in weights)  # freed
        assert len(held.optimizer.chained_optimizers) == 2
        losses = [[job.step(i)[0] for i in range(STEPS)] for job in (plain, held)]
        assert losses[0] == losses[1], (recipe, losses)
        (buffer,) = (b for b in held.wrapper.expert_parallel_buffers)
        assert buffer.param_dtype == torch.uint8


def test_experts_of_expert_parallelism():
    run_world(2, check_experts)


def require_bytes_of_codes(job, weights, recipe):
    (buffer,) = (b for b in job.wrapper.buffers if b.param_dtype == torch.uint8)
    elements, bits = sum(w.numel() for w in weights), 4 if recipe == "nvfp4" else 8
    assert buffer.numel_unpadded == elements
    assert buffer.param_data.nbytes == buffer.numel * bits // 8
    memory = buffer.param_data.untyped_storage().data_ptr()
    assert all(mf.distributed.wires(w)[0].untyped_storage().data_ptr() == memory for w in weights)


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "recipes", "options"),
    [
        (2, 1, RECIPES, {}),
        (2, 1, ["fp8_tensorwise", "nvfp4"], OVERLAPS),
        (4, 2, ["mxfp8_2d"], OVERLAPS),  # other recipes: each shard has a scale of its own
    ],
    ids=["data2", "data2-overlap", "data2-tensor2-overlap"],
)
def test_losses_of_codes_equal_those_of_bf16_weights(ranks, tensor_parallel, recipes, options):
    run_world(ranks, check_losses, tensor_parallel, recipes, options)


# ---- tensor parallel -----------------------------------------------------------------------------


def check_shards(rank):
    """Each rank's shard has a scale of its own; products are those of the shards' values."""
    for recipe in filter(can_hold, RECIPES):
        begin(tp=2)
        wide = {"hidden_size": 256, "ffn_hidden_size": 512}  # shards of whole blocks of 128
        model = wide if recipe == "fp8_blockwise" else {}
        job = Job(recipe, holds_codes=True, model=model, **OVERLAPS)
        losses = [job.step(i)[0] for i in range(STEPS)]
        assert losses[-1] < losses[0]
        job.values()  # gathers
        layers = linear_layers(job.model)
        assert len(layers) == 8
        for layer in layers:
            values = layer.weight.main_param.detach().view(layer.weight.shape)  # one data rank
            assert torch.equal(layer.weight.detach().float(), cast_like(layer.weight, values))
        for layer in layers[:4]:
            require_product(layer, mf.Recipe(recipe))
        job.optimizer.reload_model_params()  # as after a checkpoint without masters
        for layer in layers:
            values = layer.weight.dequantize().float().flatten()
            assert torch.equal(layer.weight.main_param, values)


def require_product(layer, recipe):
    """y is the product of the cast input and the shards' values.

    Bounds: each of K float32 additions, and each of the two bfloat16 roundings (of the output, and
    of the sum of both ranks' outputs), adds an error of its unit times the sum of magnitudes.
    """
    group, is_row = layer.tp_group, layer.weight_dim == 1
    weight = layer.weight.dequantize().double()
    whole = [torch.empty_like(weight) for _ in range(2)]
    dist.all_gather(whole, weight, group=group)
    whole = torch.cat(whole, dim=layer.weight_dim)
    x = torch.randn(
        models.TOKENS, whole.shape[1], generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    shard = x.chunk(2, dim=1)[group.rank()].contiguous() if is_row else x
    with torch.no_grad():
        got = layer(shard)[0].double()
    values = mf.tensor.quantize(x, recipe.fprop.a).dequantize().double()
    want, size = values @ whole.t(), values.abs() @ whole.abs().t()
    if not is_row:
        want, size = (t.chunk(2, dim=1)[group.rank()] for t in (want, size))
    bound = (x.shape[1] * 2**-24 + 2 * 2**-8) * size
    error = (got - want).abs()
    assert (error <= bound).all(), (error - bound).max()


def test_shards_of_tensor_parallelism():
    run_world(2, check_shards)


# ---- gradients of micro-batches ------------------------------------------------------------------


def gradients(job, micro_batches):
    """Returns this rank's main_grad of each converted weight after some micro-batches."""
    job.wrapper.zero_grad_buffer()
    with job.wrapper.no_sync():
        for i in micro_batches:
            job.micro_batch(0, i)
    weights = [layer.weight for layer in linear_layers(job.model)]
    assert len(weights) == 8
    assert all(w.grad is None for w in weights)
    return [w.main_grad.clone() for w in weights]


def check_main_grad(rank, holds_codes):
    """Backward adds float32 gradients to main_grad, which autograd would round to bf16."""
    for tensor_parallel in (1, 2):
        begin(tensor_parallel)
        job, rounded = (Job("mxfp8_2d", holds_codes, a, **OVERLAPS) for a in ("main_grad", None))
        first, second, both = (gradients(job, which) for which in ([0], [1], [0, 1]))
        for a, b, c in zip(first, second, both, strict=True):
            assert torch.equal(a + b, c)
        for a, b in zip(first, gradients(rounded, [0]), strict=True):
            assert torch.equal(a.bfloat16().float(), b)
            assert not torch.equal(a, b)


@pytest.mark.parametrize("holds_codes", [False, True])
def test_gradients_are_added_to_main_grad_in_float32(holds_codes):
    run_world(2, check_main_grad, holds_codes)


# ---- the norm of the gradients -------------------------------------------------------------------


def check_norm(rank):
    """The norm is that of all gradients, of each parameter once, whether weights are codes."""
    begin()
    elements = sum(
        p.numel() for p in models.build(models.config(), "local").parameters()
    )  # of the whole model
    begin(tp=2)
    jobs = [Job("mxfp8_2d", holds, clip=1.0) for holds in (False, True)]
    norms = [job.step(0)[1] for job in jobs]
    gradients = [[p.main_grad for p in job.model.parameters()] for job in jobs]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    # Both add the same squares in float32, each in an order of its own: an error of less than a
    # unit for each addition, which the root halves.
    assert abs(norms[0] - norms[1]) <= elements * 2**-24 * norms[0]
    for job in jobs:
        job.backward(1)
        for p in job.model.parameters():
            p.main_grad.fill_(1)
        _, norm, _ = job.optimizer.step()
        # Sums of ones are exact. Each of the four ranks takes a root of each of at most 15
        # tensors, and squares and adds these: at most 2 + 15 + 4 roundings, halved by the root.
        assert abs(norm / elements**0.5 - 1) <= 12 * 2**-24, (norm, elements**0.5)
        for group in job.optimizer.param_groups:
            for master in group["params"]:
                assert torch.allclose(master.grad, torch.tensor(1 / (norm + 1e-6)), rtol=1e-6)


def check_nan(rank):
    """A NaN in one rank's gradient is every rank's: of the norm, and of the scaler's decision."""
    for optimizer in ({}, {"loss_scale": 1.0}):
        begin(tp=2)
        job = Job("fp8_tensorwise", holds_codes=True, clip=1.0, optimizer=optimizer)
        before = job.values()
        job.backward(0)
        if rank == 3:
            for p in job.model.parameters():
                p.main_grad.fill_(float("nan"))
        done, norm, _ = job.optimizer.step()
        if optimizer:
            assert not done
            assert all(torch.equal(before[n], v) for n, v in job.values().items())
        else:
            assert norm != norm


def test_norm():
    run_world(4, check_norm)


def test_a_nan_is_every_ranks():
    run_world(4, check_nan)


# ---- 4-bit codes in Megatron's buffers -----------------------------------------------------------


def require_4_bits():
    if not can_hold("nvfp4"):
        pytest.skip("this version of Megatron-Core has no buffers of 4-bit codes")


def test_shards_of_4_bit_codes_are_those_of_the_elements():
    """Megatron pads codes and gradients apart, and its ranks then gather other elements."""
    require_4_bits()
    options = {"model": {"num_layers": 1}, "pad_buckets_for_high_nccl_busbw": True}
    run_world(2, check_losses, 1, ["nvfp4"], options)


# ---- what is refused -----------------------------------------------------------------------------


def check_refusals(rank):
    """On every rank, by name, before Megatron has changed the model."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
    )

    begin()
    four_bits = can_hold("nvfp4")
    cases = [
        ("mxfp8", {"fp8_param_gather": True}, "one direction to gather"),
        ("fp8_rowwise", {"fp8_param_gather": True}, "one direction to gather"),
        ("mxfp8_2d", {}, "fp8_param_gather: expected True .* codes of 8 bits, got False"),
        ("mxfp8_2d", {"use_distributed_optimizer": False}, "use_distributed_optimizer: expected"),
    ]
    if four_bits:
        cases += [
            ("nvfp4", {"fp8_param_gather": True}, "fp4_param_gather: expected True"),
            ("mxfp8_2d", {"fp4_param_gather": True}, "fp8_param_gather: expected True"),
            (
                "*: mxfp8_2d; *.linear_fc2: nvfp4",
                {"fp8_param_gather": True, "fp4_param_gather": True},
                "codes of 4 bits alone, or of 8 bits alone",
            ),
        ]
    else:
        cases.append(("nvfp4", {"fp8_param_gather": True}, "install megatron-core 0.19"))
    config = models.config()
    for recipe, options, message in cases:
        model = models.build(config, "local")
        mf.quantize_(model, recipe, primary=True)
        memory = [mf.distributed.wires(layer.weight) for layer in linear_layers(model)]
        of_ddp = DistributedDataParallelConfig(**({"use_distributed_optimizer": True} | options))
        with pytest.raises(ValueError, match=message):
            DistributedDataParallel(config, of_ddp, model)
        with pytest.raises(ValueError, match="wrap the model in Megatron's Distributed"):
            TorchFullyShardedDataParallel(config, of_ddp, model)
        for layer, before in zip(linear_layers(model), memory, strict=True):
            assert mf.distributed.wires(layer.weight)[0].data_ptr() == before[0].data_ptr()


def test_refusals():
    run_world(2, check_refusals)
