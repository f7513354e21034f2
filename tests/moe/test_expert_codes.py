"""mf.expert_parallel with dispatch="codes": the bytes that are sent, and the operands of them."""

import copy

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.moe.feed_forward import order_rows
from torch.utils._python_dispatch import TorchDispatchMode

from tests.moe.test_expert_parallel import FEW, LAYERS, RECIPES, Gathering
from tests.support.collectives import rows_sent
from tests.support.expert_ranks import (
    Product,
    Products,
    require_same_operands,
)
from tests.support.expert_world import (
    SIZES,
    D,
    E,
    K,
    built,
    draw,
    own,
    passes,
    require_same_results,
)
from tests.support.same_bits import require_same_bytes
from tests.support.specs import BLOCKS_RECIPE, OF_FORWARD_RECIPE, ROWS_RECIPE
from tests.support.worlds import run_world

UNITS = [16, 32, 64, 128]  # of groups along the contraction, by their row of the table
# With one product of w13: forward w13, w2; backward dgrad and wgrad of w2, then of w13.
FPROP, DGRAD, WGRAD_OF_W2, WGRAD_OF_W13 = 0, 2, 3, 5
RHT = "mxfp4+rht*mxfp4+rht"
WITH_TRANSFORM = f"fprop={RHT} dgrad={RHT} wgrad={RHT}"
NEAREST = ROWS_RECIPE.replace("+sr", "")
EXACT_SUMS = ["fp8_rowwise_gw_hp", "mxfp8", "fp8_blockwise"]


# ---- operands ------------------------------------------------------------------------------------


def check_codes(
    rank: int, recipes: list[str], sizes: list[int], capacity: str | None = None
) -> None:
    """The rowwise operands of x and g are those of one process, random bits included."""
    for recipe in recipes:
        for layer in LAYERS:
            whole = built(recipe, **layer)
            cut, found, alone = passes(whole, sizes, dispatch="codes", capacity=capacity)
            inputs = 1 if layer["fused_w13"] else 2
            for i in (*range(inputs), inputs + 1):  # fprop of x, dgrad of g
                product, expected = found.products[i], alone.products[i]
                require_same_operands([product], [expected], cut.experts.parallel.first_expert)
            require_codes(found.products[FPROP], whole, sizes, cut.experts.parallel.first_expert)
            # Stochastic FP4 rounds g twice for wgrad.
            require_same_results(cut, found, alone, sizes, 0.35)


