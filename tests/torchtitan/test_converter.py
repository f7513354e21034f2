"""minifloat.torchtitan on torchtitan 0.2: what is converted, what is refused, and its results.

torchtitan is changed for the CPU, so every test runs in a process of its own.
"""

import importlib.metadata
import inspect
import re
from pathlib import Path

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional as F

from tests.support.titan_job import config_of, prepare
from tests.support.worlds import run_world

MODELS = {"llama3": 6 * 7, "deepseek_v3": 6 * 4 + 3 + 5 * (3 + 3)}  # converted in debugmodel


def in_torchtitan(rank, check, args):
    prepare("cpu")
    check(*args)


def run(check, *args):
    """Runs check(*args) in a process that imports torchtitan for the CPU."""
    run_world(1, in_torchtitan, check, args)


def converter_of(*options):
    """Builds the converter as torchtitan's trainer does."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.protocols.model_converter import build_model_converters

    dims = ParallelDims(1, 1, 1, 1, 1, 1, 1, dist.get_world_size())
    return build_model_converters(config_of("--model.converters=minifloat", *options), dims)


def built(name, *options):
    """Returns torchtitan's debug model on meta, converted, and then with weights on the CPU."""
    from torchtitan.protocols.train_spec import get_train_spec

    spec, config = get_train_spec(name), config_of(*options)
    arguments = spec.model_args["debugmodel"]
    arguments.update_from_config(config)
    with torch.device("meta"):
        model = spec.model_cls(arguments)
    converter = converter_of(*options)
    converter.convert(model)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model, converter


def states_of(model):
    kinds = (mf.nn.linear.Linear, mf.nn.grouped_product.GroupedProduct)
    return [m for m in model.modules() if isinstance(m, kinds)]


# ---- The page ------------------------------------------------------------------------------------
def check_flags(flags):
    config = config_of(*flags)
    assert config.model.converters == ["minifloat"]
    assert config.minifloat.recipe == "fp8_tensorwise"
    assert config.minifloat.filter_fqns == ["auto_filter_small_kn"]


def test_the_flags_of_the_page_say_what_they_should():
    page = (Path(__file__).parents[2] / "docs" / "torchtitan.md").read_text()
    flags = re.search(r"^```\n(--job\..*?)^```", page, re.DOTALL | re.MULTILINE)
    run(check_flags, flags[1].split())


def check_options():
    """Each flag reaches the argument of mf.quantize_ that has its name, or a converted layer."""
    from minifloat.torchtitan.shared import options_of

    flags = ["--minifloat.recipe=mxfp8", "--minifloat.recompute=weight", "--minifloat.fuse"]
    given = options_of(config_of(*flags).minifloat)
    assert given["recompute"] == "weight"
    assert given.keys() <= inspect.signature(mf.quantize_).parameters.keys()
    assert options_of(config_of(flags[0]).minifloat)["recompute"] is None
    model, _ = built("llama3", *flags)
    assert {layer.recompute for layer in states_of(model)} == {"weight"}
    with pytest.raises(SystemExit):
        config_of(*flags[:1], "--minifloat.recompute=weights")
    shared = ["--minifloat.recipe=nvfp4_served", "--minifloat.share_amax=servers"]
    model, _ = built("llama3", *shared)
    groups = {layer.amax_group.names for layer in states_of(model) if layer.amax_group}
    assert groups == {("wq", "wk", "wv"), ("w1", "w3")}


def test_options_are_those_of_quantize():
    run(check_options)


# ---- A model -------------------------------------------------------------------------------------
def check_model(name, recipe):
    options = [f"--model.name={name}", f"--minifloat.recipe={recipe}", "--training.seq_len=64"]
    model, converter = built(name, *options)
    assert len(states_of(model)) == MODELS[name]
    assert type(model.output) is torch.nn.Linear, "the default leaves out the head"
    tokens = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(1))
    y = model(tokens)
    F.cross_entropy(y.flatten(0, 1), tokens.flatten()).backward()
    assert y.shape == (2, 64, 2048)
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
    assert not any("minifloat" in key for key in model.state_dict())
    converter.post_optimizer_hook([model])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["fp8_rowwise", "nvfp4"])
def test_builds_and_trains_debug_models(name, recipe):
    run(check_model, name, recipe)


