"""Recipes and recipe maps: text forms, equality, pickling, errors that name the position."""

import copy
import pickle

import minifloat as mf
import pytest
from hypothesis import given
from hypothesis import strategies as st

OPERANDS = ["bf16", "e4m3/tensor", "e5m2/tensor", "mxfp8+floor", "nvfp4/16x16", "nvfp4+up+sr"]


@pytest.mark.parametrize("name", mf.presets())
def test_presets_parse_back(name):
    recipe = mf.Recipe(name)
    assert str(recipe) == name
    assert repr(recipe) == f"Recipe({name!r})"
    assert eval(repr(recipe), {"Recipe": mf.Recipe}) == recipe
    written_out = f"fprop={recipe.fprop} dgrad={recipe.dgrad} wgrad={recipe.wgrad}"
    assert mf.Recipe(written_out) == recipe  # the parsed form is what counts
    assert hash(mf.Recipe(written_out)) == hash(recipe)


@given(st.lists(st.sampled_from(OPERANDS), min_size=6, max_size=6))
def test_written_out_recipes_round_trip(specs):
    products = [f"{a}*{b}" for a, b in zip(specs[::2], specs[1::2])]
    recipe = mf.Recipe("fprop={} dgrad={} wgrad={}".format(*products))
    assert mf.Recipe(str(recipe)) == recipe
    assert [str(p) for p in (recipe.fprop, recipe.dgrad, recipe.wgrad)] == products
    assert recipe.is_stochastic == any("+sr" in spec for spec in specs)


def test_operands_of_forward():
    text = "fprop=mxfp4*nvfp4 dgrad=e4m3/row*fprop.w wgrad=bf16*fprop.x"
    recipe = mf.Recipe(text)
    assert str(recipe) == text
    assert (recipe.dgrad.b, recipe.wgrad.b) == ("fprop.w", "fprop.x")
    assert str(recipe.dgrad) == "e4m3/row*fprop.w"
    # of an operand that fprop reads in high precision they are that operand
    plain = mf.Recipe("fprop=bf16*mxfp4 dgrad=bf16*fprop.w wgrad=bf16*fprop.x")
    assert plain == mf.Recipe("mxfp4_weights_served")
    assert plain.wgrad == mf.recipe.Product("bf16", "bf16")


def test_products():
    recipe = mf.Recipe("fp8_tensorwise")
    assert recipe.fprop == mf.recipe.Product("e4m3/tensor", "e4m3/tensor", fast=True)
    assert not recipe.dgrad.fast
    assert mf.Recipe("fp8_delayed").is_delayed
    assert not recipe.is_delayed


def test_recipes_are_values():
    recipe = mf.Recipe("nvfp4")
    for twin in (pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe), mf.Recipe(recipe)):
        assert twin == recipe
        assert hash(twin) == hash(recipe)
    assert recipe != mf.Recipe("mxfp8")
    assert len({recipe, mf.Recipe("nvfp4"), mf.Recipe("mxfp8")}) == 2
    with pytest.raises(AttributeError):
        recipe.text = "mxfp8"


def test_recipe_map():
    recipes = mf.RecipeMap("*: nvfp4; layers.?.*: mxfp8;*.output: bf16")
    assert [glob for glob, _ in recipes.entries] == ["*", "layers.?.*", "*.output"]
    assert recipes.find("head") == mf.Recipe("nvfp4")
    assert recipes.find("layers.3.up") == mf.Recipe("mxfp8")
    assert recipes.find("layers.3.output") == mf.Recipe("bf16")  # the last match wins
    assert mf.RecipeMap("*.output: bf16").find("head") is None
    assert mf.RecipeMap("nvfp4").find("anything") == mf.Recipe("nvfp4")
    for twin in (pickle.loads(pickle.dumps(recipes)), mf.RecipeMap(str(recipes))):
        assert twin == recipes
        assert twin.entries == recipes.entries
    assert eval(repr(recipes), {"RecipeMap": mf.RecipeMap}) == recipes


@pytest.mark.parametrize(
    ("text", "position", "message"),
    [
        ("nvfp5", 0, "nvfp4"),
        ("", 0, "expected"),
        ("fprop=nvfp4*nvfp4", 17, "dgrad="),
        ("fprop=nvfp4*nvfp9 dgrad=bf16*bf16 wgrad=bf16*bf16", 12, "nvfp9"),
        ("fprop=nvfp4+rht*nvfp4 dgrad=bf16*bf16 wgrad=bf16*bf16", 16, "same transform"),
        ("fprop=nvfp4*nvfp4,fast dgrad=bf16*bf16 wgrad=bf16*bf16", 18, "fast"),
        ("fprop=nvfp4+delayed*nvfp4 dgrad=bf16*bf16 wgrad=bf16*bf16", 12, "delayed"),
        ("fprop=bf16*fprop.w dgrad=bf16*bf16 wgrad=bf16*bf16", 0, "second operand of dgrad"),
        ("fprop=mxfp4*mxfp4 dgrad=fprop.w*bf16 wgrad=bf16*bf16", 0, "second operand of dgrad"),
        ("fprop=mxfp4*mxfp4 dgrad=bf16*fprop.x wgrad=bf16*bf16", 0, "expected fprop.w in dgrad"),
        ("fprop=mxfp4*mxfp4 dgrad=bf16*bf16 wgrad=bf16*fprop.w", 0, "expected fprop.x in wgrad"),
        ("fprop=mxfp4*mxfp4 dgrad=bf16*fprop.w+sr wgrad=bf16*bf16", 37, "takes no flag"),
        (
            "fprop=nvfp4+eden*nvfp4+eden dgrad=bf16*fprop.w wgrad=bf16*bf16",
            0,
            "no '.eden' there",
        ),
    ],
)
def test_errors_name_the_position(text, position, message):
    with pytest.raises(ValueError, match=message) as raised:
        mf.Recipe(text)
    assert f"position {position}:" in str(raised.value)


@pytest.mark.parametrize("text", ["*: nvfp5", "*; nvfp4: mxfp8", ": nvfp4", "a: nvfp4; b"])
def test_map_errors(text):
    with pytest.raises(ValueError, match="expected"):
        mf.RecipeMap(text)


@pytest.mark.parametrize("bad", [None, 3, b"nvfp4"])
def test_other_types_are_refused(bad):
    with pytest.raises(TypeError, match="expected its text as str"):
        mf.Recipe(bad)
    with pytest.raises(TypeError, match="expected its text as str"):
        mf.RecipeMap(bad)
