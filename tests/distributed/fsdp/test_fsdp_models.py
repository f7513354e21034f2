"""FSDP2 with weights gathered as codes: the models, policies and faults."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.distributed.fsdp import weight as fsdp
from minifloat.distributed.fsdp.gather_batch import Batch
from minifloat.tensor.quantized_tensor import QuantizedTensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.sharded_models import Model, assert_equal, batch, built, sharded, train, whole
from tests.support.worlds import run_world

RECIPES = ("nvfp4", "mxfp8", "fp8_tensorwise")


def watch(linear):
    """Records for each later forward whether the weight was gathered as codes."""
    seen = []
    linear.register_forward_hook(
        lambda *_: seen.append(isinstance(linear.weight.detach(), QuantizedTensor))
    )
    return seen


# ---- parameters ----------------------------------------------------------------------------------


def check_frozen(rank):
    def frozen(recipe):
        model = built(recipe)
        for block in model.blocks:
            block.up.weight.requires_grad_(False)
        return model

    for recipe in RECIPES:
        alone, model = frozen(recipe), sharded(frozen(recipe))
        assert train(model) == train(alone), recipe
        assert_equal(whole(model), whole(alone), recipe)


def check_tied(rank):
    class Tied(nn.Module):
        def __init__(self, is_embedded):
            super().__init__()
            self.embedding = nn.Embedding(40, 32)
            self.first = nn.Linear(32, 40, bias=False)
            self.second = nn.Linear(32, 40, bias=False)
            self.second.weight = self.first.weight
            if is_embedded:
                self.first.weight = self.second.weight = self.embedding.weight

        def forward(self, tokens):
            x = self.embedding(tokens)
            return self.first(x) * self.second(x)

    def built_tied(recipe, is_embedded):
        torch.manual_seed(0)
        model = Tied(is_embedded)
        report = mf.quantize_(model, recipe, data_parallel_rank=0, keep="nothing")
        return model, report

    tokens = torch.arange(40).view(5, 8)
    for recipe in RECIPES:
        for is_embedded in (False, True):
            (alone, report), (model, _) = (built_tied(recipe, is_embedded) for _ in range(2))
            assert ("tied" in report.gather["first"]) == is_embedded
            fully_shard(model)
            for m in (alone, model):
                m(tokens).square().mean().backward()
            grads = [p.grad.full_tensor() for p in model.parameters()]
            for got, want in zip(grads, (p.grad for p in alone.parameters())):
                assert torch.equal(got, want), (recipe, is_embedded)


def check_meta(rank):
    for recipe in (*RECIPES, "fp8_delayed"):
        with torch.device("meta"):
            model = Model()
        mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
        sharded(model)
        model.to_empty(device="cpu")
        alone = built(recipe)
        state = {name: t.detach() for name, t in alone.state_dict().items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                rows = parameter.to_local().shape[0]
                chunk = -(-parameter.shape[0] // dist.get_world_size())
                parameter.to_local().copy_(state[name][rank * chunk : rank * chunk + rows])
        codes = watch(model.blocks[0].up)
        assert train(model, use_step=True) == train(alone, use_step=True), recipe
        assert all(codes), recipe


# ---- meshes and policies -------------------------------------------------------------------------


def check_hybrid_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for recipe in RECIPES:
        alone, model = built(recipe), sharded(built(recipe), mesh=mesh)
        assert train(model, use_step=True) == train(alone, use_step=True), recipe
        assert_equal(whole(model), whole(alone), recipe)


def check_policies(rank):
    """Checks bf16 compute of fp32 weights: a layer's x and W are rounded to bf16 first."""
    for recipe in RECIPES:
        for cast_inputs in (True, False):
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=cast_inputs,
            )
            model, alone = sharded(built(recipe), mp_policy=policy), built(recipe).bfloat16()
            codes = watch(model.blocks[0].up)
            y, want = (m(batch(0, dtype=torch.bfloat16)) for m in (model, alone))
            assert codes == [True], recipe
            assert torch.equal(y, want), recipe
            y.float().sum().backward()
            want.float().sum().backward()
            for got, p in zip(model.parameters(), alone.parameters()):
                assert got.grad.dtype == torch.float32
                assert torch.equal(got.grad.full_tensor(), p.grad.float()), recipe


def check_autocast(rank):
    """Checks fp32 weights under autocast: both are rounded to its dtype, as in one process."""
    for recipe in RECIPES:
        models = [built(recipe), sharded(built(recipe))]
        codes = watch(models[1].blocks[0].up)
        for _ in range(2):
            outputs = []
            for model in models:
                with torch.autocast("cpu", torch.bfloat16):
                    outputs.append(model(batch(0)))
                outputs[-1].float().square().mean().backward()
            assert torch.equal(*outputs), recipe
            mf.distributed.precompute_scales(models[1])
        assert codes == [True, True], recipe
        for p, q in zip(*(model.parameters() for model in models)):
            assert torch.equal(p.grad, q.grad.full_tensor()), recipe


