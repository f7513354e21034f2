"""mf.MoE with weights that ranks cut along I: operands are parts of one process's."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from minifloat._native import ops
from minifloat.distributed.tensor_parallel import cut_along_width
from minifloat.nn.cache import operand_cache
from minifloat.nn.grouped_product import product_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.experts import relative_error
from tests.support.pairs import pairs
from tests.support.reuse_counts import Casts
from tests.support.specs import ROWS_RECIPE
from tests.support.worlds import device_of, run_world

D, HIDDEN, E, TOKENS = 128, 512, 3, 40
MIXED = "fprop=nvfp4*nvfp4/16x16 dgrad=e4m3/tensor*mxfp4 wgrad=e4m3/row*nvfp4"
RANDOM = "fprop=mxfp8+sr*mxfp8+sr dgrad=nvfp4+sr*e4m3/row+sr wgrad=e4m3/tensor+sr*nvfp4+sr"
PARTLY = "fprop=mxfp8*mxfp8 dgrad=mxfp8*e4m3/row wgrad=mxfp8*mxfp8"
RECIPES = [None, *mf.presets()[1:], MIXED, RANDOM]
EXTRAS = [{}, {"bias": True, "limit": 7.0}]
FORMS = [{}, {"fused_w13": True}, {"bias": True}, {"fused_w13": True, "bias": True, "limit": 7.0}]


def experts_of(recipe, device="cpu", primary=False, data_parallel_rank=0, **options):
    torch.manual_seed(0)
    module = mf.MoE(D, HIDDEN, E, 2, dtype=torch.bfloat16, **options).experts.to(device)
    if recipe is not None:
        options = {"primary": primary, "data_parallel_rank": data_parallel_rank}
        mf.quantize_(nn.ModuleDict({"experts": module}), recipe, **options)
    return module


def cut(module, mesh):
    cut_along_width(module, mesh)
    return module


def inputs(device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(TOKENS, D, generator=generator).bfloat16()
    indices = torch.rand(TOKENS, E, generator=generator).topk(2, dim=1)[1]
    weights = torch.rand(TOKENS, 2, generator=generator)
    return x.to(device), indices.to(device), weights.to(device)


def run(module, x, indices, weights):
    """Returns y and all gradients, of a fused w13 as (E, 2I, D)."""
    x, weights = (t.clone().requires_grad_() for t in (x, weights))
    y = module(x, indices, weights)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    y.backward(gradient.to(y))
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad}
    for name, parameter in module.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        is_split = grad.dim() > (3 if name[0] == "w" else 2)
        found[name] = grad.flatten(1, 2) if is_split else grad
    return found


def histories(module):
    found = {}
    for name in module.weight_names:
        product = product_of(module, name)
        if product is not None and product.amax_history is not None:
            found[name] = product.amax_history
    return found


# ---- operands ------------------------------------------------------------------------------------


def part(t, dim, rank, ranks, parts):
    """Returns a rank's cut of each part, one after the other."""
    return torch.cat([p.chunk(ranks, dim)[rank] for p in t.chunk(parts, dim)], dim)


SPECS = ["e4m3/tensor", "e5m2/tensor", "e4m3/row", "mxfp8", "nvfp4", "mxfp4", "e4m3/1x128"]
SPECS += [f"{spec}+sr" for spec in ("e4m3/tensor", "e4m3/row", "mxfp8", "nvfp4")]
SPECS += ["nvfp4+rht", "nvfp4+sr+rht"]
BLOCKS = ["e4m3/128x128", "mxfp8/32x32", "nvfp4/16x16", "nvfp4/16x16+sr"]
STREAM = 77


LONG, SHORT = 2 * HIDDEN, D  # of W: the dimension that ranks cut, and the other
PLACES = [("x", False), ("w", False), ("g", False), ("w", True), ("g", True), ("x", True)]
CUT = {"x": (None, -1), "w": (-2, -1), "g": (-1, None)}  # by weight_dim


class Products(TorchDispatchMode):
    """The operands (elements, scale, amax) of products, in their order."""

    def __init__(self):
        super().__init__()
        self.operands = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ops.scaled_mm.default:
            self.operands += [args[:3], args[3:6]]
        return func(*args, **(kwargs or {}))


def check_operands(rank, ranks, kind="cpu"):
    """Compares the operands of a rank's products with their parts of one process's."""
    device = device_of(rank, kind)
    mesh = init_device_mesh(kind, (ranks,))
    for dim, parts in ((0, 1), (0, 2), (1, 1)):
        where = {"rank": rank, "ranks": ranks, "weight_dim": dim, "weight_parts": parts}
        check_casts(where, mesh.get_group().group_name, device)


