"""Experts of Megatron-Core under recipes: grouped and one by one, over expert-parallel ranks."""

import tempfile

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import megatron_models as models
from tests.support.exact_sums import integers
from tests.support.worlds import run_world

pytest.importorskip("megatron.core")

# Casts of rows of tokens and of weights alone, and nothing stochastic: no result depends on the
# tokens of other ranks.
BY_ROWS = ["fp8_rowwise", "fp8_blockwise", "mxfp8"]
EXPERTS, WIDTH = 4, models.WIDTH


def grouped_layer(kind, k, n, bias=False, skip_bias_add=False, of=None):
    from minifloat.megatron import grouped

    cls = getattr(grouped, f"{kind}ParallelGroupedLinear")
    of = of or models.config(params_dtype=torch.float32, bf16=False)
    return cls(
        EXPERTS,
        k,
        n,
        config=of,
        init_method=nn.init.normal_,
        bias=bias,
        skip_bias_add=skip_bias_add,
        is_expert=True,
    )


# ---- the layer -----------------------------------------------------------------------------------


def check_products(rank):
    """Checks that each expert has the results of mf.linear of its rows, or of none."""
    models.begin()
    counts = [32, 0, 7, 25]
    x, g = integers(1, 64, 128), integers(2, 64, 96)
    for recipe in (None, *BY_ROWS):
        layer = grouped_layer("Column", 128, 96, bias=True)
        with torch.no_grad():
            for i in range(EXPERTS):
                layer.get_parameter(f"weight{i}").copy_(integers(3 + i, 96, 128))
                layer.get_parameter(f"bias{i}").copy_(integers(9 + i, 96))
        model = nn.ModuleDict({"experts": layer})
        if recipe is not None:
            assert mf.quantize_(model, recipe).converted == [("experts", recipe)]
            with pytest.raises(ValueError, match="already converted"):
                mf.quantize_(model, recipe)
        mine = x.clone().requires_grad_()
        y, none = layer(mine, counts)
        assert none is None
        y.backward(g)
        rows = zip(x.split(counts), g.split(counts), y.split(counts), mine.grad.split(counts))
        for i, (each, of_y, got, dx) in enumerate(rows):
            w, b = (layer.get_parameter(f"{name}{i}") for name in ("weight", "bias"))
            own = [t.detach().clone().requires_grad_() for t in (each, w, b)]
            want = mf.linear(*own, recipe or "bf16")
            want.backward(of_y)
            assert torch.equal(got, want), (recipe, i)
            assert torch.equal(dx, own[0].grad), (recipe, i)
            assert torch.equal(w.grad, own[1].grad), (recipe, i)
            assert torch.equal(b.grad, own[2].grad), (recipe, i)
        # A tensor of counts, as the flex dispatcher passes it; and no tokens at all.
        assert torch.equal(layer(x, torch.tensor(counts))[0], y)
        nothing = torch.empty(0, 128, requires_grad=True)
        layer.zero_grad()
        layer(nothing, [0] * EXPERTS)[0].sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())
        if recipe is not None:
            mf.restore_(model)
            assert torch.equal(layer(x, counts)[0], y)  # of integers
    late = grouped_layer("Row", 128, 96, bias=True, skip_bias_add=True)
    _, biases = late(x, counts)
    assert [id(b) for b in biases] == [id(late.get_parameter(f"bias{i}")) for i in range(EXPERTS)]


def check_codes(rank):
    """Checks that experts that are codes have the results of casting their weights."""
    from minifloat.megatron.grouped import lie_together

    models.begin()
    counts, x, g = [32, 0, 7, 25], torch.randn(64, 128), torch.randn(64, 96)
    for recipe in ("fp8_tensorwise", "fp8_blockwise", "mxfp8_2d", "nvfp4"):
        results = []
        for primary in (False, True):
            torch.manual_seed(3)
            layer = grouped_layer("Column", 128, 96)
            values = [w.detach().clone() for w in layer.weights]
            model = nn.ModuleDict({"experts": layer})
            keeps = {"primary": primary, "keep_high_precision_init": primary}
            mf.quantize_(model, recipe, **keeps)
            mine = x.clone().requires_grad_()
            y, _ = layer(mine, counts)
            y.backward(g)
            results.append([y.detach(), mine.grad, *(w.grad for w in layer.weights)])
        for cast, codes in zip(*results):
            assert torch.equal(cast, codes), recipe
        for w, value in zip(layer.weights, values):
            assert isinstance(w, mf.QuantizedTensor)
            assert torch.equal(w.get_high_precision_init_val(), value)
            assert w.partition_dim == 0
        mf.restore_(model)
        assert not any(isinstance(w, mf.QuantizedTensor) for w in layer.weights)
        assert lie_together(layer.weights)
        assert lie_together(layer.bfloat16().weights)
        layer.float()
        layer(x, counts)


