"""What minifloat.megatron refuses: each error names Megatron's option."""

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.megatron_models import MLA, begin, build, config, loss
from tests.support.same_bits import require_same
from tests.support.worlds import run_world

# Options that converted layers would ignore: of a built model's config.
IGNORED = {
    "fp8": "hybrid",
    "fp4": "e2m1",
    "fp8_dot_product_attention": True,
    "fp8_multi_head_attention": True,
    "quant_recipe": object(),
    "tp_comm_overlap": True,
    "symmetric_ar_type": "one_shot",
    "delay_wgrad_compute": True,
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "cuda_graph_impl": "local",
    "use_te_activation_func": True,
    "use_transformer_engine_op_fuser": True,
    "use_kitchen": True,
}
# Options that the modules of minifloat.megatron.backend() have not.
NOT_BUILT = {
    "layernorm_zero_centered_gamma": True,
    "memory_efficient_layer_norm": True,
    "fp32_residual_connection": True,
    "normalization": "L2Norm",
    "context_parallel_size": 2,
    "qk_clip": True,
    "log_max_attention_logit": True,
}


def state_of(model):
    """Returns what an error must leave as it was."""
    classes = [type(module) for module in model.modules()]
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    return classes, hooks, [*map(id, model.parameters())]


def refused(model, match, recipe="nvfp4"):
    before = state_of(model)
    with pytest.raises(ValueError, match=match):
        mf.quantize_(model, recipe)
    assert state_of(model) == before, match


def check_ignored():
    for names in ("te", "local"):
        model = build(config(), names)
        for option, value in IGNORED.items():
            had = getattr(model.config, option, None)
            setattr(model.config, option, value)
            refused(model, rf"quantize_: nothing to convert; 9 x {option}=")
            setattr(model.config, option, had)
        mf.quantize_(model, "nvfp4")
        loss(model).backward()


def check_recomputed():
    """Megatron's own code for some modules needs Transformer Engine."""
    selective = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    refused(build(config(**selective)), "9 x recompute_modules: layernorm: Megatron's own code")
    mf.quantize_(build(config(**selective | {"recompute_modules": ["core_attn"]})), "mxfp8")


def check_not_built():
    for option, value in NOT_BUILT.items():
        of = config()
        setattr(of, option, value)
        for names in ("te", "local"):
            with pytest.raises(ValueError, match=f"^{option}: expected ") as error:
                build(of, names)
            assert "got " in str(error.value)


def skipped(model, name, match):
    """Requires that a layer stays, with a reason, beside others."""
    report = mf.quantize_(model, "mxfp8")
    (reason,) = (why for fqn, why in report.skipped if fqn == name)
    assert match in reason, reason
    assert len(report.converted) == 7


def check_layers():
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    class Other(RowParallelLinear):
        def _forward_impl(self, *args, **options):
            return super()._forward_impl(*args, **options)

    engine = type("Linear", (nn.Module,), {"__module__": "transformer_engine.pytorch.module"})
    extension = {"__module__": "megatron.core.extensions.transformer_engine"}
    of_engine = type("TELinear", (engine,), extension)
    fc2 = "decoder.layers.1.mlp.linear_fc2"

    model = build(config())
    model.get_submodule(fc2).__class__ = Other
    skipped(model, fc2, "Other computes its product itself, in _forward_impl")
    model = build(config())
    model.get_submodule(fc2).forward = model.get_submodule(fc2).forward
    skipped(model, fc2, "its forward is replaced on the instance")
    model = build(config())
    model.get_submodule(fc2).gtp_remat_size = 2
    skipped(model, fc2, "gtp_remat_size = 2")
    model = build(config())
    model.get_submodule(fc2).grad_output_buffer = []
    skipped(model, fc2, "defer_embedding_wgrad_compute")
    model = build(config())
    model.decoder.layers[1].mlp.linear_fc2 = of_engine()
    skipped(model, fc2, "a layer of Transformer Engine, which casts by itself")
    refused(nn.Sequential(of_engine()), r"1 x a layer of Transformer Engine, .*\.backend\(\)")


def check_tied():
    """The head of tied embeddings has no weight of its own: it stays, whatever `keep` says."""
    for keep in ("head", "nothing"):
        model = build(config(), share_embeddings_and_output_weights=True)
        report = mf.quantize_(model, "nvfp4", keep=keep)
        assert len(report.converted) == 8
        assert "output_layer" in dict(report.skipped)
        weight = model.embedding.word_embeddings.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = loss(model)
        before.backward()
        assert weight.grad.abs().sum() > 0
        optimizer.step()
        mf.step(model)
        assert loss(model) < before


def check_latent_attention():
    """multi_latent_attention trains, with both names alike."""
    found, values = {}, {}
    for names in ("local", "te"):
        model = build(config(**MLA), names)
        if names == "te":
            state = {}
            for key, value in found.items():  # the norm is a part of the layer behind it
                key = key.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
                state[key] = value
            model.load_state_dict(state)
        found = {k: v.clone() for k, v in model.state_dict().items() if v is not None}
        report = mf.quantize_(model, "nvfp4")
        assert len(report.converted) == 14, report
        value = loss(model)
        value.backward()
        values[names] = value.detach()
    require_same(values["te"], values["local"], "latent attention")


def check_version():
    import megatron.core
    from minifloat.megatron.versions import require_version

    known = megatron.core.__version__
    try:
        for version in ("0.15.3", "0.20.0", "1.0.0rc1"):
            megatron.core.__version__ = version
            with pytest.raises(
                ImportError, match=rf"expected megatron-core 0\.16 .* got {version}"
            ):
                require_version()
    finally:
        megatron.core.__version__ = known
    assert require_version() == tuple(map(int, known.split(".")[:2]))


def check_export():
    model = build(config())
    mf.quantize_(model, "mxfp8")
    with pytest.raises(ValueError, match=r"export: .* got GPTModel of Megatron-Core; convert it"):
        mf.export(model, "/nowhere")
    with pytest.raises(ValueError, match=r"inspect: .* got GPTModel of Megatron-Core; convert it"):
        mf.inspect(model, None)


def check(rank):
    begin()
    check_export()
    check_ignored()
    check_recomputed()
    check_not_built()
    check_layers()
    check_tied()
    check_latent_attention()
    check_version()


def test_refusals_name_the_option():
    run_world(1, check)