def check_casts(where, group, device):
    generator = torch.Generator().manual_seed(1)
    rank, ranks, dim, parts = where.values()
    n, k = (SHORT, LONG) if dim else (LONG, SHORT)
    shapes = {"x": (TOKENS, k), "w": (E, n, k), "g": (TOKENS, n)}
    values = {}
    for name, shape in shapes.items():
        spread = torch.rand(shape[-2:], generator=generator).exp2()
        values[name] = (torch.randn(shape, generator=generator) * spread).to(device)
    mine = {}
    for name, t in values.items():
        at = CUT[name][dim]
        mine[name] = t if at is None else part(t, at, rank, ranks, parts).contiguous()
    options = {
        "offs": torch.tensor([7, 7, 36], dtype=torch.int32, device=device),
        "row_ids": torch.arange(TOKENS, dtype=torch.int32, device=device) * 3 + 1,
        "rng": torch.tensor([5, 0], device=device),
        "stream": STREAM,
        "out_dtype": torch.float32,
    }
    for spec in SPECS + BLOCKS:
        other = "e4m3/tensor" if spec in BLOCKS else spec  # no group of rows has 2D blocks
        recipe = f"fprop={other}*{spec} dgrad={other}*{spec} wgrad={other}*{other}"
        op = ops.scaled_grouped_mm
        whole = operands_of(op, values, recipe=recipe, **options)
        op = ops.scaled_grouped_mm_sharded
        got = operands_of(op, mine, recipe=recipe, group=group, **where, **options)
        for (matrix, columnwise), want_three, got_three in zip(PLACES, whole, got, strict=True):
            at = CUT[matrix][dim]
            read = at if at is None or not columnwise else -3 - at
            text = spec if matrix == "w" else other
            for name, a, b in zip(("codes", "scale", "amax"), got_three, want_three):
                if read is not None and a.shape != b.shape:
                    is_row_scale = name != "codes" and "/row" in text
                    b = part(bits(b), read + 1 if is_row_scale else read, rank, ranks, parts)
                if matrix != "w":
                    a, b = of_groups(a, b, name, text, columnwise)
                assert torch.equal(bits(a), bits(b)), (where, matrix, text, columnwise, name)


def operands_of(op, values, **options):
    """Returns the operands of the three products, in the order of PLACES."""
    x, w = (values[name].clone().requires_grad_() for name in "xw")
    with Products() as seen:
        op(x, w.transpose(-2, -1), **options).backward(values["g"])
    return seen.operands


