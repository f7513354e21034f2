"""mf.MoE with weights that ranks cut along I: operands are parts of one process's."""

import minifloat as mf
import pytest
import torch
from minifloat.moe.cut_experts import CutProduct
from minifloat.nn.grouped_product import product_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.experts import relative_error
from tests.support.worlds import run_world

D, HIDDEN, E, TOKENS = 128, 512, 3, 40
PRESETS = ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp8_2d", "nvfp4_mxfp8"]
MIXED = "fprop=nvfp4*nvfp4/16x16 dgrad=e4m3/tensor*mxfp4 wgrad=e4m3/row*nvfp4"
RECIPES = [*PRESETS, MIXED]


def experts_of(recipe, **options):
    torch.manual_seed(0)
    module = mf.MoE(D, HIDDEN, E, 2, dtype=torch.bfloat16, **options).experts
    if recipe is not None:
        mf.quantize_(nn.ModuleDict({"experts": module}), recipe, verbose=False)
    return module


def cut(module, mesh):
    for name in module.weight_names:
        placement = Shard(2 if name == "w2" else 1)
        whole = getattr(module, name)
        module.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [placement])))
    return module


def inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, D, generator=generator).bfloat16()
    indices = torch.rand(TOKENS, E, generator=generator).topk(2, dim=1)[1]
    return x, indices, torch.rand(TOKENS, 2, generator=generator)


def run(module, x, indices, weights):
    """Returns y and all gradients."""
    x, weights = (t.clone().requires_grad_() for t in (x, weights))
    y = module(x, indices, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y.dtype))
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    for name in module.weight_names:
        grad = getattr(module, name).grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


# ---- operands ------------------------------------------------------------------------------------


def part(t, dim, rank, ranks):
    return t.chunk(ranks, dim)[rank]


def check_operands(rank, ranks):
    """Compares each cast of a product with the part of the cast of whole matrices."""
    mesh = init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(1)
    offs = torch.tensor([7, 7, 36], dtype=torch.int32)
    table = torch.ops.minifloat.group_table(offs, TOKENS)
    specs = ["e4m3/tensor", "e5m2/tensor", "e4m3/row", "mxfp8", "nvfp4", "mxfp4", "e4m3/1x128"]
    blocks = ["e4m3/128x128", "mxfp8/32x32", "nvfp4/16x16"]
    for dim in (1, 2):
        product = CutProduct("w", mf.Recipe("fp8_rowwise"), mesh.get_group(), dim)
        for matrix in "xgw":
            shape = (E, HIDDEN, HIDDEN) if matrix == "w" else (TOKENS, HIDDEN)
            values = torch.randn(shape, generator=generator)
            values *= torch.rand(shape[-2:], generator=generator).exp2()
            at = product.cut_of(matrix)
            at = None if at is None else at - 2  # from the end
            local = values if at is None else part(values, at, rank, ranks).contiguous()
            for spec in specs + (blocks if matrix == "w" else []):
                for columnwise in (False, True):
                    where = {} if matrix == "w" else {"groups": table}
                    got = product.cast(matrix, local, spec, columnwise, **where)
                    whole = mf.quantize(values, spec, columnwise=columnwise, **where)
                    read = at if at is None or not columnwise else -3 - at
                    for name in ("codes", "scale", "amax"):
                        mine, want = getattr(got, name), getattr(whole, name)
                        want = want if want.dtype == torch.float32 else want.view(torch.uint8)
                        dims = -want.dim() if want.dim() else 0
                        is_row_scale = name != "codes" and spec == "e4m3/row"
                        if read is not None and mine.shape != want.shape:
                            along = read + 1 if is_row_scale else read
                            assert along >= dims
                            want = part(want, along, rank, ranks)
                        if matrix != "w":
                            mine, want = of_groups(mine, want, name, spec, columnwise)
                        where_ = (dim, matrix, spec, columnwise, name)
                        assert torch.equal(mine, want), where_


