"""Recipe lists of `minifloat train`: how a command line becomes runs, and the policy."""

from dataclasses import asdict

import pytest
from minifloat.train.checks import TrainError
from minifloat.train.config import RunSpec, differences, parse_model, parse_recipes

FP8 = "fprop=e4m3/tensor*e4m3/tensor,fast dgrad=e5m2/tensor*e4m3/tensor wgrad=bf16*bf16"


def parse(*lists: str, recipe: tuple[str, ...] = (), seed: int = 1):
    return parse_recipes(lists, recipe, seed)


def test_an_entry_names_what_stays_in_high_precision():
    runs = parse("bf16,nvfp4,nvfp4 keep=nvfp4_paper,all=mxfp8 keep=nothing@3")
    assert [(run.name, run.recipe, run.keep) for run in runs] == [
        ("bf16", "bf16", "head"),
        ("nvfp4", "nvfp4", "head"),
        ("nvfp4 (keep nvfp4_paper)", "nvfp4", "nvfp4_paper"),
        ("all (seed 3)", "mxfp8", "nothing"),
    ]
    assert [run.converts for run in runs] == [False, True, True, True]


def test_an_unknown_policy_is_refused():
    with pytest.raises(TrainError, match="after keep=: expected one of head, nvfp4_paper, nothing"):
        parse("nvfp4 keep=last")


def test_an_entry_names_the_recipe_of_the_last_steps():
    runs = parse(
        "nvfp4 then=mxfp8,nvfp4 keep=nvfp4_paper then=bf16@3,bf16 then=bf16,"
        "a=*: nvfp4; layers.0.*: mxfp8 then=*: mxfp8; output: bf16," + f"nvfp4 then={FP8}"
    )
    assert [(run.name, run.recipe, run.keep, run.then) for run in runs] == [
        ("nvfp4 then=mxfp8", "nvfp4", "head", "mxfp8"),
        ("nvfp4 (keep nvfp4_paper) then=bf16 (seed 3)", "nvfp4", "nvfp4_paper", "bf16"),
        ("bf16 then=bf16", "bf16", "head", "bf16"),
        ("a", "*: nvfp4; layers.0.*: mxfp8", "head", "*: mxfp8; output: bf16"),
        (f"nvfp4 then={FP8}", "nvfp4", "head", FP8),
    ]
    assert runs[1].folder == "nvfp4_keep_nvfp4_paper_then_bf16_seed_3"
    assert [run.converts for run in runs] == [True, True, False, True, True]


@pytest.mark.parametrize("then", ["", "mxfp8 keep=nothing", "mxfp8 then=bf16", "keep=nothing"])
def test_a_last_recipe_that_is_none_is_refused(then):
    with pytest.raises(TrainError, match=rf"after then=: expected a recipe \(.*\), got '{then}'"):
        parse(f"nvfp4 then={then}")


def test_a_saved_run_has_every_field():
    saved = asdict(RunSpec("a", "*: nvfp4", 1, "nothing", "mxfp8"))
    assert asdict(RunSpec.from_json("job", saved)) == saved
    with pytest.raises(TrainError, match="job: keep: expected one of head"):
        RunSpec.from_json("job", saved | {"keep": "all"})
    for name in saved:
        with pytest.raises(TrainError, match=f"job: expected the field '{name}'"):
            RunSpec.from_json("job", {k: v for k, v in saved.items() if k != name})


def test_the_comma_of_a_fast_product_separates_nothing():
    runs = parse(f"mxfp8,{FP8},fp8=" + FP8)
    assert [run.name for run in runs] == ["mxfp8", FP8, "fp8"]
    assert runs[2].recipe == FP8


def test_a_recipe_whose_name_starts_with_fast_is_an_entry():
    assert [run.name for run in parse("bf16,fastest=nvfp4")] == ["bf16", "fastest"]


def test_a_map_is_taken_as_written():
    (run,) = parse("nvfp4_all=*: nvfp4; output: bf16")
    assert run == RunSpec("nvfp4_all", "*: nvfp4; output: bf16", 1)


def test_one_entry_whole():
    runs = parse("bf16", recipe=("a=*: nvfp4, odd",))
    assert runs[1].recipe == "*: nvfp4, odd"


def test_another_seed_is_another_run():
    runs = parse("bf16,bf16@2,nvfp4@1")
    assert [(run.name, run.seed) for run in runs] == [
        ("bf16", 1),
        ("bf16 (seed 2)", 2),
        ("nvfp4", 1),
    ]
    assert runs[1].folder == "bf16_seed_2"


@pytest.mark.parametrize("text", ["", "bf16,,nvfp4", "a="])
def test_an_empty_entry_is_refused(text):
    with pytest.raises(TrainError, match="expected"):
        parse(text)


def test_the_same_name_twice_is_refused():
    with pytest.raises(TrainError, match="'nvfp4' twice"):
        parse("nvfp4,bf16,nvfp4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("256,4,4,2", "5 integers"),
        ("256,4,4,2,x", "5 integers"),
        ("250,4,4,2,64", "heads times an even width"),
        ("256,4,4,3,64", "multiple of kv_heads"),
        ("256,0,4,2,64", "layers: expected at least 1, got 0"),
    ],
)
def test_a_model_that_cannot_be_is_refused(text, message):
    with pytest.raises(TrainError, match=message):
        parse_model(text, vocab=300)


def test_differences_name_the_field_and_both_values():
    there = {"model": {"dim": 256, "layers": 4}, "lr": 0.1}
    here = {"model": {"dim": 128, "layers": 4}, "lr": 0.1}
    assert differences(there, here) == ["model.dim: 256 there, 128 asked for"]
