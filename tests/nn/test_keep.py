"""What stays in high precision by policy, and texts that match no module."""

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.llama import ModelConfig, build_model


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(2 * dim, dim)  # a head's name, within a block

    def forward(self, x):
        return x + self.output(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks=4, head="lm_head", dim=16):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(dim, dim)])  # a shorter list
        self.layers = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.add_module(head, nn.Linear(dim, 64))


def kept(model, recipe="nvfp4", **options):
    report = mf.quantize_(model, recipe, **options)
    return dict(report.skipped)


@pytest.mark.parametrize("head", ["lm_head", "output", "head", "proj_out"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_the_head_stays_by_default(head, recipe):
    model = Model(head=head)
    assert kept(model, recipe) == {head: 'keep="head": the head'}
    assert type(model.get_submodule(head)) is nn.Linear
    assert isinstance(model.layers[0].output, mf.Linear)


class Lm(nn.Module):
    """A language model whose head has a name that is nobody's."""

    def __init__(self, rows=96, outputs=96, dim=16, is_tied=False, heads=1, table=nn.Embedding):
        super().__init__()
        self.embed, self.embed_pos = table(rows, dim), nn.Embedding(48, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.project = nn.Linear(dim, 48)  # as wide as positions are many
        self.pooler = nn.Linear(dim, dim)
        for i in range(heads):
            self.add_module(f"unembed{i or ''}", nn.Linear(dim, outputs, bias=False))
        if is_tied:
            self.unembed.weight = self.embed.weight


class TokenEmbedding(nn.Module):
    """An embedding that is no nn.Embedding."""

    def __init__(self, rows, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, dim))


class Getter(Lm):
    def get_output_embeddings(self):
        return self.unembed


class Lists(nn.Module):
    def __init__(self, is_embedded=True):
        super().__init__()
        self.embed = nn.Embedding(64, 16) if is_embedded else None
        self.layers = nn.ModuleList(Block(16) for _ in range(2))
        self.tops = nn.ModuleList(nn.Linear(16, 64) for _ in range(2))


ROWS = "with an output for each of the 96 rows of embed"


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (Lm(), {"unembed": ROWS}),
        (Lm(heads=2), {"unembed": ROWS, "unembed1": ROWS}),
        (Lm(table=TokenEmbedding), {"unembed": ROWS}),
        (Lm(rows=16, outputs=16, is_tied=True), {"unembed": "tied to embed"}),
        (
            Lm(rows=80, outputs=128),
            {"unembed": "the last layer, with 128 outputs for the 80 rows of embed"},
        ),
        (
            Getter(rows=80, outputs=90),
            {"unembed": "which the model returns as its output embeddings"},
        ),
        (Lists(), {f"tops.{i}": "with an output for each of the 64 rows of embed" for i in (0, 1)}),
    ],
)
def test_a_head_of_any_name_stays_and_is_named(model, heads):
    report = mf.quantize_(model, "mxfp8")
    assert dict(report.skipped) == {n: f'keep="head": the head, {how}' for n, how in heads.items()}
    assert list(report.heads) == list(heads)
    assert str(report).splitlines()[0].endswith(f"not; the head: {', '.join(heads)}")
    mf.restore_(model)
    mapped = mf.quantize_(model, f"*: mxfp8; {next(iter(heads))}: nvfp4")
    assert (next(iter(heads)), "nvfp4") in mapped.converted


class Pooling(nn.Module):
    """A vision backbone whose `head` pools by attention."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.ModuleDict(
            {"attention": nn.MultiheadAttention(16, 2), "up": nn.Linear(16, 64)}
        )


class Beside(nn.Module):
    """A head's name in a module that does not hold the blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.side = nn.ModuleDict(
            {"layers": nn.ModuleList([nn.Linear(16, 16)]), "proj_out": nn.Linear(16, 64)}
        )


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(16, 64),
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64)),
        nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 32), nn.Linear(32, 64)),
        nn.ModuleDict({"up": nn.Linear(16, 64), "down": nn.Linear(64, 16)}),
        Lm(rows=80, outputs=90),
        Lm(rows=60, outputs=64, dim=64),  # a square layer, whatever the rows
        Lists(is_embedded=False),
        Pooling(),
        Beside(),
    ],
)
def test_models_without_a_head_lose_no_layer(model):
    report = mf.quantize_(model, "mxfp8")
    assert [why for _, why in report.skipped if "keep" in why] == []
    assert report.heads == ()
    assert str(report).splitlines()[0].endswith("not; the head: none found")
    mf.restore_(model)
    asked = mf.quantize_(model, "mxfp8", keep="nothing")
    assert (asked.heads, "head" in str(asked).splitlines()[0]) == (None, False)


def test_a_block_by_itself_has_no_head():
    block = Block(16)
    assert kept(block) == {}
    assert isinstance(block.output, mf.Linear)


def test_a_head_of_several_layers_stays():
    model = Model()
    model.lm_head = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 64))
    assert list(kept(model)) == ["lm_head.0", "lm_head.1"]


@pytest.mark.parametrize(("blocks", "last"), [(1, 1), (4, 1), (13, 1), (14, 2), (32, 4), (62, 9)])
def test_the_policy_of_the_paper_keeps_the_last_blocks(blocks, last):
    reasons = kept(Model(blocks), keep="nvfp4_paper")
    what = f"in the last {'block' if last == 1 else f'{last} blocks'} of {blocks}"
    assert reasons.pop("lm_head") == 'keep="nvfp4_paper": the head'
    first = blocks - last
    want = [f"layers.{i}.{name}" for i in range(first, blocks) for name in ("up", "output")]
    assert list(reasons) == want
    assert set(reasons.values()) == {f'keep="nvfp4_paper": {what}'}


