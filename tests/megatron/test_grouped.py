"""Grouped experts of Megatron-Core beside its experts one by one: options, training, refusals."""

from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import minifloat as mf
import pytest
import torch
from minifloat.functional import scaled_grouped_mm
from torch import nn

from tests.support import megatron_models as models
from tests.support.megatron_jobs import Job
from tests.support.worlds import run_world

pytest.importorskip("megatron.core")

E, K, N = 4, 64, 96
COUNTS = [37, 0, 64, 3]
# Casts of rows and of blocks of an expert's rows, without random bits: an expert's product does not
# depend on the rows of others.
BY_ROWS = ("mxfp8", "fp8_blockwise", "fp8_rowwise")


def build_layer(of=None, **options):
    from minifloat.megatron.grouped import ColumnParallelGroupedLinear

    options = {"bias": False, "skip_bias_add": False, "is_expert": True} | options
    init = nn.init.normal_
    layer = ColumnParallelGroupedLinear(
        E, K, N, config=of or models.config(), init_method=init, **options
    )
    return nn.ModuleDict({"layer": layer})


def rows_of(count):
    draw = torch.Generator().manual_seed(1)
    x, g = (torch.randn(count, size, generator=draw).bfloat16() for size in (K, N))
    return x.requires_grad_(), g


# ---- one layer -----------------------------------------------------------------------------------


def check_random_bits():
    """Under a recipe with random bits and scales of a tensor, the product is scaled_grouped_mm."""
    model = build_layer(bias=True)
    layer = model["layer"]
    mf.quantize_(model, "nvfp4")
    state = layer.product.op_state(torch.device("cpu"))
    layer.product.op_state = lambda device: dict(state)  # the same bits twice
    x, g = rows_of(sum(COUNTS))
    y, _ = layer(x, COUNTS)
    parameters = list(layer.parameters())
    got = [y, *torch.autograd.grad(y, [x, *parameters], g)]
    weight = torch.stack(layer.weights)
    bias = torch.stack([layer.get_parameter(f"bias{e}") for e in range(E)])
    offs = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    rng = torch.cat([state["rng"], torch.tensor([state["stream"]])])
    y = scaled_grouped_mm(x, weight.mT, offs, "nvfp4", bias=bias, rng=rng)
    want = [y, *torch.autograd.grad(y, [x, *parameters], g)]
    assert all(map(torch.equal, got, want))
    assert not torch.equal(got[0], torch.zeros_like(y))


def check_counts():
    layer = build_layer()["layer"]
    x, _ = rows_of(sum(COUNTS))
    for counts in ([38, 0, 64, 3], torch.tensor([37, 64, 3]), [37, 64, 3]):
        with pytest.raises(
            ValueError, match="tokens_per_expert: expected 4 counts with the sum 104"
        ):
            layer(x, counts)


def check_attributes():
    """What the norm of gradients reads is there with and without values of Megatron's."""
    for performs in (True, False):
        layer = build_layer(of=models.config(perform_initialization=performs))["layer"]
        for w in layer.weights:
            assert (w.tensor_model_parallel, w.partition_dim, w.partition_stride) == (True, 0, 1)


def check_refusals():
    """What cannot be converted has a row that says why."""
    model = models.build(models.config(**models.EXPERTS, moe_grouped_gemm=True))
    experts = model.decoder.layers[0].mlp.experts
    experts.linear_fc2.forward = experts.linear_fc2.forward
    model.decoder.layers[1].mlp.experts.linear_fc1.config = models.config()
    model.decoder.layers[1].mlp.experts.linear_fc1.config.fp8 = "e4m3"
    name = "decoder.layers.{}.mlp.experts.linear_fc{}"
    with pytest.raises(ValueError, match=r"linear_fc1: expected x.* with blocks of one row"):
        mf.quantize_(model, f"*: mxfp8; *.linear_fc1: {OF_SQUARES}")
    skipped = dict(mf.quantize_(model, "mxfp8").skipped)
    assert "replaced on the instance" in skipped[name.format(0, 2)]
    assert "fp8='e4m3'" in skipped[name.format(1, 1)]
    check_legacy()


OF_SQUARES = "fprop=mxfp8/32x32*mxfp8 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8"


def check_legacy():
    """0.16's experts with weight1 and weight2, which no backend builds, are in the report."""
    from megatron.core.transformer.moe import experts

    if (legacy := getattr(experts, "GroupedMLP", None)) is None:
        return
    module = legacy.__new__(legacy)  # its __init__ asks for the package grouped_gemm
    nn.Module.__init__(module)
    module.weight1 = nn.Parameter(torch.zeros(8, 8))
    model = nn.ModuleDict({"experts": module, "linear": nn.Linear(64, 64)})
    report = mf.quantize_(model, "mxfp8")
    assert report.converted == [("linear", "mxfp8")]
    assert [row for row in report.skipped if row[0] == "experts" and "grouped_gemm" in row[1]]


def check_layer(rank):
    models.begin()
    check_random_bits()
    check_counts()
    check_attributes()
    check_refusals()


def test_a_layer():
    run_world(1, check_layer)


# ---- options -------------------------------------------------------------------------------------