def check_memory(rank):
    """Checks that weights that lie together are not copied, nor are those in Megatron's buffers."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from minifloat.megatron.grouped import TogetherWeights

    models.begin()
    model = build(config_of(), "te")
    assert_together(model, TogetherWeights)
    of_ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapper = DistributedDataParallel(config_of(), of_ddp, model)
    assert_together(model, TogetherWeights)
    apart = [nn.Parameter(torch.randn(2, 3)) for _ in range(3)]
    whole = TogetherWeights.apply(*apart)
    whole.backward(torch.arange(18.0).view(3, 2, 3))
    assert torch.equal(whole, torch.stack(apart))
    assert torch.equal(apart[1].grad, torch.arange(6.0, 12.0).view(2, 3))
    del wrapper


def assert_together(model, together):
    layers = [m for name, m in model.named_modules() if name.endswith("experts.linear_fc1")]
    assert layers
    for layer in layers:
        whole = together.apply(*layer.weights)
        assert whole.data_ptr() == layer.weight0.data_ptr()
        assert torch.equal(whole, torch.stack(layer.weights))


def check_states(rank):
    """Checks plain state dicts: an entry an expert, or one for all; Transformer Engine's state."""
    models.begin()
    layer, other = (grouped_layer("Column", 64, 32) for _ in range(2))
    saved = layer.state_dict()
    assert sorted(saved) == ["_extra_state", *(f"weight{i}" for i in range(EXPERTS))]
    other.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(layer.weights, other.weights))
    whole = torch.randn(EXPERTS, 32, 64)
    other.load_state_dict({"weight": whole})
    assert torch.equal(torch.stack(other.weights), whole)
    with pytest.raises(ValueError, match=r"expected the values of 4 experts, \(4, 32, 64\), got"):
        other.load_state_dict({"weight": whole[1:]})
    with pytest.warns(UserWarning, match="_extra_state is that of Transformer Engine"):
        other.load_state_dict({"weight": whole, "_extra_state": torch.ones(3, dtype=torch.uint8)})


def check_one(rank):
    check_products(rank)
    check_codes(rank)
    check_memory(rank)
    check_states(rank)


def test_grouped_layer():
    run_world(1, check_one)


# ---- mixtures ------------------------------------------------------------------------------------


def config_of(**changes):
    return models.config(**(models.EXPERTS | {"moe_grouped_gemm": True} | changes))


