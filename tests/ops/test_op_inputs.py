"""Inputs that ops and public functions refuse, each with a clear error. They once ended a process,
were ignored, or were truncated. test_fuzz_ops.py searches for others."""

import pickle

import minifloat as mf
import pytest
import torch
from minifloat.spec import Spec
from minifloat.tensor.quantized import Quantized
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

ops = torch.ops.minifloat


def refused(message, error=ValueError):
    return pytest.raises(error, match=message)


# ---- origins -------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [(), (16,), (16, 32, 5)])
def test_an_origin_has_two_numbers(origin):
    with refused("origin as"):
        mf.tensor.quantize(torch.ones(2, 2), "mxfp8", origin=origin)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(
    "origin", [(2**32, 0), (2**32 - 1, 0), (0, 2**36), (0, 2**36 - 16), (2**63 - 1, 0), (-1, 0)]
)
def test_origins_where_random_bits_repeat_are_refused(origin, columnwise):
    """Refuses row 2^32, which had row 0's bits, and column 2^36, which had column 0's."""
    x = torch.randn(2, 32)
    if columnwise:
        x, origin = x.t().contiguous(), origin[::-1]
    with refused("origin|rows up to"):
        mf.tensor.quantize(x, "mxfp8+sr", origin=origin, columnwise=columnwise)


def test_the_last_origins_are_taken():
    x = torch.randn(2, 32)
    mf.tensor.quantize(x, "mxfp8+sr", origin=(2**32 - 2, 2**36 - 32))
    batched = torch.randn(3, 2, 32)
    mf.tensor.quantize(batched, "mxfp8+sr", origin=(2**32 - 6, 0))
    with refused("rows up to"):  # the counter's rows go on from matrix to matrix
        mf.tensor.quantize(batched, "mxfp8+sr", origin=(2**32 - 5, 0))


# ---- lists of layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed", "nvfp4"])
def test_a_group_has_a_state_for_each_layer_or_none(recipe):
    x, weights = torch.ones(4, 32), [torch.ones(8, 32)] * 2
    rng, history = [torch.tensor([1, 2, 3])] * 2, [torch.zeros(6, 4)] * 2
    mf.functional.linear_group(x, weights, recipe=recipe, rng=rng, amax_history=history)
    for short in (1, 3):
        with refused("amax_history of 2 layers"):
            mf.functional.linear_group(
                x, weights, recipe=recipe, rng=rng, amax_history=history[:1] * short
            )
        with refused("rng of 2 layers"):
            mf.functional.linear_group(
                x, weights, recipe=recipe, rng=rng[:1] * short, amax_history=history
            )


def test_operands_have_the_rows_of_what_they_stand_for():
    x, w = torch.randn(4, 32), torch.randn(8, 32)
    given = ops.layer_operands(x, "mxfp8", "x")
    ops.linear(x, w, None, "mxfp8", x_operands=given)
    with refused("x_operands of 5 rows"):
        ops.linear(torch.randn(5, 32), w, None, "mxfp8", x_operands=given)
    with refused("amax_history as float32"):
        ops.layer_operands(x, "fp8_delayed", "x", amax_history=torch.zeros(1, 2))


def test_a_forward_that_fails_leaves_the_history():
    """Checks that a refused weight leaves the amax of x unwritten."""
    history = torch.zeros(6, 4)
    weight = mf.QuantizedTensor.from_tensor(torch.randn(8, 32), "mxfp8")
    with refused("asked for rowwise"):
        mf.linear(torch.randn(4, 32), weight, None, "fp8_delayed", amax_history=history)
    assert history.eq(0).all()


# ---- dtypes --------------------------------------------------------------------------------------


OTHERS = [torch.complex64, torch.bool, torch.int32, torch.float16, torch.float64, torch.int8]