def require_codes(product: Product, whole: mf.MoE, sizes: list[int], first: int) -> None:
    """Compares codes and scales of x with those of mf.tensor.quantize of all ranks' rows."""
    spec, codes = product.sides[0][0], product.codes[0]
    parsed = mf.spec.Spec.parse(spec)
    if codes.dtype != torch.uint8 or parsed.is_stochastic or parsed.is_delayed:
        return
    x = draw(1, sum(sizes)).to(whole.experts.w2.dtype)
    order = order_rows(whole.router(x)[0], E)
    rows = x[order.tokens.long()]
    q = mf.tensor.quantize(rows, spec, groups=mf.tensor.group_table(order.offs, len(rows)))
    scale = q.scale if q.scale.dtype == torch.float32 else q.scale.view(torch.uint8)
    starts = [0, *order.offs.tolist()]
    for e in range(product.experts):
        begin, end = product.starts[e], product.starts[e + 1]
        place = slice(starts[first + e], starts[first + e + 1])
        require_same_bytes(codes[begin:end], q.codes[place], f"{spec}, expert {first + e}")
        if scale.shape[0] == len(rows):
            found = product.sides[0][2][begin:end]
            require_same_bytes(found, scale[place], f"{spec}, scales of expert {first + e}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_rowwise_operands_are_those_of_one_process(ranks):
    recipes = [*(RECIPES if ranks == 2 else FEW), WITH_TRANSFORM, BLOCKS_RECIPE, ROWS_RECIPE]
    recipes += ["nvfp4_served", OF_FORWARD_RECIPE]
    run_world(ranks, check_codes, recipes, SIZES[:ranks])


def test_a_capacity_that_drops_nothing_changes_no_code():
    run_world(2, check_codes, ["nvfp4", "fp8_tensorwise"], [12, 12], "all")


def hadamard(points: int) -> torch.Tensor:
    """Returns the orthogonal matrix of the transform, by Sylvester's construction."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < points:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / points**0.5


def values_of(product: Product, codes: mf.tensor.Quantized) -> torch.Tensor:
    """Computes the bfloat16 values of rows of codes, by another way than the layer."""
    spec = mf.spec.Spec.parse(codes.spec)
    values = codes.dequantize(torch.float32)
    if spec.transform:
        signs = torch.tensor([1.0 - 2 * (55272 >> i % 16 & 1) for i in range(spec.transform)])
        blocks = values.unflatten(1, (-1, spec.transform)) @ hadamard(spec.transform)
        values = (blocks * signs).flatten(1)
    return values.bfloat16()


def check_columnwise(rank: int) -> None:
    """What wgrad reads is cast from the values of the codes that arrived, and from no other."""
    recipes = ("fp8_rowwise", "fp8_tensorwise", "mxfp8", "fp8_blockwise", WITH_TRANSFORM, NEAREST)
    for recipe in recipes:
        _, found, _ = passes(built(recipe, fused_w13=True), [20, 13], dispatch="codes")
        for source, target, side in ((FPROP, WGRAD_OF_W13, 1), (DGRAD, WGRAD_OF_W2, 0)):
            product, wanted = found.products[source], found.products[target]
            spec, _, scale, amax = product.sides[0]
            codes, rows = product.codes[0], product.row_starts[-1]
            assert codes.dtype == torch.uint8
            scale = scale.view(mf.spec.Spec.parse(spec).scale_dtype)
            q = mf.tensor.Quantized(codes, scale, amax, spec, (len(codes), D), False, product.table)
            values = values_of(product, q)
            assert values[:rows].any()
            read, *_ = wanted.sides[side]
            again = mf.tensor.quantize(values, read, columnwise=True, groups=product.table)
            unit = again.group_unit
            again_values = mf._native.ops.decode(
                again.codes,
                again.scale.view(torch.uint8) if again.scale.dtype.itemsize == 1 else again.scale,
                read,
                again.shape[1],
                groups=again.groups,
                group_unit=unit,
            )
            for e in range(product.experts):
                begin, end = wanted.starts[e], wanted.starts[e + 1]
                assert (begin, end) == tuple(
                    again.groups[1 + UNITS.index(again.group_unit)][e : e + 2]
                )
                _, operand, found_scale, _ = wanted.sides[side]
                what = f"{recipe}, product {target}, expert {e}"
                require_same_bytes(operand[:, begin:end], again_values[:, begin:end], what)
                if found_scale.shape == again.scale.shape and found_scale.dim() == 1:
                    require_same_bytes(found_scale[e], again.scale[e], what)


def test_columnwise_operands_are_cast_from_the_codes_received():
    run_world(2, check_columnwise)


def check_exact_sums(rank: int) -> None:
    """y, dx and dW are equal to the bit where codes and sums are exact."""
    for dispatch in ("compute_dtype", "codes"):
        for recipe in EXACT_SUMS:
            whole = built(recipe, fused_w13=True)
            total = 17
            with torch.no_grad():
                # Gates of 32 and more, where silu(gate) is gate, and ups of small integers.
                w13, w2 = whole.experts.w13, whole.experts.w2
                w13.zero_()
                w2.zero_()
                half = w13.shape[1] // 2
                w13[:, :half, 0] = 8.0
                for i in range(half):
                    w13[:, half + i, 1 + i % (D - 1)] = 1.0
                    w2[:, i % D, i] = 2.0
            cut = mf.expert_parallel(copy.deepcopy(whole), dist.group.WORLD, dispatch=dispatch)
            x = (draw(5, total) / 4).round()
            x[:, 0] = 4.0
            g = (draw(6, total) / 4).round()
            indices = torch.stack([torch.arange(total) % E, (torch.arange(total) + 3) % E], 1)
            weights = torch.tensor([0.5, 2.0]).expand(total, 2).clone()
            results = []
            for moe, rows in ((whole, slice(0, total)), (cut, slice(10 * rank, 10 + 7 * rank))):
                leaf = x[rows].clone().requires_grad_()
                scale = weights[rows].clone().requires_grad_()
                y = moe.experts(leaf, indices[rows], scale)
                y.backward(g[rows])
                results.append((y.detach(), leaf.grad, scale.grad))
            rows, link = slice(10 * rank, 10 + 7 * rank), cut.experts.parallel
            for name, a, b in zip(("y", "dx", "d_weights"), *results):
                assert torch.equal(a[rows], b), (dispatch, recipe, name)
                assert b.any(), name
            for a, b in zip(whole.experts.parameters(), cut.experts.parameters()):
                own_part = a.grad[link.first_expert : link.first_expert + link.local]
                assert torch.equal(own_part, b.grad), (dispatch, recipe)


def test_exact_sums_are_equal_to_the_bit():
    run_world(2, check_exact_sums)


def check_steps(rank: int, recipe: str) -> None:
    """Histories of delayed scaling have the amaxes of all ranks' values, and codes repeat."""
    whole = built(recipe, fused_w13=True)
    cut = mf.expert_parallel(copy.deepcopy(whole), dist.group.WORLD, dispatch="codes")
    sizes = [11, 8]
    link = cut.experts.parallel
    alone = dist.new_group([rank], use_local_synchronization=True)
    for step in range(3):
        x = draw(step, sum(sizes)) * (step + 1)
        y = torch.utils.checkpoint.checkpoint(cut, own(x, sizes, rank), use_reentrant=False)
        expected = whole(x)
        g = draw(9, sum(sizes))
        y.backward(own(g, sizes, rank))
        expected.backward(g)
        for name, places in (("w13", (0,)), ("w2", (2,))):  # x/fprop, g/dgrad
            histories = [getattr(m.experts, name + "_product").amax_history for m in (cut, whole)]
            for place in places:
                found, wanted = (h[place] for h in histories)
                wanted = wanted[link.first_expert : link.first_expert + link.local]
                assert torch.equal(found, wanted), (step, name, place)
                assert found.any()
        mf.step(cut)
        mf.step(whole, alone)
        cut.zero_grad()
        whole.zero_grad()


def test_delayed_scaling_records_the_amaxes_of_all_ranks():
    run_world(2, check_steps, "fp8_delayed")


def check_bias_alone(rank: int, dispatch: str) -> None:
    """Where the output's bias alone trains, backward sends nothing and measures no gradient."""
    moe = built("fp8_delayed", bias=True)
    mf.expert_parallel(moe, dist.group.WORLD, dispatch=dispatch)
    moe.requires_grad_(False)
    moe.experts.b2.requires_grad_()
    y = moe(draw(rank, 6))
    history = moe.experts.w2_product.amax_history.clone()
    with rows_sent() as sent:
        y.sum().backward()
    assert sent == []
    assert torch.equal(moe.experts.w2_product.amax_history, history)
    assert moe.experts.b2.grad.any()


@pytest.mark.parametrize("dispatch", ["compute_dtype", "codes"])
def test_backward_without_rows_sends_nothing(dispatch):
    run_world(2, check_bias_alone, dispatch)


CAPACITY, DROPPED = 7, 5  # rows of one rank to another


def check_amaxes_of_sent_rows(rank: int, recipe: str) -> None:
    """Checks that amaxes of experts leave out dropped rows, which have large values here."""
    whole = built(recipe, fused_w13=True)
    cut = mf.expert_parallel(
        copy.deepcopy(whole), dist.group.WORLD, dispatch="codes", capacity=CAPACITY
    )
    for _, state in mf.nn.state.random_hooks.states_of(whole):
        state.rank = 0
        state.set(state.get())
    count = CAPACITY + DROPPED
    is_sent = (torch.arange(2 * count) % count) < CAPACITY
    factor = torch.where(is_sent, 1, 2**13)[:, None].bfloat16()
    x, g = draw(1, 2 * count) * factor, draw(2, 2 * count) * factor
    indices, weights = torch.tensor([[1, E - 1]]).repeat(2 * count, 1), torch.ones(2 * count, 2)
    rows, results = slice(rank * count, (rank + 1) * count), []
    for moe, at in ((whole, slice(None)), (cut, rows)):
        leaf = x[at].clone().requires_grad_()
        chosen = indices[at].masked_fill(~is_sent[at, None], E) if moe is whole else indices[at]
        with Products() as products:
            y = moe.experts(leaf, chosen, weights[at])
            y.backward(g[at])
        results.append((y.detach(), leaf.grad))
        if moe is whole:
            expected = products.found
    first = cut.experts.parallel.first_expert
    for i in (FPROP, DGRAD):
        require_same_operands([products.found[i]], [expected[i]], first)
    for a, b in zip(*results):
        error = (a[rows].float() - b.float()).norm() / a[rows].float().norm()
        assert error < 3e-3, (recipe, error)
        assert not b[CAPACITY:].any()
    if not mf.Recipe(recipe).is_delayed:
        return
    for name, place in (("w13_product", 0), ("w2_product", 2)):  # x/fprop, g/dgrad
        found, wanted = (getattr(m.experts, name).amax_history[place] for m in (cut, whole))
        assert torch.equal(found, wanted[first : first + E // 2]), name
        assert found[:, 1].any()


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed", "nvfp4"])
def test_rows_that_are_dropped_count_for_no_amax(recipe):
    run_world(2, check_amaxes_of_sent_rows, recipe)


def check_own_dispatcher(rank: int) -> None:
    sizes = [9, 6]
    for recipe in ("nvfp4", "mxfp8"):
        options = {"dispatch": "codes", "dispatcher": Gathering(E)}
        cut, found, alone = passes(built(recipe, fused_w13=True), sizes, **options)
        for i in (FPROP, DGRAD):
            first = cut.experts.parallel.first_expert
            require_same_operands([found.products[i]], [alone.products[i]], first)


def test_a_callers_dispatcher_sends_codes_too():
    run_world(2, check_own_dispatcher)


# ---- bytes ---------------------------------------------------------------------------------------


BYTES = {"fp8_rowwise": 0.53, "fp8_tensorwise": 0.53, "fp8_blockwise": 0.53, "mxfp8": 0.53}
BYTES |= {"mxfp4": 0.30, "nvfp4": 0.30, "nvfp4_pow2": 0.30}


def check_bytes(rank: int) -> None:
    """Dispatch sends 0.53 or 0.30 of bf16's values and 16 bytes a row, in one collective a way."""
    width, tokens = 512, 6
    for recipe, share in BYTES.items():
        moe = built(recipe, dim=width, hidden=32, fused_w13=True)
        mf.expert_parallel(moe, dist.group.WORLD, dispatch="codes")
        x = draw(rank, tokens, width).requires_grad_()
        with rows_sent() as sent:
            moe(x).sum().backward()
        (rows, of_x), (_, of_y), (rows_of_g, of_g), (_, of_dx) = sent
        assert rows == rows_of_g == tokens * K
        assert of_x <= share * 2 * width + 16, (recipe, of_x)
        assert of_g <= share * 2 * width + 16, (recipe, of_g)
        assert of_y == 2 * width
        assert of_dx == 2 * width + 16


def test_codes_take_half_or_a_third_of_the_bytes():
    run_world(2, check_bytes)


# ---- what is cast --------------------------------------------------------------------------------


class CastRows(TorchDispatchMode):
    """The rows of each matrix of `width` columns that is cast rowwise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.minifloat.quantize.default and args[0].dim() == 2 and args[1]:
            kept = (kwargs or {}).get("rows_from")
            rows = args[0] if kept is None else kept
            if args[0].shape[1] == self.width:
                self.rows.append(rows.shape[0])
        return func(*args, **(kwargs or {}))


def check_casts(rank: int) -> None:
    """A token is cast once, where its codes depend on no other row and on no random bits."""
    tokens = 5
    for recipe, of_x, of_g in (
        ("fp8_rowwise", tokens, tokens),
        ("mxfp8", tokens, tokens),
        ("mxfp4", tokens, tokens * K),
        ("fp8_tensorwise", tokens * K, tokens * K),
    ):
        moe = built(recipe, dim=128, hidden=32, fused_w13=True)
        mf.expert_parallel(moe, dist.group.WORLD, dispatch="codes")
        with CastRows(128) as casts:
            moe(draw(rank, tokens, 128)).sum().backward()
        assert casts.rows == [of_x, of_g], (recipe, casts.rows)


def test_a_token_is_cast_once_for_all_slots():
    run_world(2, check_casts)


# ---- what travels --------------------------------------------------------------------------------


def check_report(rank: int) -> None:
    """The report and the layer's text say what travels as values, and why."""
    high = "fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad=mxfp8*mxfp8"
    stochastic = "fprop=nvfp4+sr*nvfp4 dgrad=nvfp4*nvfp4 wgrad=nvfp4*nvfp4"
    apart = "x as values (w1 and w3 each quantize it, with random bits or a scale of their own)"
    bf16 = "g as values (the recipe has bf16 there)"
    eden = "nvfp4+eden*nvfp4+eden"
    signs = "as values (the signs of its transform are those of one product)"
    for recipe, fused, text in (
        ("fp8_rowwise", True, "sends x as e4m3/row and g as e4m3/row"),
        (high, True, f"sends x as mxfp8 and {bf16}"),
        (stochastic, True, "sends x as nvfp4+sr and g as nvfp4"),
        (stochastic, False, f"sends {apart} and g as nvfp4"),
        (f"fprop={eden} dgrad=nvfp4*nvfp4 wgrad={eden}", True, f"sends x {signs} and g as nvfp4"),
        (f"fprop=nvfp4*nvfp4 dgrad={eden} wgrad={eden}", True, f"sends x as nvfp4 and g {signs}"),
    ):
        moe = mf.expert_parallel(built("bf16", fused_w13=fused), dist.group.WORLD, dispatch="codes")
        report = mf.quantize_(moe, recipe, data_parallel_rank=rank)
        ours = [sentence for fqn, sentence in report.notes if fqn == "experts"]
        assert len(ours) == 1
        assert ours[0].endswith(text), ours
        assert text in repr(moe)
        require_sent_values(moe, rank, recipe, "x as values" in text, "g as values" in text)
    assert "sends values" in repr(mf.expert_parallel(built("bf16"), dist.group.WORLD))


def require_sent_values(moe: mf.MoE, rank: int, recipe: str, x_is: bool, g_is: bool) -> None:
    with rows_sent() as sent:
        moe(draw(rank, 6).requires_grad_()).sum().backward()
    for (_, size), is_values in ((sent[0], x_is), (sent[2], g_is)):
        assert (size >= 2 * D) == is_values, (recipe, sent)


def test_the_report_says_what_travels_as_values():
    run_world(2, check_report)
