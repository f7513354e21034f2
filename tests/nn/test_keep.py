"""What stays in high precision by policy, and texts that match no module."""

import minifloat as mf
import pytest
import torch
from minifloat.train.config import RunSpec, TrainConfig, parse_model, parse_recipes
from minifloat.train.job.run import prepare_model
from torch import nn


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
    report = mf.quantize_(model, recipe, verbose=False, **options)
    return dict(report.skipped)


@pytest.mark.parametrize("head", ["lm_head", "output", "head", "proj_out"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_the_head_stays_by_default(head, recipe):
    model = Model(head=head)
    assert kept(model, recipe) == {head: 'keep="head": the head'}
    assert type(model.get_submodule(head)) is nn.Linear
    assert isinstance(model.layers[0].output, mf.Linear)


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


# ---- The trainer ---------------------------------------------------------------------------------
MODEL = parse_model("32,2,2,1,64", 300)


def test_the_trainer_has_the_same_default():
    config = TrainConfig(model=MODEL)
    (run,) = parse_recipes(["nvfp4"], [], seed=1)
    model, converted, skipped = prepare_model(run, config)
    mf.restore_(model)
    report = mf.quantize_(model, "nvfp4", verbose=False)
    assert (report.converted, report.skipped) == (converted, skipped)
    assert dict(skipped) == {"output": 'keep="head": the head'}


def test_the_trainers_policy_of_the_paper_trains_the_layers_of_its_map():
    config = TrainConfig(model=MODEL)
    (run,) = parse_recipes(["nvfp4 keep=nvfp4_paper"], [], seed=1)
    written = RunSpec("nvfp4", "*: nvfp4; output: bf16; layers.1.*: bf16", 1)
    found, want = (prepare_model(r, config) for r in (run, written))
    assert found[1] == want[1]
    tokens = torch.arange(2 * 16).reshape(2, 16)
    assert torch.equal(found[0](tokens), want[0](tokens))


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