@pytest.mark.parametrize("dtype", OTHERS)
def test_values_are_float32_or_bfloat16(dtype):
    x, other = torch.ones(8, 32), torch.ones(8, 32).to(dtype)
    with refused("float32 or bfloat16"):
        mf.tensor.scaled_mm(other, x)
    with refused("float32 or bfloat16"):
        mf.tensor.scaled_mm(mf.tensor.quantize(x, "mxfp8"), other)
    for recipe in ("mxfp8", "bf16"):
        with refused("weight in float32 or bfloat16"):
            mf.linear(x, other, None, recipe)
        with refused("bias in float32 or bfloat16"):
            mf.linear(x, x, other[:, 0], recipe)


@pytest.mark.parametrize("name", ["seed", "stream"])
@pytest.mark.parametrize("value", [1.9, "1", None, 2**63])
def test_a_seed_and_a_stream_are_64_bit_integers(name, value):
    for cast, spec in ((mf.tensor.quantize, "mxfp8+sr"), (mf.tensor.amax, "nvfp4+eden")):
        with refused(f"{cast.__name__}: {name}: expected an int", (TypeError, ValueError)):
            cast(torch.ones(2, 32), spec, **{name: value})


# ---- outputs of casts ----------------------------------------------------------------------------


SHORT = {
    "short": lambda amax: amax[:1],
    "expanded": lambda amax: amax[:1].expand(amax.shape),
    "strided": lambda amax: torch.zeros(2 * len(amax))[::2],
    "of float64": lambda amax: amax.double(),
}


@pytest.mark.parametrize("change", SHORT)
def test_casts_refuse_amaxes_of_another_layout(change):
    """Refuses amaxes that the cast wrote past their end."""
    native, master = torch.classes.minifloat, torch.randn(16, 32)
    q = mf.tensor.quantize(master, "e4m3/row")
    amax = SHORT[change](q.amax)
    before = amax.clone()
    casts = [native.ShardCast("e4m3/row", False, 16, 32, False)]
    lists = [0], ["w"], [q.codes], [q.scale], [amax]
    with refused("16 contiguous float32 amaxes"):
        native.MasterCasts(casts, *lists).check([master.flatten()], [0], [])
    assert torch.equal(before, amax)


@pytest.mark.parametrize("change", SHORT)
def test_a_weight_is_made_of_whole_parts(change):
    """Checks a weight's parts, also under torch.load: kernels do not check their memory again."""
    q = mf.tensor.quantize(torch.randn(16, 32), "e4m3/row")
    bad = Quantized(q.codes, q.scale, SHORT[change](q.amax), q.spec, q.shape)
    with refused("rowwise: expected amax of e4m3/row"):
        mf.QuantizedTensor(bad, None)
    weight = mf.QuantizedTensor(q, None)
    rebuild, parts = weight.__reduce_ex__(2)
    with refused("rowwise: expected amax of e4m3/row"):
        rebuild(bad, *parts[1:])
    assert torch.equal(pickle.loads(pickle.dumps(weight)).rowwise.amax, q.amax)


@pytest.mark.parametrize("spec", ["e4m3/tensor", "e4m3/row", "e4m3/1x128", "mxfp4", "nvfp4/16x16"])
@pytest.mark.parametrize("name", ["codes", "scale", "amax"])
def test_freed_memory_is_refused(spec, name):
    q = mf.tensor.quantize(torch.randn(16, 32), spec)
    if getattr(q, name).numel() == 0:
        return
    getattr(q, name).untyped_storage().resize_(0)
    with refused("memory is freed"):
        mf.tensor.dequantize(q)
    with refused("memory is freed"):
        mf.tensor.scaled_mm(q, mf.tensor.quantize(torch.randn(16, 32), spec))
    with refused("memory is freed"):
        mf.QuantizedTensor(q, None)


