"""Megatron-Core's pipelines of converted stages, against the model on one rank, to the bit."""

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.megatron_models import BATCH, TOKENS, batch, begin, build, config
from tests.support.same_bits import require_same
from tests.support.worlds import run_world

MICRO = 4


def forward_step(batches, model, *_):
    tokens, positions, labels = next(batches)
    y = model(tokens, positions, None, labels=labels)

    def loss(losses):
        mean = losses.float().mean()
        return mean, {"loss": mean.detach()}

    return y, loss


def run(chunks, step):
    """Runs the schedule of Megatron over a step's micro-batches; returns their losses."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batches = [iter([batch(10 * step + i) for i in range(MICRO)]) for _ in chunks]
    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=MICRO,
        seq_length=TOKENS,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return [each["loss"] for each in found]


def whole_names(chunk):
    """Returns the names of a stage's parameters -> those in the unsplit model."""
    first = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
    names = {}
    for name, _ in chunk.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first)
        names[name] = ".".join(parts)
    return names


def trained(chunks, model):
    """Yields the losses of each step, whose gradients the chunks have then."""
    for step in range(2):
        chunks.zero_grad()
        yield run(chunks, step)
        mf.step(model)  # the weights stay; scales of delayed scaling follow from the amaxes


def alone(recipe, names, layers, **options):
    """Returns the unsplit model's first weights, (losses, gradients) of two steps, and report."""
    begin()
    model = build(config(num_layers=layers), names)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = mf.quantize_(model, recipe, data_parallel_rank=0, **options)
    results = []
    for losses in trained(nn.ModuleList([model]), model):
        results.append((losses, {name: p.grad.clone() for name, p in model.named_parameters()}))
    return weights, results, report


RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def stages(weights, names, layers, vpp):
    """Builds this rank's stages, with the weights of the unsplit model."""
    begin(pp=2, vpp=vpp)
    # In one batch of messages an activation would be taken for a gradient, because both go from one
    # of two ranks to the other.
    apart = {"batch_p2p_comm": False, "overlap_p2p_comm": True} if vpp else {}
    apart |= RECOMPUTE if names == "local" else {}  # the whole model saves all
    of = config(num_layers=layers, virtual_pipeline_model_parallel_size=vpp, **apart)
    chunks = nn.ModuleList(build(of, names, vp_stage=i) for i in (range(vpp) if vpp else [None]))
    for chunk in chunks:
        known = whole_names(chunk)
        chunk.load_state_dict({n: weights[k] for n, k in known.items()}, strict=False)
    return chunks


def check_same(rank, what, model, chunks, want):
    for losses, (wanted, gradients) in zip(trained(chunks, model), want):
        if rank == 1:
            require_same(torch.stack(losses), torch.stack(wanted), what)
        for chunk in chunks:
            known = whole_names(chunk)
            for name, parameter in chunk.named_parameters():
                require_same(parameter.grad, gradients[known[name]], f"{what}: {known[name]}")


MAP = "*: mxfp8; decoder.layers.1.*: nvfp4; *.layers.2.mlp.*: bf16"
CASES = [  # recipe, names, layers, virtual stages, whether they are converted as one, keep
    ("nvfp4", "te", 4, None, False, "nvfp4_paper"),
    ("nvfp4", "local", 4, 2, False, "head"),
    ("nvfp4", "te", 4, 2, True, "nvfp4_paper"),
    ("fp8_delayed", "local", 4, 2, True, "head"),
    (MAP, "te", 4, None, False, "head"),
    ("mxfp8", "te", 2, None, False, "nvfp4_paper"),  # rank 1 converts nothing
]


def check_pipelines(rank):
    for recipe, names, layers, vpp, as_one, keep in CASES:
        what = f"{recipe}, {names}, {layers} layers, virtual {vpp}, keep {keep}"
        weights, want, whole = alone(recipe, names, layers, keep=keep)
        chunks = stages(weights, names, layers, vpp)
        parts = [chunks] if as_one else chunks
        rows = {r for part in parts for r in mf.quantize_(part, recipe, keep=keep).converted}
        own = {
            f"decoder.layers.{layer.layer_number - 1}."
            for chunk in chunks
            for layer in chunk.decoder.layers
        }
        assert rows == {r for r in whole.converted if r[0].startswith(tuple(own))}, what
        model = chunks if vpp else chunks[0]
        check_same(rank, what, model, chunks, want)
        if layers == 2:
            assert (len(rows), len(mf.training_state(model))) == (4 * (1 - rank), 0)
        before = {name: t.clone() for name, t in mf.training_state(model).items()}
        mf.load_training_state(model, before)
        for name, tensor in mf.training_state(model).items():
            require_same(tensor, before[name], f"{what}: {name}")
        mf.restore_(model)


def check_arguments(rank):
    """Texts may match other stages; what no stage can convert is an error on every rank."""
    from megatron.core.transformer.module import Float16Module

    weights, *_ = alone("mxfp8", "te", 2)
    texts = "decoder.layers.0.*", "decoder.layers.1.*"
    for wrap in (lambda model: model, lambda model: Float16Module(model.config, model)):
        (chunk,) = stages(weights, "te", 2, None)
        report = mf.quantize_(
            wrap(chunk), f"*: mxfp8; {'; '.join(f'{t}: nvfp4' for t in texts)}", seed=1
        )
        assert report.converted[0] == (f"decoder.layers.{rank}.self_attention.linear_proj", "nvfp4")
        assert report.notes == [(texts[1 - rank], "matches nothing in this stage of the pipeline")]
        assert chunk.decoder.layers[0].mlp.linear_fc1.rng_state.rank == 0  # that of its data
    (chunk,) = stages(weights, "te", 2, None)
    report = mf.quantize_(chunk, "mxfp8", filter_fqns=["layers.0.", "layers.1."])
    assert report.converted == []
    for of in (chunk, nn.ModuleList([chunk])):
        with pytest.raises(ValueError, match=r"nothing to convert; [45] x the recipe is bf16"):
            mf.quantize_(of, "bf16", keep="nothing")
    chunk.decoder.layers[0].mlp.linear_fc1.forward = lambda x: x
    with pytest.raises(ValueError, match="its forward is replaced on the instance"):
        mf.quantize_(chunk, "mxfp8", filter_fqns=["attention", "fc2"])


def check(rank):
    check_pipelines(rank)
    check_arguments(rank)


def test_a_pipeline_equals_its_model():
    run_world(2, check)
