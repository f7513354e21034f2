"""torch's fast paths, which read weights without calling layers, are off where layers are
converted. The ops that run show both: torch's fused op, and one product a converted layer.
"""

import copy
import io

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.collectives import Begun

TOKENS = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
PADDING = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])


def ops_of(model, *args, **kwargs):
    """Counts the fused layers and the converted layers that one evaluation runs."""
    with torch.no_grad(), Begun() as ops:
        model(*args, **kwargs)
    fused = ops.names.count("_transformer_encoder_layer_fwd")
    return fused, ops.names.count("scaled_mm")


def encoder(**arguments):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **arguments)
    return nn.TransformerEncoder(layer, 2).eval()


@pytest.mark.parametrize("norm_first", [False, True])
def test_converted_layers_run_in_evaluation(norm_first):
    model = encoder(norm_first=norm_first)
    assert ops_of(model, TOKENS) == (2, 0)
    report = mf.quantize_(model, "mxfp8")
    assert ops_of(model, TOKENS) == (0, 4)
    notes = dict(report.notes)
    assert "fused inference is off" in notes["layers.0"]
    assert "fused inference is off" in notes["layers.1"]
    assert all(f"! {name}" in str(report) for name in notes)
    mf.restore_(model)
    assert ops_of(model, TOKENS) == (2, 0)
    assert not model.layers[0].linear1._forward_pre_hooks


def test_a_padded_batch():
    """Runs nn.TransformerEncoder, which makes a nested tensor before it calls its layers."""
    model = encoder()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    assert ops_of(model, TOKENS, src_key_padding_mask=PADDING) == (2, 0)
    report = mf.quantize_(model, "mxfp8")
    assert "nested tensors are off" in dict(report.notes)[""]
    assert ops_of(model, TOKENS, src_key_padding_mask=PADDING) == (0, 4)
    mf.restore_(model)
    assert ops_of(model, TOKENS, src_key_padding_mask=PADDING) == (2, 0)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_only_what_is_converted_loses_its_fast_path():
    model = encoder()
    report = mf.quantize_(model, "layers.1.linear2: mxfp8")
    assert [name for name, _ in report.notes] == ["", "layers.1"]
    assert ops_of(model, TOKENS) == (1, 1)
    assert ops_of(model, TOKENS, src_key_padding_mask=PADDING) == (1, 1)
    second = mf.quantize_(model, "mxfp8")
    assert [name for name, _ in second.notes] == ["layers.0", "layers.1"]


def test_parts_are_restored_one_by_one():
    model = encoder()
    mf.quantize_(model, "mxfp8")
    mf.restore_(model.layers[0])
    assert ops_of(model, TOKENS) == (1, 2)
    assert ops_of(model, TOKENS, src_key_padding_mask=PADDING) == (1, 2)
    mf.restore_(model.layers[1].linear1)
    assert ops_of(model, TOKENS) == (1, 1)
    mf.restore_(model)
    assert ops_of(model, TOKENS, src_key_padding_mask=PADDING) == (2, 0)


def test_a_disabled_path_stays_disabled():
    model = encoder()
    model.use_nested_tensor = False
    report = mf.quantize_(model, "mxfp8")
    assert "" not in dict(report.notes)
    mf.restore_(model)
    assert model.use_nested_tensor is False


def parts(model):
    mf.quantize_(model.layers[0].linear1, "mxfp8")
    return model, (1, 1)


def placed(model):
    model.layers[0].linear1 = mf.Linear(32, 64, recipe="mxfp8").eval()
    return model, (1, 1)


def built(model):
    with mf.nn.quantized_model_init("mxfp8_2d"):
        return encoder(), (0, 4)


def copied(model):
    mf.quantize_(model, "mxfp8")
    return copy.deepcopy(model), (0, 4)


def loaded(model):
    mf.quantize_(model, "mxfp8")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False), (0, 4)


@pytest.mark.parametrize("make", [parts, placed, built, copied, loaded])
def test_however_a_layer_was_converted(make):
    model, ops = make(encoder())
    assert ops_of(model, TOKENS) == ops


@pytest.mark.parametrize("make", [parts, placed, built])
def test_a_nested_tensor_is_refused_where_the_encoder_was_not_seen(make):
    model, _ = make(encoder())
    with torch.no_grad(), pytest.raises(ValueError, match="got a nested tensor"):
        model(TOKENS, src_key_padding_mask=PADDING)


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and counts as ops_of does."""

    def __init__(self):
        self.targets = []

    def __call__(self, graph, inputs):
        self.targets += [str(node.target) for node in graph.graph.nodes]
        return graph.forward

    def take(self):
        targets, self.targets = self.targets, []
        fused = sum("_transformer_encoder_layer_fwd" in target for target in targets)
        return fused, targets.count("minifloat.linear") + targets.count("minifloat.linear.default")


@torch.no_grad()
def test_compiled_before_and_after():
    model, backend = encoder(), Graphs()
    compiled = torch.compile(model, backend=backend)
    compiled(TOKENS)
    assert backend.take() == (2, 0)
    mf.quantize_(model, "mxfp8")
    compiled(TOKENS)
    assert backend.take() == (0, 4)
    compiled(TOKENS, src_key_padding_mask=PADDING)
    assert backend.take() == (0, 4)
    mf.restore_(model)
    torch.compiler.reset()
    compiled(TOKENS)
    assert backend.take() == (2, 0)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return self.up(self.attention(x, x, x, need_weights=False)[0])


def test_attention_reads_its_projections_without_calling_them():
    model = Attention().eval()
    report = mf.quantize_(model, "mxfp8")
    reason = dict(report.skipped)["attention.out_proj"]
    assert "NonDynamicallyQuantizableLinear" in reason
    assert "in_proj_weight" in reason
    assert ops_of(model, TOKENS) == (0, 1)


def test_a_plain_out_proj_of_attention_is_left_out():
    model = Attention()
    model.attention.out_proj = nn.Linear(32, 32)
    report = mf.quantize_(model, "mxfp8")
    assert "without calling a layer" in dict(report.skipped)["attention.out_proj"]

    class Mine(nn.MultiheadAttention):
        def forward(self, query, *args, **kwargs):
            return self.out_proj(query), None

    model.attention = Mine(32, 4)
    model.attention.out_proj = nn.Linear(32, 32)
    report = mf.quantize_(model, "mxfp8")
    assert report.converted == [("attention.out_proj", "mxfp8")]