def test_unread_tensors_are_in_memory():
    """Refuses tensors outside their memory that the call did not come to read."""
    offs, b = torch.tensor([4], dtype=torch.int32), torch.randn(1, 64, 16)
    a = torch.randn(4, 64)
    a.untyped_storage().resize_(8)
    with refused("expected A in memory"):
        given = torch.randn(4, 16), a, b, offs, "mxfp8", [False, False, False]
        ops.scaled_grouped_mm_backward(*given)
    codes, weight = torch.classes.minifloat.WeightCodes(True), torch.randn(16, 64)
    with refused("expected x in memory"):
        codes.operands(weight, weight, a, "mxfp8", False, True, False, None, None, None)


def test_what_is_written_is_no_view_of_signs():
    """Refuses views that negate. torch's fallback read results that these ops do not return."""
    negated, refusal = torch._neg_view, refused("got a view that negates")
    messages = ops.quantize_messages(torch.ones(1, 128), "e4m3/1x128")
    with refusal:
        ops.sum_messages(messages, "e4m3/1x128", negated(torch.empty(128)))
    x, delayed = torch.randn(4, 32), "e4m3/tensor+delayed"
    history = torch.ones(6, 3)
    with refusal:
        ops.quantize_delayed(x, delayed, "", negated(history), 0, 0)
    with refusal:
        ops.advance_random_state(negated(torch.zeros(2, dtype=torch.int64)))
    with refusal:
        ops.activation_gradients_(negated(torch.ones(4, 32)), x, None, "silu", "")
    parts = ops.quantize(x, "mxfp8", "")[:3]
    with refusal:
        product = *parts, *parts, "mxfp8 * mxfp8"
        ops.add_scaled_mm(negated(torch.zeros(4, 4)), *product, k=32)
    got = ops.quantize_delayed(negated(x), delayed, "", history.clone(), 0, 0)
    assert torch.equal(got[0], ops.quantize_delayed(-x, delayed, "", history, 0, 0)[0])


def test_tensors_of_two_devices_are_refused():
    """Refuses a meta tensor among others, which gave results of unwritten memory."""
    q = mf.tensor.quantize(torch.randn(16, 32), "nvfp4")
    with refused("scale on cpu, got meta"):
        ops.dequantize(q.codes, q.scale.to("meta"), q.amax, q.spec, 32)
    with refused("rng on cpu, got meta"):
        rng = torch.zeros(2, dtype=torch.int64, device="meta")
        ops.quantize(torch.ones(2, 32), "mxfp8", "", rng=rng)


def test_an_empty_meta_tensor_among_real_ones_is_refused():
    """Refuses an absent amax on Meta, with which ops returned memory that nothing wrote."""
    q, on_meta = mf.tensor.quantize(torch.randn(8, 32), "e4m3/row"), torch.empty(0, device="meta")
    absent, operand = (q.codes, q.scale, on_meta), (q.codes, q.scale, torch.empty(0))
    product = "e4m3/row*e4m3/row"
    with refused("amax as a dense tensor on the CPU or CUDA, got Strided on meta"):
        ops.dequantize(*absent, q.spec, 32)
    with refused("amax of a as a dense tensor on the CPU or CUDA, got Strided on meta"):
        ops.scaled_mm(*absent, *operand, product, k=32)
    with refused("amax of b as a dense tensor on the CPU or CUDA, got Strided on meta"):
        ops.add_scaled_mm(torch.zeros(8, 8), *operand, *absent, product, k=32)
    mxfp4 = mf.tensor.quantize(torch.randn(8, 32), "mxfp4")
    with refused("amax as a dense tensor on the CPU or CUDA, got Strided on meta"):
        ops.fp4_as_fp8(mxfp4.codes, mxfp4.scale, on_meta, "mxfp4", 32)


# ---- fragments -----------------------------------------------------------------------------------


def test_layouts_are_checked():
    with refused("cuts that rise"):
        ops.fragment_layout(["mxfp4"], [0], [0, 9, 5], 2)
    with refused("without columns"):
        ops.fragment_layout(["mxfp4"], [0], [0, 5, 9], 2)
    for ranks in (0, -1, 2**40):
        with refused("ranks"):
            ops.even_cuts(4, 4, ranks)
    with refused("2\\^48"):
        ops.even_cuts(2**40, 2**40, 2)