def of_groups(a, b, name, spec, columnwise):
    """Returns the specified rows of operands along rows; rows past the groups are unspecified."""
    is_by_row = not columnwise and a.dim() > 0 and a.shape[0] == TOKENS
    if is_by_row:
        return a[:36], b[:36]
    if columnwise and name == "codes":  # the units of the groups: 16 or 32 columns, or a block
        return a[..., : 16 // 2], b[..., : 16 // 2]
    if columnwise and name == "scale" and a.dim() == 2 and spec != "e4m3/row":
        return a[:, :1], b[:, :1]
    return a, b


@pytest.mark.parametrize("ranks", [2, 4])
def test_operands_are_parts_of_the_whole_ones(ranks):
    run_world(ranks, check_operands, ranks)


# ---- the layer -----------------------------------------------------------------------------------


def check_layer(rank, ranks):
    mesh = init_device_mesh("cpu", (ranks,))
    for recipe in RECIPES:
        want = run(experts_of(recipe), *inputs())
        got = run(cut(experts_of(recipe), mesh), *inputs())
        for name in ("w1", "w3", "w2"):  # sums over tokens, which all ranks hold
            assert torch.equal(got[name], want[name]), (recipe, name)
        for name in ("y", "x", "weights"):  # sums over ranks, of parts that are rounded to bfloat16
            assert relative_error(got[name], want[name]) < 2**-7, (recipe, name)
    module = cut(experts_of("mxfp8"), mesh)
    with torch.no_grad():
        first, second = module(*inputs()), module(*inputs())
    assert torch.equal(first, second)
    x, *routing = inputs()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(module(x, *routing).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def check_refusals(rank):
    mesh = init_device_mesh("cpu", (2,))

    def refused(module, match, error=ValueError):
        with pytest.raises(error, match=match):
            module(*inputs())

    refused(cut(experts_of("nvfp4"), mesh), r"without bf16, \+sr and \+delayed .*, got nvfp4\+sr")
    refused(cut(experts_of("fp8_delayed"), mesh), r"got e4m3/tensor\+delayed as x/fprop")
    refused(cut(experts_of("fp8_rowwise_gw_hp"), mesh), "got bf16 as g/wgrad")
    refused(cut(experts_of("mxfp8", fused_w13=True), mesh), "got w13 with")
    refused(cut(experts_of("mxfp8", bias=True), mesh), "without biases")
    refused(cut(experts_of(None), mesh), "under a recipe, got high precision")
    module = experts_of("mxfp8")
    module.register_parameter("w1", nn.Parameter(distribute_tensor(module.w1, mesh, [Shard(1)])))
    refused(module, "got w3 with no mesh")
    codes = experts_of(None)
    mf.quantize_(nn.ModuleDict({"experts": codes}), "mxfp8", primary=True, verbose=False)
    refused(cut(codes, mesh), "expected high-precision weights .*, got a QuantizedTensor")
    module = cut(experts_of(None), mesh)
    report = mf.quantize_(nn.ModuleDict({"experts": module}), "mxfp8", verbose=False)
    (how,) = set(report.gather.values())
    assert how == "weight is gathered in the compute dtype: ranks cut the experts' matrices"
    small = mf.MoE(D, 96, E, 2, dtype=torch.bfloat16, recipe="mxfp8").experts
    refused(cut(small, mesh), "as a multiple of 32, of .* in mxfp8, got 48")
    compiled = torch.compile(cut(experts_of("mxfp8"), mesh), backend="eager", fullgraph=True)
    refused(compiled, "expected eager mode", Exception)


def check_fsdp(rank):
    """Checks that FSDP2 gathers the shards of a cut weight in the compute dtype."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    want = run(cut(experts_of("fp8_rowwise"), mesh["tp"]), *inputs())
    module = cut(experts_of("fp8_rowwise"), mesh["tp"])
    fully_shard(module, mesh=mesh["dp"])
    got = run(module, *inputs())
    assert product_of(module, "w2").weight_gather is None
    for name in want:
        assert torch.equal(got[name], want[name]), name


def check_all(rank, ranks):
    check_layer(rank, ranks)
    if ranks == 2:
        check_refusals(rank)
    else:
        check_fsdp(rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_layer(ranks):
    run_world(ranks, check_all, ranks)