def check_same_as_quantize(recipe):
    """The converter's model computes the bytes of mf.quantize_ on the same model."""
    model, _ = built("llama3", f"--minifloat.recipe={recipe}", "--training.seq_len=64")
    tokens = torch.arange(128).view(2, 64)
    converted = model(tokens)
    mf.restore_(model)
    plain = model(tokens)
    mf.quantize_(model, recipe, filter_fqns=["output"])
    assert torch.equal(converted, model(tokens))
    assert not torch.equal(converted, plain)


def test_converts_as_quantize_does():
    run(check_same_as_quantize, "mxfp8")


def check_step(recipe):
    """mf.step runs after the optimizer: it rolls the histories of delayed scaling."""
    model, converter = built("deepseek_v3", f"--minifloat.recipe={recipe}", "--training.seq_len=64")
    model(torch.arange(128).view(2, 64)).sum().backward()
    layers = states_of(model)
    converter.post_optimizer_hook(model)
    for layer in layers:
        history = layer.amax_history
        assert (history[..., 1] == 0).all(), (layer.fqn, "this step's amaxes are zero again")
        assert (history[..., 0] > 0).any(), (layer.fqn, "the next step's amax")


def test_step_rolls_histories():
    run(check_step, "fp8_delayed")


def check_map_and_filters():
    model, _ = built(
        "llama3",
        "--minifloat.recipe=*: nvfp4; layers.5.*: mxfp8",
        "--minifloat.filter_fqns=output,layers.0.,wk",
    )
    found = {layer.fqn: layer.recipe.text for layer in states_of(model)}
    assert len(found) == 5 * 6
    assert found["layers.5.feed_forward.w1"] == "mxfp8"
    assert found["layers.1.attention.wq"] == "nvfp4"


def test_takes_maps_and_filters():
    run(check_map_and_filters)


def check_keep():
    for keep, blocks, has_head in (("nvfp4_paper", 5, False), ("nothing", 6, True)):
        model, _ = built("llama3", "--minifloat.recipe=nvfp4", f"--minifloat.keep={keep}")
        found = {layer.fqn for layer in states_of(model)}
        assert len(found) == 7 * blocks + has_head
        assert ("output" in found) == has_head
        assert not any(fqn.startswith(f"layers.{blocks}.") for fqn in found)


def test_takes_policies():
    run(check_keep)


def check_auto_filter():
    with pytest.raises(ValueError, match=r"nothing to convert; .*auto_filter_small_kn: K = 256"):
        built(
            "llama3",
            "--minifloat.recipe=fp8_rowwise",
            "--minifloat.filter_fqns=auto_filter_small_kn,output",
        )


def test_auto_filter_leaves_out_small_layers():
    run(check_auto_filter)


# ---- Experts -------------------------------------------------------------------------------------
def check_experts(recipe):
    """The experts' products and their gradients are those of mf.functional.scaled_grouped_mm."""
    from minifloat._native import ops
    from torchtitan.models.moe import moe

    torch.manual_seed(0)
    experts = moe.GroupedExperts(64, 96, 4, use_grouped_mm=True).bfloat16()
    with torch.no_grad():
        experts.init_weights(0.05)
    holder = torch.nn.ModuleDict({"experts": experts})
    mf.quantize_(holder, recipe)
    # As torchtitan does where layers are compiled, after the conversion.
    moe._run_experts_grouped_mm = torch.compile(moe._run_experts_grouped_mm, fullgraph=True)
    counts = torch.tensor([5, 0, 33, 10])  # and two rows of no expert
    x = torch.randn(50, 64).bfloat16()
    offs, ones = counts.cumsum(0).int(), torch.ones(50, 1)

    def composed(x, w1, w2, w3):
        def product(rows, w):
            return mf.functional.scaled_grouped_mm(rows, w.transpose(-2, -1), offs, recipe)

        h = ops.swiglu(product(x, w1), product(x, w3), ones)
        return product(h, w2)

    weights = [experts.w1, experts.w2, experts.w3]
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    copies = [w.detach().clone().requires_grad_() for w in weights]
    g = torch.randn(50, 64).bfloat16()
    got, want = experts(inputs[0], counts), composed(inputs[1], *copies)
    got.backward(g)
    want.backward(g)
    assert torch.equal(got, want)
    assert (got[48:] == 0).all()
    for a, b in zip([inputs[0], *weights], [inputs[1], *copies]):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8"])