OPTIONS = [
    {"moe_token_dispatcher_type": "alltoall"},
    {"moe_token_dispatcher_type": "allgather"},
    {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True},
    {"add_bias_linear": True, "bias_dropout_fusion": False},
    {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
    {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    {"moe_expert_capacity_factor": 0.5},
    {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
]


def one_by_one(name):
    """Returns the name that a parameter of grouped experts has in SequentialMLP."""
    parent, found, own = name.partition("mlp.experts.linear_fc")
    if not found:
        return name
    linear, kind = own.split(".")
    part = kind.rstrip("0123456789")
    return f"{parent}mlp.experts.local_experts.{kind[len(part) :]}.linear_fc{linear}.{part}"


def build_pair(recipe, **options):
    """Returns a model of grouped experts and one of the same experts, one by one."""
    of = models.EXPERTS | options
    if options.get("add_bias_linear"):
        # In bfloat16 grouped experts round once where SequentialMLP rounds before it adds a bias.
        of |= {"bf16": False, "params_dtype": torch.float32}
    grouped = models.config(**of, moe_grouped_gemm=True)
    if "recompute_modules" in of:  # which Megatron has for grouped experts alone
        of = models.EXPERTS
    pair = [models.build(each) for each in (grouped, models.config(**of))]
    if options.get("add_bias_linear"):
        pair = [model.float() for model in pair]
    grouped, other = pair
    for parameter in grouped.parameters():
        if not parameter.any():  # biases
            nn.init.normal_(parameter)
    state = {one_by_one(name): p for name, p in grouped.named_parameters()}
    assert {*state} == {name for name, _ in other.named_parameters()}
    other.load_state_dict(state, strict=False)
    for model in pair if recipe else ():
        mf.quantize_(model, recipe)
    return pair


def gradients(model):
    loss = models.loss(model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@contextmanager
def parts_of_transformer_engine():
    """Stands for what Megatron's recompute of activations asks of Transformer Engine."""
    from megatron.core.tensor_parallel import random

    class NoCasts:
        is_fp8_enabled = staticmethod(lambda: False)

    with (
        patch.object(random, "FP8GlobalStateManager", NoCasts, create=True),
        patch.object(random, "activation_recompute_forward", nothing, create=True),
        patch.object(random, "fp8_autocast", nothing, create=True),
    ):
        yield


def nothing(*args, **options):
    return nullcontext()


def check_options(rank):
    """Losses and gradients have the same bytes, without a recipe those of another order of sums.

    At EP 2: at EP 1 Megatron's own SequentialMLP with biases raises an error.
    """
    models.begin(ep=2)
    for i, options in enumerate(OPTIONS):
        for recipe in (None, *BY_ROWS) if i == 0 else (BY_ROWS[i % len(BY_ROWS)],):
            with parts_of_transformer_engine():
                (loss, got), (other, want) = map(gradients, build_pair(recipe, **options))
            assert torch.equal(loss, other), (recipe, options)
            for name, grad in got.items():
                if "linear_fc1.bias" in name:  # of float32 terms in another order
                    continue
                other_grad, where = want[one_by_one(name)], (recipe, options, name)
                if recipe is None:  # torch's matrix library chooses the order by the layout
                    torch.testing.assert_close(
                        grad, other_grad, rtol=2**-7, atol=1e-6, msg=f"{where}"
                    )
                else:
                    assert torch.equal(grad, other_grad), where


def test_grouped_experts_equal_those_one_by_one():
    run_world(2, check_options)


# ---- training ------------------------------------------------------------------------------------


def job_of(is_grouped):
    """Returns a mixture under mxfp8 in Megatron's wrapper, with its distributed optimizer."""
    model = models.EXPERTS | {"moe_grouped_gemm": is_grouped}
    options = {"model": model, "optimizer": {"lr": 1e-2}, "overlap_grad_reduce": True}
    return Job("mxfp8", False, accumulate=None, clip=1.0, names="te", **options)


def places(job):
    """Returns the keys and places of this rank's tensors in a distributed checkpoint."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "distrib_optim_sharding_type": "fully_reshardable"}
    found = job.model.sharded_state_dict(metadata=metadata)
    state = {
        "model": found,
        "optimizer": job.optimizer.sharded_state_dict(found, metadata=metadata),
    }
    apply_factories(state)
    tensors = [x for x in nested_values(state) if isinstance(x, ShardedTensor)]
    return {(x.key, x.global_shape, x.global_offset, x.replica_id) for x in tensors}


def values(job):
    return {one_by_one(name): p.detach() for name, p in job.model.named_parameters()}


def check_training(rank):
    """Expert-parallel ranks, each twice: two steps of grouped experts and of experts one by one."""
    models.begin(ep=2)
    grouped, other = job_of(True), job_of(False)
    other.model.load_state_dict(values(grouped), strict=False)
    other.optimizer.reload_model_params()
    for step in range(2):
        assert grouped.step(step) == other.step(step), step
    got, want = values(grouped), values(other)
    assert {*got} == {*want}
    for name, value in got.items():
        assert torch.equal(value, want[name]), name
    found = places(grouped)
    assert found == places(other)
    assert any("exp_avg" in key and "experts.linear_fc1" in key for key, *_ in found)


def test_training():
    run_world(4, check_training)