def check_columns(rank):
    """Checks a weight sharded by columns, which is gathered in the compute dtype."""
    from torch.distributed.tensor import Shard

    def placement(parameter):
        return Shard(1) if parameter.dim() == 2 else None

    for recipe in RECIPES:
        alone, model = built(recipe), sharded(built(recipe), shard_placement_fn=placement)
        assert train(model, use_step=True) == train(alone, use_step=True), recipe


def check_optimizers(rank):
    """Checks fused, foreach and compiled AdamW on the sharded fp32 weights."""
    kinds = (({"fused": True}, False), ({"foreach": True}, False), ({"foreach": False}, True))
    for options, is_compiled in kinds:
        weights = []
        for gather in ("codes", "compute_dtype"):
            torch.manual_seed(0)
            model = Model()
            mf.quantize_(model, "fp8_blockwise", gather=gather)
            sharded(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
            take_step = optimizer.step
            if is_compiled:
                take_step = torch.compile(take_step, backend="aot_eager")
            for step in range(3):
                model(batch(step)).square().mean().backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                take_step()
                optimizer.zero_grad()
            for state in optimizer.state.values():
                assert type(state["exp_avg"].to_local()) is torch.Tensor
            weights.append(whole(model) | {"norm": norm.full_tensor()})
        assert_equal(*weights, options)


def check_compiled(rank):
    """Checks blocks compiled by aot_eager: the ops of inductor, without its compiler."""
    for recipe in (*RECIPES, "mxfp8_nvfp4", "fp8_delayed"):
        torch._dynamo.reset()  # recipes share the limit of recompilations, past which torch raises
        alone, model = built(recipe), built(recipe)
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        sharded(model)
        assert train(model, use_step=True) == train(alone, use_step=True), recipe
        assert_equal(whole(model), whole(alone), recipe)


# ---- when FSDP2 gathers, and frees ---------------------------------------------------------------


def check_memory(rank):
    """Checks that forward allocates no tensors of backward alone, and no codes stay in between."""

    def allocated(weight):
        parts = weight.detach().rowwise, weight.detach().columnwise
        return [part.codes.untyped_storage().size() > 0 for part in parts]

    for recipe in ("nvfp4", "mxfp8_nvfp4", "mxfp8", "fp8_tensorwise"):
        model, seen = sharded(built(recipe)), []
        model.blocks[0].up.register_forward_hook(
            lambda m, *_, seen=seen: seen.append((m.weight, allocated(m.weight)))
        )
        for _ in range(2):
            y = model(batch(0))
            weight, in_forward = seen.pop()
            assert in_forward == [True, False], recipe
            assert allocated(weight) == [False, False], recipe
            y.sum().backward()
            assert allocated(weight) == [False, False], recipe


def check_unbrought(rank):
    """Checks that a read of a direction not gathered raises an error that names it."""
    for recipe in ("nvfp4", "mxfp8", "fp8_rowwise", "fp8_tensorwise"):
        model, refused = sharded(built(recipe)), []

        def read(layer, *_, refused=refused):
            with pytest.raises(ValueError, match="freed: no gather has brought it"):
                layer.weight.detach().columnwise.dequantize()
            refused.append(True)

        model.blocks[0].up.register_forward_hook(read)
        model(batch(0)).sum().backward()
        assert refused, recipe


def check_other_times(rank):
    """Checks changes of FSDP2's gathers between steps, a write to a weight, and inference."""
    changes = (("forward", False), ("backward", False), ("forward", True), ("backward", True))
    for recipe in (*RECIPES, "fp8_rowwise"):
        alone, model = built(recipe), sharded(built(recipe))
        for after, does_reshard in changes:
            for m in (alone, model):
                m.zero_grad()
                m(batch(1)).square().mean().backward()
                m(batch(2)).square().mean().backward()
                with torch.inference_mode():
                    m.eval()(batch(3))
                m.train()
            for block in model.blocks:
                block.reshard()
            model.reshard()
            for p, q in zip(alone.parameters(), model.parameters()):
                assert torch.equal(p.grad, q.grad.full_tensor()), (recipe, after, does_reshard)
            with torch.no_grad():
                for m in (alone, model):
                    m.blocks[1].up.weight.mul_(-1.5)
                    m.blocks[1].down.weight.mul_(3.0)
                    mf.step(m)
            getattr(model, f"set_reshard_after_{after}")(does_reshard)


def check_cast_once_a_gather(rank):
    """Counts native calls: one before each gather and one after it, for all its weights.

    With mf.step, amaxes are measured and exchanged once a step, whatever the micro-batches.
    """
    exchanges, casts, fills = [], [], []
    exchange_amaxes, start, receive = fsdp.exchange_amaxes, Batch.start, Batch.receive

    def exchanging(batches, *args):
        exchanges.append(sum(len(batch.gathers) for batch in batches))
        return exchange_amaxes(batches, *args)

    def casting(self, *args):
        casts.append(len(self.gathers))
        return start(self, *args)

    def receiving(self, *args):
        fill = self.fill
        self.fill = lambda *of_fill: (fills.append(len(self.gathers)), fill(*of_fill))
        receive(self, *args)
        self.fill = fill

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(fsdp, "exchange_amaxes", exchanging)
        monkeypatch.setattr(Batch, "start", casting)
        monkeypatch.setattr(Batch, "receive", receiving)
        # Two blocks of two weights, gathered forward and backward; the head, gathered once, is sent
        # in the compute dtype under mxfp8.
        for recipe, weights, gathers in (("nvfp4", 5, [1, 2, 2, 2, 2]), ("mxfp8", 4, [2, 2, 2, 2])):
            model = sharded(built(recipe))
            train(model, 1, use_step=True)
            for calls in (exchanges, casts, fills):
                calls.clear()
            train(model, 2, micro_batches=3, use_step=True)
            assert exchanges == [weights] * 2, recipe
            assert sorted(casts) == sorted(gathers * 6), recipe
            assert sorted(fills) == sorted(gathers * 6), recipe
            with torch.no_grad():
                y = model(batch(1))
                model.blocks[0].up.weight.neg_()  # the same amaxes, other codes
                assert not torch.equal(model(batch(1)), y), recipe


# ---- hybrids -------------------------------------------------------------------------------------


def check_hybrid_equals_preset(rank):
    """Checks that a preset written as three products trains alike."""
    for preset in ("nvfp4", "mxfp4"):
        recipe = mf.Recipe(preset)
        text = " ".join(f"{p}={getattr(recipe, p)}" for p in ("fprop", "dgrad", "wgrad"))
        alone = built(preset)
        losses = train(alone, 5)
        for model in (built(text), sharded(built(text)), sharded(built(preset))):
            assert train(model, 5) == losses, preset
            assert_equal(whole(model), whole(alone), preset)


# ---- faults --------------------------------------------------------------------------------------


def check_differing_ranks(rank):
    for recipe, width, word in (
        (("nvfp4", "mxfp8_2d")[rank], 64, "mxfp8_2d"),
        ("nvfp4", (64, 96)[rank], "(96, 32)"),
    ):
        model = nn.Sequential(nn.Linear(32, width, bias=False))
        mf.quantize_(model, recipe)
        fully_shard(model)
        with pytest.raises(ValueError, match=r"rank 0 has 0: nvfp4, .* rank 1 has") as caught:
            model(torch.randn(4, 32))
        assert word in str(caught.value)


def check_not_finite(rank):
    """Checks a NaN or Inf of one rank: on all ranks it is NaN wherever its scale is used."""
    for recipe in ("fp8_tensorwise", "nvfp4", "mxfp8", "fp8_rowwise", "fp8_blockwise"):
        for value in (float("nan"), float("-inf")):
            outputs = []
            for is_sharded in (False, True):
                for precompute in (False, True) if is_sharded else (False,):
                    torch.manual_seed(0)
                    model = nn.Sequential(nn.Linear(64, 40, bias=False))
                    with torch.no_grad():
                        model[0].weight[30, 5] = value
                    mf.quantize_(model, recipe, data_parallel_rank=0)
                    if is_sharded:
                        fully_shard(model)
                    x = torch.ones(3, 64)
                    if precompute:
                        model(x)
                        model.reshard()
                        mf.distributed.precompute_scales(model)
                    outputs.append(model(x))
            assert outputs[0].isnan().any(), recipe
            for y in outputs[1:]:
                assert torch.equal(y.nan_to_num(7.0), outputs[0].nan_to_num(7.0)), recipe


def check_errors(rank):
    model = sharded(built("nvfp4"))
    with pytest.raises(ValueError, match="restore it before fully_shard"):
        mf.restore_(model)
    with pytest.raises(ValueError, match="gather: expected one of codes, compute_dtype"):
        mf.quantize_(Model(), "nvfp4", gather="bf16")


def run_checks(rank, checks):
    for check in checks:
        check(rank)
        torch._dynamo.reset()


GROUPS = {
    "parameters": (2, [check_frozen, check_tied, check_meta]),
    "policies": (
        2,
        [check_policies, check_autocast, check_columns, check_optimizers],
    ),
    "gathers": (2, [check_memory, check_unbrought, check_other_times, check_cast_once_a_gather]),
    "hybrid mesh": (4, [check_hybrid_mesh]),
    "compiled": (2, [check_compiled]),
    "hybrids": (2, [check_hybrid_equals_preset]),
    "faults": (2, [check_differing_ranks, check_not_finite, check_errors]),
}


@pytest.mark.parametrize("group", GROUPS)
def test_fsdp(group):
    world, checks = GROUPS[group]
    run_world(world, run_checks, checks)