def test_experts_multiply_as_scaled_grouped_mm(recipe):
    run(check_experts, recipe)


def check_kept_forward():
    from torchtitan.models.moe import moe

    experts = moe.GroupedExperts(64, 96, 4, use_grouped_mm=False)
    with torch.no_grad():
        experts.init_weights(0.05)
    holder = torch.nn.ModuleDict({"experts": experts})
    call = torch.randn(48, 64), torch.tensor([5, 0, 33, 10])
    want = experts(*call)
    mf.quantize_(holder, "mxfp8")
    kept = experts.forward
    experts.forward = lambda *args: kept(*args)
    assert not torch.equal(experts(*call), want)
    mf.restore_(holder)
    assert torch.equal(experts(*call), want)


def test_a_forward_that_a_wrapper_keeps_is_restored():
    run(check_kept_forward)


# ---- What is refused -----------------------------------------------------------------------------
def check_settings():
    for options, message in [
        ((), r"expected a recipe in the section \[minifloat\]"),
        (("--minifloat.recipe=nvfp5",), "nvfp5"),
    ]:
        with pytest.raises(ValueError, match=message):
            built("llama3", *options)
    from minifloat.torchtitan import Converter
    from torchtitan.config import JobConfig

    with pytest.raises(ValueError, match=r"job.custom_config_module .* to minifloat.torchtitan"):
        Converter(JobConfig(), None)


def test_refuses_a_section_without_recipe():
    run(check_settings)


def check_cut_experts():
    from minifloat.torchtitan.converter import require_whole_experts
    from torchtitan.distributed import ParallelDims

    model, _ = built("deepseek_v3", "--minifloat.recipe=mxfp8")
    names = {"layers.1.moe.experts.w1"}
    for tp, ep, etp, is_refused in [(2, 1, 1, True), (2, 2, 2, True), (2, 2, 1, False)]:
        dims = ParallelDims(1, 1, 1, tp, 1, ep, etp, tp)
        if is_refused:
            with pytest.raises(ValueError, match=f"got tp {tp}, ep {ep}, etp {etp}"):
                require_whole_experts(model, names, dims)
        else:
            require_whole_experts(model, names, dims)
        require_whole_experts(model, set(), dims)


def test_refuses_experts_that_tensor_parallelism_cuts():
    run(check_cut_experts)


def check_version(installed, message):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    importlib.metadata.version = version
    with pytest.raises(ImportError, match=message):
        import minifloat.torchtitan  # noqa: F401


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ("0.4.0", r"0\.3\.x with torch 2\.12 or later, got torchtitan 0\.4\.0 with torch 2\."),
        ("0.3.0", r"0\.3\.x with torch 2\.12 or later, got torchtitan 0\.3\.0 with torch 2\.11"),
        (None, "got none"),
    ],
)
def test_refuses_other_versions(installed, message):
    run(check_version, installed, message)


def repeat_no_product():
    from torchtitan.config.job_config import ActivationCheckpoint
    from torchtitan.distributed.activation_checkpoint import _apply_op_sac
    from torchtitan.models.llama3.infra import parallelize

    options = ["--minifloat.recipe=fp8_rowwise", "--activation_checkpoint.mode=selective"]
    backward = []

    def keep(graph, _):
        backward.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    model = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64))
    converter_of(*options).convert(model)
    settings = ActivationCheckpoint(mode="selective", selective_ac_option="op")
    saved = parallelize._op_sac_save_list
    wrapped = _apply_op_sac(model, settings, op_sac_save_list=saved)
    partition = min_cut_rematerialization_partition
    wrapped.compile(
        backend=aot_autograd(
            fw_compiler=lambda graph, _: graph.forward, bw_compiler=keep, partition_fn=partition
        ),
        fullgraph=True,
    )
    wrapped(torch.randn(32, 64, requires_grad=True)).sum().backward()
    assert "minifloat.linear_backward.default" in backward
    assert "minifloat.linear_forward.default" not in backward


def test_a_compiled_selective_checkpoint_repeats_no_product():
    run(repeat_no_product)