def bits(t):
    """Returns codes that torch cannot compare as bytes."""
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def of_groups(a, b, name, spec, columnwise):
    """Returns the specified rows of operands along rows; rows past the groups are unspecified."""
    is_by_row = not columnwise and a.dim() > 0 and a.shape[0] == TOKENS
    if is_by_row:
        return a[:36], b[:36]
    if columnwise and name == "codes":  # the units of the groups: 16 or 32 columns, or a block
        return a[..., : 16 // 2], b[..., : 16 // 2]
    if columnwise and name == "scale" and a.dim() == 2 and "/row" not in spec:
        return a[:, :1], b[:, :1]
    return a, b


@pytest.mark.parametrize("ranks", [2, 4])
def test_operands_are_parts_of_the_whole_ones(ranks):
    run_world(ranks, check_operands, ranks)


# ---- the layer -----------------------------------------------------------------------------------


def require_like(got, want, names, is_equal, where):
    for name in names:
        if is_equal:
            assert torch.equal(got[name], want[name]), (where, name)
        else:
            # On a GPU sums of other sizes have another order, so a few codes differ.
            limit = 0.02 if got[name].is_cuda else 2**-7
            assert relative_error(got[name], want[name]) < limit, (where, name)


def check_layer(rank, recipes, kind="cpu"):
    """Compares with one process: sums over tokens are equal on a CPU, sums over ranks are near."""
    device = device_of(rank, kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    alone = dist.new_group([rank], use_local_synchronization=True)
    for recipe, fused, extra in pairs(recipes, (False, True), EXTRAS):
        form = extra | {"fused_w13": fused}
        whole, mine = (experts_of(recipe, device, **form) for _ in range(2))
        for step in range(2):  # the second scales by the first one's amaxes under +delayed
            want = run(whole, *inputs(device, step))
            got = run(cut(mine, mesh) if step == 0 else mine, *inputs(device, step))
            over_tokens = [name for name in want if name[0] in "wb" and name != "weights"]
            where = recipe, form
            is_first = kind == "cpu" and step == 0
            require_like(got, want, over_tokens, is_first, where)
            require_like(got, want, ("y", "x", "weights"), False, where)
            if step == 0 and kind == "cpu":
                for name, history in histories(whole).items():
                    assert torch.equal(histories(mine)[name], history), (where, name)
            mf.step(whole, alone)
            mf.step(mine)


def check_primary(rank, kind="cpu"):
    """Compares primary weights, whose cuts have rank 0's bytes."""
    device = device_of(rank, kind)
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    for recipe in ("fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"):
        want = run(experts_of(recipe, device, primary=True, bias=True), *inputs(device))
        module = cut(experts_of(recipe, device, primary=True, bias=True), mesh)
        with Casts() as seen:
            got = run(module, *inputs(device))
        assert not any(len(shape) == 3 for shape in seen.count)
        require_like(got, want, ("w1", "w3", "w2", "b1", "b3", "b2"), kind == "cpu", recipe)
        require_like(got, want, ("y", "x", "weights"), False, recipe)


def check_reuse(rank, kind="cpu"):
    """Checks that weights are cast once a step, with the results of casting them each time.

    Also where bytes are not compared, as on CUDA: gradients show that a weight is unchanged.
    """
    recipes, forms = ("mxfp8", "nvfp4", "fp8_delayed", "fp8_tensorwise"), ({}, {"fused_w13": True})
    for recipe, form, compares_bytes in pairs(recipes, forms, (True, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(operand_cache, "COMPARES_BYTES", compares_bytes)
            check_reuse_of(recipe, form, device_of(rank, kind), kind)


def check_reuse_of(recipe, form, device, kind):
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    models = [cut(experts_of(recipe, device, **form), mesh) for _ in range(2)]
    for name in models[1].weight_names:
        product_of(models[1], name).cache_of = lambda weight: None
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in models]
    for step in range(3):
        results = []
        for module, optimizer in zip(models, optimizers):
            # CUDA's backward would run in a thread of its own, where nothing is counted.
            with torch.autograd.set_multithreading_enabled(False), Casts() as seen:
                found = [run(module, *inputs(device, seed)) for seed in range(3)]
            count = sum(n for shape, n in seen.count.items() if len(shape) == 3)
            if module is models[0] and step > 0:
                where = (recipe, form, step, dict(seen.count))
                assert count == len(module.weight_names), where
            results.append((found, count))
            optimizer.step()
            optimizer.zero_grad()
            mf.step(module)
        assert results[1][1] == 3 * len(models[1].weight_names)
        for a, b in zip(results[0][0], results[1][0]):
            for name in a:
                assert torch.equal(a[name], b[name]), (recipe, form, name)


def check_refusals(rank):
    mesh = init_device_mesh("cpu", (2,))

    def refused(module, match, error=ValueError):
        with pytest.raises(error, match=match):
            module(*inputs())

    module = experts_of("mxfp8", fused_w13=True)
    part = distribute_tensor(module.w13, mesh, [Shard(1)])
    module.register_parameter("w13", nn.Parameter(part))
    refused(module, r"a fused w13 \(E, 2, I, D\) .*, got w13 \(3, 1024, 128\) with")
    module = experts_of("mxfp8")
    module.register_parameter("w1", nn.Parameter(distribute_tensor(module.w1, mesh, [Shard(1)])))
    refused(module, "got w3 .* with no mesh")
    with pytest.raises(ValueError, match="expected whole experts, got a part of w1"):
        cut(module, mesh)
    with pytest.raises(ValueError, match="expected w1 and w3 apart for primary weights"):
        cut(experts_of("mxfp8", primary=True, fused_w13=True), mesh)
    with pytest.raises(TypeError, match=r"expected the experts of an mf\.MoE, got MoE"):
        cut(mf.MoE(D, 32, E, 2), mesh)
    codes = mf.MoE(D, 32, E, 2)  # whose w1 and w3 the ranks can cut
    mf.quantize_(codes, PARTLY, primary=True)
    with pytest.raises(ValueError, match="expected a cut of mxfp8 at multiples of its block, 32"):
        cut(codes.experts, mesh)
    assert not any(isinstance(p, DTensor) for p in codes.parameters())
    for wrong in (5, None, dist.group.WORLD):
        with pytest.raises(TypeError, match="cut_along_width: expected a DeviceMesh, got"):
            cut(mf.MoE(D, 32, E, 2).experts, wrong)
    several = nn.ModuleList([mf.MoE(D, 32, 4, 2), mf.MoE(D, 32, 4, 2)])
    cut(several[1].experts, mesh)
    for group in (mesh, dist.group.WORLD):
        with pytest.raises(ValueError, match="expected whole experts, got a DTensor as w1"):
            mf.expert_parallel(several, group)
    assert several[0].experts.parallel is None
    with pytest.raises(ValueError, match="ranks divide I = 33"):
        cut(mf.MoE(D, 33, E, 2).experts, mesh)
    odd = mf.MoE(D, 33, E, 2, dtype=torch.bfloat16, recipe="mxfp8").experts
    for name, dim in (("w1", 1), ("w3", 1), ("w2", 2)):
        whole = getattr(odd, name)
        part = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
        odd.register_parameter(name, part)
    refused(odd, "expected I as a multiple of the ranks, got 33 over 2 ranks")
    refused(
        cut(experts_of("nvfp4", data_parallel_rank=rank), mesh),
        "experts.w1: expected tensor-parallel ranks to share the seed",
    )
    module = cut(experts_of(None), mesh)
    report = mf.quantize_(nn.ModuleDict({"experts": module}), "mxfp8")
    (how,) = set(report.gather.values())
    assert how == "weight is gathered in the compute dtype: ranks cut the experts' matrices"
    small = mf.MoE(D, 96, E, 2, dtype=torch.bfloat16, recipe="mxfp8").experts
    refused(cut(small, mesh), "as a multiple of 32 for .* in mxfp8, got N = 96")
    x, *routing = inputs()
    x.requires_grad_()
    module = cut(experts_of("mxfp8"), mesh)
    (dx,) = torch.autograd.grad(module(x, *routing).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative through a quantized product"):
        dx.sum().backward()


def check_order(rank):
    """Checks that mf.quantize_ may come after the cut, with a line for each parameter."""
    mesh = init_device_mesh("cpu", (2,))
    for form in FORMS:
        want = run(cut(experts_of("nvfp4", **form), mesh), *inputs())
        model = nn.ModuleDict({"experts": cut(experts_of(None, **form), mesh)})
        report = mf.quantize_(model, "nvfp4", data_parallel_rank=0)
        names = {f"experts.{name}" for name in model["experts"].weight_names}
        assert set(report.gather) == names
        require_like(run(model["experts"], *inputs()), want, want, True, form)


FORM = {"fused_w13": True, "bias": True}


def save_cut(rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    dcp.save(cut(experts_of("mxfp8", **FORM), mesh).state_dict(), checkpoint_id=folder)


def load_cut(rank, folder):
    mesh = init_device_mesh("cpu", (4,))
    module = cut(experts_of("mxfp8", **FORM), mesh)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    state = module.state_dict()
    dcp.load(state, checkpoint_id=folder)
    for name, parameter in experts_of("mxfp8", **FORM).named_parameters():
        assert torch.equal(state[name].full_tensor().view_as(parameter), parameter), name


def test_a_checkpoint_of_two_ranks_loads_on_four(tmp_path):
    run_world(2, save_cut, str(tmp_path))
    run_world(4, load_cut, str(tmp_path))


def check_compiled(rank):
    """Checks that compiled code breaks its graph at cut experts, with eager's results."""
    mesh = init_device_mesh("cpu", (2,))
    eager = run(cut(experts_of("mxfp8"), mesh), *inputs())
    module = cut(experts_of("mxfp8"), mesh)
    compiled = torch.compile(module, backend="eager")
    found = run(compiled, *inputs())
    for name in ("y", "x", "weights"):
        assert torch.equal(found[name], eager[name]), name
    whole_graph = torch.compile(module, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        whole_graph(*inputs())


def check_fsdp(rank):
    """Checks that FSDP2 gathers the shards of a cut weight in the compute dtype."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for form in ({}, {"fused_w13": True, "bias": True}):
        want = run(cut(experts_of("nvfp4", **form), mesh["tp"]), *inputs())
        module = cut(experts_of("nvfp4", **form), mesh["tp"])
        fully_shard(module, mesh=mesh["dp"])
        got = run(module, *inputs())
        assert product_of(module, "w2").weight_gather is None
        require_like(got, want, want, True, form)


def test_layer_of_two_ranks():
    run_world(2, check_layer, [*RECIPES, ROWS_RECIPE])


def check_all(rank):
    checks = (check_primary, check_reuse, check_refusals, check_order)
    for check in (*checks, check_compiled):
        check(rank)


def test_two_ranks():
    run_world(2, check_all)


def test_four_ranks():
    run_world(4, check_layer, ["fp8_delayed", "nvfp4", RANDOM])


def test_fsdp2_shards_cut_experts():
    run_world(4, check_fsdp)