def build(of, names):
    """Returns a GPTModel whose values are those of each parameter's name among all ranks."""
    from minifloat.nn.registry import named_modules

    model = models.build(of, names)
    ranks = of.expert_model_parallel_size
    for fqn, module in named_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{fqn}.{name}"
            if ".mlp.experts.linear_fc" in key:
                i = int(name.removeprefix("weight"))
                i += module.ep_group.rank() * (EXPERTS // ranks)
                key = f"{fqn.replace('experts.', f'experts.local_experts.{i}.')}.weight"
            seed = sum(ord(c) * (i + 1) for i, c in enumerate(key)) % 9973
            draw = torch.Generator().manual_seed(seed)
            values = torch.randn(parameter.shape, generator=draw) * 0.05
            if parameter.dim() == 1:
                values += 1
            parameter.data.copy_(values)
    return model


def losses_of(model, steps=1):
    found = []
    for step in range(steps):
        loss = models.loss(model, step)
        loss.backward()
        found.append(loss.detach())
    return torch.stack(found)


def dense_gradients(model):
    return {n: p.grad for n, p in model.named_parameters() if ".experts." not in n}


def check_ranks(rank):
    """Checks that experts divided over two ranks give each rank the results of whole ones."""
    shared = {"moe_shared_expert_intermediate_size": WIDTH}
    for recipe, changes in (
        ("mxfp8", {}),
        ("fp8_rowwise", {"moe_token_dispatcher_type": "allgather"}),
        ("fp8_blockwise", {"moe_grouped_gemm": False}),
        ("mxfp8", shared),
        ("mxfp8", shared | {"moe_shared_expert_overlap": True}),
        ("mxfp8", {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
    ):
        results = []
        for ep in (1, 2):
            models.begin(ep=ep)
            model = build(config_of(**changes), "te")
            report = mf.quantize_(model, recipe)
            assert not any("router" in name for name, _ in report.converted)
            results.append((losses_of(model), dense_gradients(model)))
        (loss, grads), (divided, own) = results
        assert torch.equal(loss, divided), (recipe, changes)
        for name, grad in grads.items():
            assert torch.equal(grad, own[name]), (recipe, changes, name)


def check_bits(rank):
    """Checks that ranks' experts draw bits of their own, and that delayed scaling is refused."""
    models.begin(ep=2)
    for is_grouped in (True, False):
        model = build(config_of(moe_grouped_gemm=is_grouped), "te")
        mf.quantize_(model, "nvfp4")
        products = [m for m in model.modules() if hasattr(m, "first_expert")]
        names = {m.fqn for m in model.modules() if "local_experts" in getattr(m, "fqn", "")}
        assert {p.first_expert for p in products} == ({2 * rank} if is_grouped else set())
        assert is_grouped or {n.split("local_experts.")[1][0] for n in names} == {
            str(2 * rank),
            str(2 * rank + 1),
        }
        losses_of(model)
        mf.step(model)  # compares what all ranks have
        mf.step(model, dist.group.WORLD)
        model = build(config_of(moe_grouped_gemm=is_grouped), "te")
        with pytest.raises(ValueError, match="expert_model_parallel_size"):
            mf.quantize_(model, "fp8_delayed")


def check_two(rank):
    check_ranks(rank)
    check_bits(rank)


def test_experts_of_two_ranks():
    run_world(2, check_two)


def check_tensor_parallel(rank):
    """Checks experts that two ranks cut along their width: the sums of exact terms."""
    counts, x, g = [9, 0, 16, 7], integers(1, 32, 128), integers(2, 32, 64)
    models.begin()
    results = []
    for tp in (1, 2):
        models.begin(tp=tp, expert_tensor_parallel_size=tp)
        for kind, dim in (("Column", 0), ("Row", 1)):
            of = models.config(
                params_dtype=torch.float32, bf16=False, expert_tensor_parallel_size=tp
            )
            layer = grouped_layer(kind, 128, 64, of=of)
            with torch.no_grad():
                for i, w in enumerate(layer.weights):
                    w.copy_(integers(3 + i, 64, 128).chunk(tp, dim)[rank % tp])
            mf.quantize_(nn.ModuleDict({"experts": layer}), "mxfp8")
            mine = x if dim == 0 else x.chunk(tp, 1)[rank % tp]
            mine = mine.contiguous().clone().requires_grad_()
            y, _ = layer(mine, counts)
            y.backward(g.chunk(tp, 1)[rank % tp].contiguous() if dim == 0 else g)
            dw = torch.stack([w.grad for w in layer.weights])
            results.append([y.detach(), mine.grad, dw])
    (y, dx, dw), (sums, dx_row, dw_row), *cut = results
    (own, part, own_dw), (term, own_dx, dw_term) = cut
    assert torch.equal(own, y.chunk(2, 1)[rank])
    assert torch.equal(own_dw, dw.chunk(2, 1)[rank])
    assert torch.equal(own_dx, dx_row.chunk(2, 1)[rank])
    assert torch.equal(dw_term, dw_row.chunk(2, 2)[rank])
    for mine, whole in ((part, dx), (term, sums)):
        total = mine.clone()
        dist.all_reduce(total)
        assert torch.equal(total, whole)


def test_experts_that_ranks_cut():
    run_world(2, check_tensor_parallel)


# ---- checkpoints ---------------------------------------------------------------------------------


def check_checkpoints(rank, folder):
    """Saves grouped experts of 2 ranks, and loads them in other layouts; back again."""
    models.begin(ep=2)
    saved = build(config_of(), "te")
    mf.quantize_(saved, "mxfp8")
    models.save(saved, f"{folder}/first")
    for i, (ep, is_grouped) in enumerate(((4, True), (2, False), (1, True))):
        models.begin(ep=ep)
        of, where = config_of(moe_grouped_gemm=is_grouped), (ep, is_grouped)
        model = models.build(of, "te", seed=7 + rank)
        models.load(model, f"{folder}/first")
        require_same_values(model, build(of, "te"), where)
        mf.quantize_(model, "mxfp8")
        models.save(model, f"{folder}/{i}")
        models.begin(ep=2)
        again = models.build(config_of(), "te", seed=9 + rank)
        models.load(again, f"{folder}/{i}")
        require_same_values(again, build(config_of(), "te"), where)


def require_same_values(got, want, where):
    for name, parameter in want.named_parameters():
        assert torch.equal(got.get_parameter(name), parameter), (where, name)


def test_checkpoints_of_experts():
    with tempfile.TemporaryDirectory() as folder:
        run_world(4, check_checkpoints, folder)