def test_fragments_lie_within_shard_codes_and_flat_codes():
    """Refuses fragments that were copied from foreign memory."""
    layout = ops.fragment_layout(["mxfp8"], [16], ops.even_cuts(2, 16, 2), 2)
    gathered, wire = torch.ones(2 * layout[-1], dtype=torch.uint8), torch.zeros(2, 16).byte()
    ops.merge_fragments(gathered, [wire], layout, 2)
    assert wire.eq(1).all()
    wire.zero_()
    for place, number in ((0, 2**40), (0, -16), (0, 16), (2, 2**40), (1, -(2**40)), (4, 64)):
        bad = [number if i == place else n for i, n in enumerate(layout)]
        with refused("expected (fragments|bytes) within"):
            ops.merge_fragments(gathered, [wire], bad, 2)
    assert wire.eq(0).all()


# ---- texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parse", [mf.Recipe, mf.RecipeMap])
def test_a_lone_surrogate_is_a_value_error(parse):
    with refused("lone surrogate at position 3"):
        parse("abc\ud800")
    with refused("lone surrogate"):
        mf.tensor.quantize(torch.ones(2, 32), "\ud800")
    with refused("lone surrogate"):
        mf.linear(torch.ones(2, 32), torch.ones(2, 32), None, "\ud800")


def test_control_characters_do_not_cut_a_message():
    with refused(r"'a\\x00b\\x0ac' is not a recipe; expected bf16, "):
        mf.Recipe("a\0b\nc")
    with refused(r"got 'm\\x00'"):
        mf.tensor.swizzle_scales(torch.zeros(1, 1).byte(), groups="m\0")


def test_a_question_mark_matches_one_character():
    recipes = mf.RecipeMap("h?llo: mxfp8; *.ü?: mxfp4; ??: nvfp4")
    for name, recipe in (
        ("hüllo", "mxfp8"),
        ("hello", "mxfp8"),
        ("a.ü😀", "mxfp4"),
        ("ü😀", "nvfp4"),
    ):
        assert str(recipes.find(name)) == recipe, name
    for name in ("hllo", "hüüllo", "ü", "a.ü"):
        assert recipes.find(name) is None, name
    assert str(mf.RecipeMap("*ü?ü: mxfp8").find("üüüü")) == "mxfp8"


def test_positions_count_characters():
    with refused("position 6: 'x' is not"):
        mf.RecipeMap("üüüü: x")


# ---- operations counted --------------------------------------------------------------------------


def flops(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", [name for name in mf.presets() if name != "bf16"])
@pytest.mark.parametrize("shape", [(48, 64, 80), (5, 7, 33)])
def test_layers_count_the_operations_of_nn_linear(recipe, shape):
    """Counts 2 M N K a product, forward and backward; blocks and transforms add none."""
    m, n, k = shape
    x = torch.randn(m, k, requires_grad=True)
    reference = nn.Sequential(nn.Linear(k, n))
    model = nn.Sequential(nn.Linear(k, n))
    mf.quantize_(model, recipe)
    assert flops(lambda: model(x.detach())) == flops(lambda: reference(x.detach()))
    assert flops(lambda: model(x)) == 2 * m * n * k
    both = flops(lambda: model(x).sum().backward())
    assert both == flops(lambda: reference(x).sum().backward()) == 3 * 2 * m * n * k


def test_products_and_groups_are_counted():
    a, b = torch.randn(8, 40), torch.randn(16, 40)
    assert flops(lambda: mf.tensor.scaled_mm(mf.tensor.quantize(a, "mxfp4"), b)) == 2 * 8 * 16 * 40
    with torch.inference_mode():
        assert flops(lambda: mf.functional.linear_group(a, [b, b])) == 2 * 2 * 8 * 16 * 40


def test_sizes_are_those_of_memory():
    with refused("2\\^48"):
        Spec.parse("mxfp8").sizes(2**62, 1)
