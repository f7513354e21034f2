"""Converted layers of Megatron-Core on one rank, and the modules that its backend builds."""

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.megatron.test_parallel import RECIPES, build_layer
from tests.support import megatron_models as models
from tests.support.worlds import run_world

pytest.importorskip("megatron.core")

N, K = 128, 256


def check_layers(rank, recipes):
    """Checks that both layers have the results of mf.Linear of the same name and seed.

    A RowParallelLinear adds its bias to the sum over the ranks.
    """
    models.begin()
    draw = torch.Generator().manual_seed(0)
    w, b = torch.randn(N, K, generator=draw), torch.randn(N, generator=draw)
    x, g = torch.randn(32, 2, K, generator=draw), torch.randn(32, 2, N, generator=draw)
    for recipe in recipes:
        for dim in (0, 1):
            model = build_layer(dim, w, b)
            plain = build_layer(dim, w, b)
            alone = nn.ModuleDict({"layer": nn.Linear(K, N, bias=dim == 0)})
            alone["layer"].load_state_dict({"weight": w, "bias": b} if dim == 0 else {"weight": w})
            results = []
            for each in (model, alone):
                mf.quantize_(each, recipe, seed=5, data_parallel_rank=1)
                mine = x.clone().requires_grad_()
                y = each["layer"](mine)
                y = y[0] if isinstance(y, tuple) else y if dim == 0 else y + b
                y.backward(g)
                mf.step(each)
                results.append((y.detach(), mine.grad, each["layer"].weight.grad))
            for got, want in zip(*results):
                assert torch.equal(got, want), (recipe, dim)
            assert list(model.state_dict()) == list(plain.state_dict())
            assert f"recipe={recipe!r}" in repr(model["layer"])
            mf.restore_(model)
            assert type(model["layer"]) is type(plain["layer"])
            assert torch.equal(model["layer"](x)[0], plain["layer"](x)[0])


@pytest.mark.parametrize("half", [0, 1])
def test_layer_is_mf_linear(half):
    run_world(1, check_layers, RECIPES[half::2])


# ---- the backend's modules -----------------------------------------------------------------------


def check_norms(rank):
    """Checks a norm within a layer, its gradients, and marks for sequence parallelism."""
    from minifloat.megatron.norms import LayerNormColumnParallelLinear, Norm

    models.begin()
    x = torch.randn(32, 2, K)
    for normalization, kind in (("RMSNorm", nn.RMSNorm), ("LayerNorm", nn.LayerNorm)):
        of = models.config(normalization=normalization, params_dtype=torch.float32, bf16=False)
        options = {"init_method": nn.init.ones_, "gather_output": False, "skip_bias_add": False}
        layer = LayerNormColumnParallelLinear(
            K, N, config=of, bias=True, is_expert=False, **options
        )
        norm = Norm(of, K, eps=of.layernorm_epsilon)
        assert type(norm) is kind
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.layer_norm_weight)
        norm.load_state_dict(
            {k[11:]: v for k, v in layer.state_dict().items() if k.startswith("layer_norm_")}
        )
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        y = layer(mine)[0]
        want = F.linear(norm(theirs), layer.weight, layer.bias)
        assert torch.equal(y, want)
        y.sum().backward()
        dw = layer.layer_norm_weight.grad
        want.sum().backward()
        assert torch.equal(mine.grad, theirs.grad)
        assert torch.equal(dw, norm.weight.grad)
        model = nn.ModuleDict({"layer": layer})
        mf.quantize_(model, "mxfp8")
        assert torch.equal(layer(x)[0], mf.linear(norm(x), layer.weight, layer.bias, "mxfp8"))
        mf.restore_(model)
        assert type(layer) is LayerNormColumnParallelLinear
    models.begin()
    of = models.config(sequence_parallel=True, tensor_model_parallel_size=2)
    assert Norm(of, K).weight.sequence_parallel


def check_attention(rank):
    """Compares attention with Megatron's own, which holds the scores of all pairs of tokens."""
    from megatron.core.transformer import dot_product_attention as theirs
    from megatron.core.transformer.enums import AttnMaskType
    from minifloat.megatron.attention import DotProductAttention

    models.begin()
    of = models.config(num_query_groups=2)
    q = torch.randn(32, 2, 4, 16).bfloat16()
    k, v = torch.randn(2, 32, 2, 2, 16).bfloat16()
    masked = torch.ones(32, 32).triu(1).bool()[None, None]
    padding = torch.zeros(2, 1, 32, 32).bool()
    padding[0, ..., 20:] = True
    documents = masked.clone()
    documents[..., 16:, :16] = True
    for kind, mask, given in (
        (AttnMaskType.causal, masked, None),
        (AttnMaskType.causal, masked, masked),
        (AttnMaskType.causal, documents, documents),
        (AttnMaskType.no_mask, None, None),
        (AttnMaskType.no_mask, padding, padding),
        (AttnMaskType.padding, padding, padding),
    ):
        ours, own = (
            c(of, 3, kind, "self") for c in (DotProductAttention, theirs.DotProductAttention)
        )
        got, want = ours(q, k, v, given), own(q, k, v, mask)
        assert got.shape == want.shape
        # Both round weights of bfloat16 values that add up to 1, and the result.
        assert (got - want).abs().max() <= 4 * 2.0**-8 * v.abs().max()


def check_backend(rank):
    """Checks names of parameters, that Megatron's names are put back, and HybridModel."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    models.begin()
    before = dict(vars(specs))
    of = models.config()
    names = {kind: {n for n, _ in models.build(of, kind).named_parameters()} for kind in
             ("te", "local", "megatron")}  # fmt: skip
    assert names["local"] == names["megatron"]
    assert {n for n in names["te"] if "norm" in n} == {
        "decoder.final_layernorm.weight",
        *(f"decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight" for i in range(2)),
        *(f"decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight" for i in range(2)),
    }
    assert dict(vars(specs)) == before
    model = models.build(of, "te")
    report = mf.quantize_(model, "*: mxfp8; decoder.layers.1.mlp.*: fp8_rowwise")
    recipes = dict(report.converted)
    assert len(recipes) == 8
    assert recipes["decoder.layers.1.mlp.linear_fc2"] == "fp8_rowwise"
    assert report.heads == ("output_layer",)


def check_hybrid(rank):
    """Trains attention, an MLP and experts of a HybridModel."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from minifloat.megatron import backend

    models.begin()
    of = models.config(num_layers=4, **models.EXPERTS)
    with backend() as replaced:
        model = HybridModel(
            of,
            replaced(hybrid_stack_spec),
            models.VOCABULARY,
            models.TOKENS,
            hybrid_layer_pattern="*-*E",
            position_embedding_type="rope",
        ).bfloat16()
    report = mf.quantize_(model, "mxfp8", keep="nvfp4_paper")
    assert len(report.converted) == 6
    assert all("the last block of 4" in why for name, why in report.skipped if ".3." in name)
    models.loss(model).backward()
    assert all(p.grad is not None for p in model.parameters())


def check_modules(rank):
    check_norms(rank)
    check_attention(rank)
    check_backend(rank)


def test_modules_of_the_backend():
    run_world(1, check_modules)


def test_hybrid_model():
    pytest.importorskip("megatron.core.models.hybrid", reason="of megatron-core 0.19")
    run_world(1, check_hybrid)