@pytest.mark.parametrize(
    ("lists", "last"),
    [
        ({"encoder": 4, "decoder": 4}, "decoder.3"),
        ({"encoder": 4, "decoder": 2}, "decoder.1"),  # a small decoder is the end, too
        ({"decoder": 2, "encoder": 4}, "decoder.1"),
        ({"first": 3, "second": 3}, "second.2"),
        ({"layers": 4, "codec_decoder": 2}, "layers.3"),
    ],
)
def test_the_last_blocks_are_those_at_the_end_of_the_network(lists, last):
    model = nn.ModuleDict(
        {name: nn.ModuleList(Block(16) for _ in range(n)) for name, n in lists.items()}
    )
    reasons = kept(model, keep="nvfp4_paper")
    assert list(reasons) == [f"{last}.up", f"{last}.output"]


def test_experts_of_a_kept_block_stay():
    blocks = nn.ModuleDict({str(i): mf.MoE(16, 16, experts=2, top_k=1) for i in range(2)})
    for block in blocks.values():
        mf.restore_(block)
    reasons = kept(nn.ModuleDict({"layers": blocks}), keep="nvfp4_paper")
    assert reasons["layers.1.experts.w2"] == 'keep="nvfp4_paper": in the last block of 2'
    assert "layers.0.experts.w2" not in reasons


def test_nothing_is_kept_where_asked():
    assert kept(Model(), keep="nothing") == {}


def test_a_map_that_names_the_head_decides():
    model = Model()
    assert kept(model, "*: nvfp4; lm_*: mxfp8") == {}
    assert model.lm_head.recipe.text == "mxfp8"


@pytest.mark.parametrize(
    ("model", "keep", "message"),
    [
        (Model(), "all", "keep: expected one of head, nvfp4_paper, nothing, got 'all'"),
        (Block(16), "nvfp4_paper", r'keep="nvfp4_paper": expected a model with numbered blocks'),
    ],
)
def test_refuses(model, keep, message):
    with pytest.raises(ValueError, match=message):
        mf.quantize_(model, "nvfp4", keep=keep)
    assert not any(isinstance(module, mf.Linear) for module in model.modules())


def test_the_policy_of_the_paper_is_that_of_its_map():
    found, want = (build_model(ModelConfig(32, 2, 2, 1, 64, 300), 16, 1, "cpu") for _ in range(2))
    report = mf.quantize_(found, "nvfp4", keep="nvfp4_paper", seed=1)
    written = "*: nvfp4; output: bf16; layers.1.*: bf16"
    assert mf.quantize_(want, written, seed=1).converted == report.converted
    tokens = torch.arange(2 * 16).reshape(2, 16)
    assert torch.equal(found(tokens), want(tokens))


@pytest.mark.parametrize("recipe", ["nvfp4", "*: nvfp4; layers.0.*: mxfp8"])
@pytest.mark.parametrize("keep", ["head", "nvfp4_paper", "nothing"])
def test_a_text_may_end_with_the_policy(recipe, keep):
    found, want = Model(), Model()
    report = mf.quantize_(found, f"{recipe} keep={keep}")
    assert report == mf.quantize_(want, recipe, keep=keep)
    again = mf.quantize_(Model(), f"{recipe} keep={keep}", keep=keep)
    assert again == report


@pytest.mark.parametrize(
    ("recipe", "keep", "message"),
    [
        ("nvfp4 keep=all", "head", "keep: expected one of head, nvfp4_paper, nothing, got 'all'"),
        ("nvfp4 keep=", "head", "keep: expected one of head, nvfp4_paper, nothing, got ''"),
        ("nvfp4 keep=nothing", "nvfp4_paper", "keep: expected 'nothing', as in .*, got 'nvfp4_p"),
        ("keep=nothing", "head", "expected"),
        ("nvfp4 keep=nothing then=mxfp8", "head", r"recipe: .*; call mf\.restore_ and"),
        ("nvfp4 then=mxfp8", "head", r"recipe: .*; call mf\.restore_ and"),
    ],
)
def test_refuses_texts(recipe, keep, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        mf.quantize_(model, recipe, keep=keep)
    assert not any(isinstance(module, mf.Linear) for module in model.modules())


# ---- Texts that match nothing --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"filter_fqns": ["up", "lm_haed"]},
            "filter_fqns: expected parts of names .* no match for 'lm_haed'; .* are lm_head$",
        ),
        ({"filter_fqns": ["layer.0"]}, r"no match for 'layer\.0'; .* layers\.0"),
        ({"filter_fqns": ["zzz", "lm_head"]}, "no match for 'zzz'$"),
        (
            {"recipe": "*: nvfp4; *.lm_haed: bf16; layers.9.*: mxfp8"},
            r"recipe: expected globs .* no match for '\*\.lm_haed', 'layers\.9\.\*'; .* lm_head, ",
        ),
    ],
)
def test_a_text_that_matches_nothing_is_refused(options, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        mf.quantize_(model, **({"recipe": "nvfp4"} | options))
    assert not any(isinstance(module, mf.Linear) for module in model.modules())
