"""Every op under torch.library.opcheck."""

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from minifloat.spec import Spec

RNG = torch.tensor([1, 2, 3])
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def grad(*shape):
    return torch.randn(*shape, requires_grad=True)


def history():
    h = torch.zeros(6, 4)
    h[:, 0] = 3
    return h


def operand(spec, rows=40, cols=72):
    return mf.tensor.quantize(torch.randn(rows, cols), spec, seed=1)


def product(a, b):
    p, q = operand(a), operand(b, 24)
    return (p.codes, p.scale, p.amax, q.codes, q.scale, q.amax, f"{a}*{b}"), {"k": 72}


def grouped_calls():
    """Yields calls with groups. A group_unit: groups along the contraction dimension."""
    offs = torch.tensor([8, 8, 40], dtype=torch.int32)
    x, table = torch.randn(40, 72), mf.tensor.group_table(offs, 40)
    yield ops.group_table, (offs, 40), {}
    yield ops.amax, (x, "nvfp4"), {"groups": table}
    for columnwise in (False, True):
        yield ops.amax, (x, "e4m3/row", columnwise), {"groups": table}
    ids = {"groups": table, "rng": RNG, "row_ids": torch.arange(40).int()}
    yield ops.quantize, (x, "nvfp4+sr", ""), {**ids, "decoded_row": True}
    yield ops.quantize, (x, "e4m3/row", ""), {"groups": table, "amax_row": torch.ones(40)}
    both = {**ids, "group_unit": 64, "first_expert": 2, "decoded_col": True}
    yield ops.quantize, (x, "mxfp8+sr", "nvfp4+sr"), both
    for columnwise in (False, True):
        where = {"groups": table, **({"group_unit": 32} if columnwise else {})}
        q = mf.tensor.quantize(x, "nvfp4+pow2", columnwise=columnwise, groups=table)
        length = q.shape[-1]
        yield ops.dequantize, (q.codes, q.scale, q.amax, q.spec, length), where
        yield ops.decode, (q.codes, q.scale, q.spec, length), where
        yield ops.fp4_as_fp8, (q.codes, q.scale, q.amax, q.spec, length), where
        yield ops.hadamard, (x, 32, columnwise), where
    a = mf.tensor.quantize(x, "e4m3/row", groups=table)
    b = mf.tensor.quantize(torch.randn(3, 24, 72), "e4m3/row")
    sides = (a.codes, a.scale, a.amax, b.codes, b.scale, b.amax, "e4m3/row*e4m3/row")
    yield ops.scaled_mm, sides, {"k": 72, "groups": table, "zero_tail": True}
    for spec in ("mxfp8", "nvfp4"):
        for where in ({"k": 72}, {"k": 40, "group_unit": 32}):
            columnwise = "group_unit" in where
            a = mf.tensor.quantize(x, spec, columnwise=columnwise, groups=table)
            b = a if columnwise else mf.tensor.quantize(torch.randn(3, 24, 72), spec)
            sides = (a.codes, a.scale, a.amax, b.codes, b.scale, b.amax, f"{spec}*{spec}")
            yield ops.block_scaled_grouped_operands, sides, {**where, "groups": table}
    for recompute in ("", "weight"):
        inputs = grad(40, 72), grad(3, 72, 24), offs, "mxfp8"
        yield ops.scaled_grouped_mm, inputs, {"recompute": recompute}


def expert_calls():
    """Yields calls of what lies between the products of experts."""
    groups = mf.tensor.group_table(torch.tensor([8, 30], dtype=torch.int32), 40)
    pairs = torch.randperm(40).int()
    fused, half = torch.randn(40, 48), torch.randn(40, 24, dtype=torch.bfloat16)
    options = {"limit": 1.0, "interleaved": True, "pairs": pairs, "groups": groups}
    yield ops.swiglu, (fused, None, torch.rand(40)), options
    yield ops.swiglu, (half, half.clone(), torch.rand(20, 2)), {"pairs": pairs}
    every = options | {
        "groups": mf.tensor.group_table(torch.tensor([8, 40], dtype=torch.int32), 40)
    }
    yield ops.quantize_swiglu, (fused, None, torch.rand(40), "mxfp8", ""), every
    both = (half, half.clone(), torch.rand(20, 2), "mxfp4", "mxfp4+sr+rht")
    yield ops.quantize_swiglu, both, {"rng": RNG, "pairs": pairs, "decoded_col": True}
    grouped = {"groups": groups, "group_unit": 32, "row_ids": pairs}
    yield ops.quantize_swiglu, (fused, None, torch.rand(40), "e4m3/row", "e4m3/tensor"), grouped
    of_columns = grouped | {"amaxes_of_columns": True}
    yield ops.quantize_swiglu, (fused, None, torch.rand(40), "e4m3/row", ""), of_columns
    rowwise = every | {"columnwise": False}
    yield ops.swiglu_operands, (fused, None, torch.rand(40), "mxfp8"), rowwise
    yield ops.swiglu_operands, (half, half.clone(), torch.rand(40), "nvfp4"), {"pairs": pairs}
    dh = torch.randn(40, 24)
    yield ops.swiglu_backward, (dh, fused, None, torch.rand(40)), options
    yield ops.swiglu_backward, (dh, fused, None, torch.rand(40)), every | {"amaxes": True}
    others = (half, half.clone(), half.clone(), torch.rand(20, 2))
    yield ops.swiglu_backward, others, {"pairs": pairs}
    inverse = {"places": pairs.argsort().int().view(20, 2)}
    yield ops.take_rows, (torch.randn(20, 48), pairs, 2), inverse
    yield ops.take_rows, (torch.randint(0, 255, (40,), dtype=torch.uint8), pairs), {}
    fields = [torch.randn(20, 48), torch.rand(40), pairs]
    yield ops.pack_rows, (fields, pairs), {"slots": [2, 1, 0]}
    yield ops.pack_rows, ([fused],), {"rows_from": pairs}
    places = pairs.view(20, 2)
    yield ops.add_slots, (fused, places), {}
    yield ops.swiglu, (grad(40, 48), None, grad(40)), {"pairs": pairs}
    yield ops.take_rows, (grad(20, 48), pairs, 2), inverse
    gradients = {"pairs": inverse["places"].reshape(-1)}
    yield ops.add_slots, (grad(40, 48), places, grad(20, 48)), gradients
    yield ops.add_slots, (half, places, torch.randn(20, 24)), {}


def mlp_calls():
    """Yields calls of the feed-forward of experts."""
    pairs = torch.randperm(40).int()
    places = pairs.argsort().int().view(20, 2)
    order = [pairs, places, torch.tensor([8, 8, 30], dtype=torch.int32), pairs]
    apart, fused = [grad(3, 72, 24), grad(3, 72, 24)], [grad(3, 72, 48)]
    tokens = grad(20, 72), grad(20, 2), order
    last = grad(3, 24, 72)
    for recipe, options in (("mxfp8", {}), ("nvfp4", {"recompute": ["weight"] * 3})):
        arguments = (*tokens, [*apart, last], [grad(3, 24), None], [recipe] * 3)
        options = {"rng": [RNG] * 3, "streams": [1, 2, 3], "recompute": [""] * 3} | options
        yield ops.grouped_mlp, arguments, options
    options = {"streams": [1, 2], "recompute": ["", ""], "limit": 7.0, "interleaved": True}
    arguments = (*tokens, [*fused, last], [None], ["fp8_delayed"] * 2)
    histories = [torch.rand(6, 3, 4), torch.rand(6, 3, 4)]
    yield ops.grouped_mlp, arguments, {**options, "amax_history": histories, "base": grad(20, 72)}
    arguments = (*tokens, [*fused, last], [None], ["bf16", "fp8_rowwise"])
    yield ops.grouped_mlp, arguments, {**options, "sums": False}


def activation_calls():
    """Yields calls of an activation between dense layers."""
    gate, half = torch.randn(40, 48), torch.randn(2, 20, 24, dtype=torch.bfloat16)
    yield ops.activation, (gate, None, "gelu"), {}
    yield ops.activation, (half, half.clone(), "silu"), {}
    yield ops.activation_backward, (half.clone(), half, half.clone(), "gelu_tanh"), {}
    yield ops.activation_backward, (gate.clone(), gate, None, "gelu"), {}
    decoded = {"rng": RNG, "decoded_col": True, "origin": (32, 64)}
    yield ops.quantize_activation, (gate, gate.clone(), "silu", "mxfp4", "mxfp4+sr+rht"), decoded
    as_fp8 = {"rng": RNG, "fp8_row": True, "fp8_col": True}
    yield ops.quantize_activation, (half[0], None, "gelu", "nvfp4+pow2", "mxfp4+sr"), as_fp8
    tensors = (gate.clone(), gate, gate.clone(), "silu")
    as_fp8 = {"gate_rng": RNG, "up_rng": RNG, "fp8_row": True, "fp8_h": True}
    specs = ("nvfp4+pow2+sr", "mxfp4", "nvfp4+pow2+rht")
    yield ops.quantize_activation_backward, (*tensors, *specs), as_fp8
    swizzled = {"swizzled_row": True, "swizzled_col": True}
    yield ops.quantize_activation, (gate, None, "gelu", "mxfp8", "nvfp4"), swizzled
    specs = ("mxfp8", "mxfp4+rht", "nvfp4")
    yield ops.quantize_activation_backward, (*tensors, *specs), {**swizzled, "swizzled_h": True}
    options = {"h_amax": torch.tensor(2.0), "up_stream_col": 3, "decoded_row": True}
    specs = ("mxfp8", "e4m3/row", "e4m3/tensor+delayed")
    yield ops.quantize_activation_backward, (*tensors, *specs), options
    yield ops.activation_gradients_, (*tensors, "e4m3/tensor"), {"h_amax": torch.tensor(2.0)}
    yield ops.activation_gradients_, (gate.clone(), gate, None, "gelu", ""), {}
    alone = (gate.clone(), gate, None, "gelu", "", "nvfp4+sr", "")
    yield ops.quantize_activation_backward, alone, {"gate_rng": RNG}


def recorded_calls():
    """Yields calls of what torch.compile records of a linear layer."""
    x, weight, bias = torch.randn(40, 72), torch.randn(24, 72), torch.randn(24)
    for recipe, recompute, delayed in (
        ("nvfp4", "", None),
        ("fp8_tensorwise", "weight", None),
        ("fp8_delayed", "", history()),
    ):
        r = mf.Recipe(recipe)
        left = ops.quantize(x, r.fprop.a.removesuffix("+delayed"), "")[:4]
        forward = (recipe, torch.float32, True, recompute, RNG, delayed, 3)
        suffix = "_delayed" if delayed is not None else ""
        ways = ("forward", "backward")
        run, run_backward = (getattr(ops, f"linear_{way}{suffix}") for way in ways)
        swizzled = {"swizzled": recipe == "nvfp4"}
        yield run, (*left, weight, bias, *forward), swizzled
        of_x = ops.quantize(x, "", r.wgrad.b.removesuffix("+delayed"), rng=RNG)[4:7]
        of_w = run(*left, weight, None, *forward, **swizzled)[1:]
        saved = [*of_x, *([weight, *of_w[1:]] if recompute else of_w)]
        dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float32)
        backward = (recipe, [True, True, delayed is None], 72, *dtypes, RNG, delayed, 3)
        yield run_backward, (torch.randn(40, 24), saved, *backward), {}


def recorded_expert_calls():
    """Yields calls of what torch.compile records of a product of experts."""
    table = mf.tensor.group_table(torch.tensor([8, 8, 40], dtype=torch.int32), 40)
    x, matrices, ids = torch.randn(40, 72), torch.randn(3, 72, 24), torch.arange(40).int()
    for recipe, recompute in (("nvfp4", ""), ("fp8_tensorwise", "weight"), ("fp8_delayed", "")):
        r = mf.Recipe(recipe)
        amaxes = torch.full((6, 3, 4), 3.0) if r.is_delayed else None
        groups = {"groups": table, "row_ids": ids, "first_expert": 2, "zero_tail": False}
        row, col = (spec.removesuffix("+delayed") for spec in (r.fprop.a, r.wgrad.b))
        left = ops.quantize(x, row, "", groups=table)[:4]
        suffix = "_delayed" if r.is_delayed else ""
        ways = ("forward", "backward")
        run, run_backward = (getattr(ops, f"linear_{way}{suffix}") for way in ways)
        forward = (recipe, torch.float32, True, recompute, RNG, amaxes, 3)
        groups["out_dtype"] = torch.bfloat16
        yield run, (*left, matrices, torch.randn(3, 24), *forward), groups
        of_w = list(run(*left, matrices, None, *forward, **groups)[1:])
        if recompute:
            of_w[0] = matrices
        unit = max(Spec.parse(spec).group_unit for spec in (r.wgrad.a, r.wgrad.b))
        of_x = ops.quantize(x, "", col, rng=RNG, groups=table, group_unit=unit)[4:7]
        dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float32)
        backward = (recipe, [True] * 3, 72, *dtypes, RNG, amaxes, 3)
        del groups["out_dtype"]
        yield run_backward, (torch.randn(40, 24), [*of_x, *of_w], *backward), groups


def recorded_mlp_calls():
    """Yields calls of what torch.compile records of a dense feed-forward."""
    x, dtypes = torch.randn(40, 72), (torch.float32, torch.float32, torch.bfloat16, torch.float32)
    for recipe, recompute, count in (
        ("nvfp4", "", 3),
        ("fp8_tensorwise", "weight", 2),
        ("fp8_delayed", "", 3),
    ):
        r = mf.Recipe(recipe)
        left = ops.quantize(x, r.fprop.a.removesuffix("+delayed"), "")[:4]
        weights = [torch.randn(24, 72)] * (count - 1) + [torch.randn(16, 24)]
        histories = [history() for _ in weights] if r.is_delayed else []
        state = ([RNG] * count, histories, list(range(count)))
        suffix = "_delayed" if histories else ""
        run, run_backward = (getattr(ops, f"mlp_{way}{suffix}") for way in ("forward", "backward"))
        how = (recipe, "gelu", torch.float32, [True] * 3, recompute, *state)
        biases = [torch.randn(w.shape[0]) if r.is_delayed else None for w in weights]
        forward = (*left, weights, biases, *how, [recipe == "nvfp4"] * 2)
        yield run, forward, {}
        saved = list(run(*forward)[1 : 3 * count + 6])
        if recompute:
            saved[0], saved[6] = weights
        of_x = ops.quantize(x, "", r.wgrad.b.removesuffix("+delayed"), rng=RNG)[4:7]
        needed = (True, [True, True, False], [False, r.is_delayed, False])
        backward = (recipe, "gelu", *needed, 72, *dtypes, *state)
        yield run_backward, (torch.randn(40, 16), [*of_x, *saved], *backward), {}


def sample_calls():
    x, batch = torch.randn(40, 72), torch.randn(2, 40, 72, dtype=torch.bfloat16)
    yield ops.amax, (x, "nvfp4"), {}
    yield ops.amax, (batch, "e4m3/row", True), {}
    yield ops.quantize, (x, "nvfp4", "nvfp4+sr+rht"), {"rng": RNG, "decoded_row": True}
    yield ops.quantize, (batch, "mxfp8", ""), {"decoded_row": True}
    yield ops.quantize, (batch, "nvfp4+pow2", "mxfp4+rht"), {"fp8_row": True, "fp8_col": True}
    yield ops.quantize, (batch, "mxfp8", "nvfp4"), {"swizzled_row": True, "swizzled_col": True}
    yield ops.quantize, (batch, "", "e4m3/row"), {"amax_col": torch.ones(2, 72)}
    yield ops.quantize, (batch, "e4m3/row", ""), {"amaxes_of_columns": True}
    yield ops.quantize, (x, "e4m3/tensor+delayed", "e4m3/128x128"), {"amax_row": torch.tensor(2.0)}
    delayed = "e4m3/tensor+delayed"
    yield ops.quantize_delayed, (x, delayed, delayed, torch.rand(6, 4), 0, 5), {}
    yield ops.quantize_delayed, (x, "nvfp4+sr", delayed, torch.rand(6, 4), 2, 4), {"rng": RNG}
    for spec in ("nvfp4", "mxfp8", "e5m2/tensor", "e4m3/row", "mxfp4+rht"):
        q = operand(spec)
        yield ops.dequantize, (q.codes, q.scale, q.amax, spec, 72), {"dtype": torch.bfloat16}
        yield ops.decode, (q.codes, q.scale, spec, 72), {}
    for of in ("x", "w"):
        yield ops.layer_operands, (grad(40, 72), "mxfp4", of), {"columnwise": of == "w"}
    for spec in ("mxfp4+rht", "nvfp4+pow2"):
        q = operand(spec)
        yield ops.fp4_as_fp8, (q.codes, q.scale, q.amax, spec, 72), {}
    yield from grouped_calls()
    yield from expert_calls()
    yield from mlp_calls()
    yield from activation_calls()
    yield from recorded_calls()
    yield from recorded_mlp_calls()
    yield from recorded_expert_calls()
    for spec in ("mxfp8/32x32", "nvfp4/16x16"):
        q = mf.tensor.quantize(x, spec)
        yield ops.block_scaled_operand, (q.codes, q.scale, q.amax, spec, 72), {}
    yield ops.hadamard, (x, 32, True), {}
    yield ops.operand_statistics, ([x], "nvfp4"), {"amax": [torch.tensor(9.0)]}
    yield ops.operand_statistics, ([*batch], "mxfp4+sr+rht", True), {"rng": RNG, "stream": 3}
    yield ops.result_error, ([x], [torch.randn(40, 72)]), {}
    yield ops.result_error, ([*batch], [*batch.flip(0)], [*batch]), {}
    scale = torch.randint(0, 255, (40, 9), dtype=torch.uint8)
    offs = torch.tensor([8, 8, 40], dtype=torch.int32)
    yield ops.swizzle_scales, (scale,), {}
    yield ops.swizzle_scales, (scale,), {"offs": offs, "groups": "m"}
    tiled = ops.swizzle_scales(scale)
    yield ops.unswizzle_scales, (tiled, 40, 9), {}
    yield ops.transpose_codes, (scale, 17), {}
    yield ops.scaled_mm, *product("nvfp4", "nvfp4/16x16")
    yield ops.scaled_mm, *product("mxfp8", "e4m3/row+exact")
    for specs in (("nvfp4", "nvfp4/16x16"), ("e4m3/row", "e4m3/row")):
        args, options = product(*specs)
        yield ops.add_scaled_mm, (torch.randn(40, 24), *args), {"k": options["k"]}
    gathered = torch.randint(0, 255, (64,), dtype=torch.uint8)
    yield (
        ops.merge_fragments,
        (gathered, [torch.zeros(30, dtype=torch.uint8)], [0, 0, 9, 8, 30, 32], 2),
        {},
    )
    yield ops.quantize_messages, (torch.randn(2, 512), "e4m3/1x128+sr"), {"rng": RNG[:2]}
    messages = ops.quantize_messages(torch.randn(3, 512), "mxfp4")
    yield ops.sum_messages, (messages, "mxfp4", torch.zeros(512, dtype=torch.bfloat16)), {}
    yield ops.roll_amax_histories, ([torch.rand(6, 5), torch.rand(6, 5)],), {"margin": 1}
    yield ops.advance_random_state, (torch.tensor([5, 7]),), {}
    for recipe in ("nvfp4", "mxfp8", "bf16", "fp8_rowwise_gw_hp"):
        yield ops.linear, (grad(40, 72), grad(24, 72), grad(24), recipe), {"rng": RNG}
    yield ops.linear, (grad(3, 4, 72), grad(24, 72), None, "fp8_tensorwise"), {}
    yield ops.linear, (grad(40, 72), grad(24, 72), None, "mxfp8"), {"accumulate": "grad"}
    zeros = {"main_grad": torch.zeros(24, 72), "accumulate": "main_grad", "received": "zeros"}
    yield ops.linear, (grad(40, 72), grad(24, 72), grad(24), "nvfp4"), {"rng": RNG, **zeros}
    for dim, token_dim in ((0, 1), (1, None)):  # one rank, which sends nothing
        where = {"group": "", "rank": 0, "ranks": 1, "weight_dim": dim, "token_dim": token_dim}
        x = grad(2, 32, 64)
        for recompute in ("", "weight"):
            again = where | {"recompute": recompute}
            yield ops.linear_sharded, (x, grad(32, 64), grad(32), "mxfp8"), again
    for dim, parts in ((0, 2), (1, 1)):
        where = {"group": "", "rank": 0, "ranks": 1, "weight_dim": dim, "weight_parts": parts}
        inputs = grad(40, 64), grad(3, 64, 128), offs, "nvfp4"
        yield ops.scaled_grouped_mm_sharded, inputs, {"rng": RNG, **where}
    g, a, b = torch.randn(40, 24), torch.randn(40, 72), torch.randn(3, 72, 24)
    inputs = a, b, offs, "mxfp8", [True, True, False]
    yield ops.scaled_grouped_mm_backward, (g, *inputs), {}
    tokens = {"grad_rows_from": torch.arange(40).int() // 2}
    yield ops.scaled_grouped_mm_backward, (g[:20], *inputs), tokens
    weights = [grad(24, 72), grad(8, 72)]
    mlp = [grad(24, 72), grad(24, 72), grad(16, 24)]
    yield ops.mlp, (grad(40, 72), mlp, [None, grad(24), None], "mxfp8", "silu"), {}
    recomputed = {"rng": [RNG, RNG], "recompute": "weight"}
    yield ops.mlp, (grad(3, 4, 72), mlp[1:], [None, None], "nvfp4", "gelu"), recomputed
    sums = [torch.zeros(w.shape) for w in mlp]
    summed = {"main_grads": sums, "accumulate": "main_grad", "received": "zeros"}
    yield ops.mlp, (grad(40, 72), mlp, [None] * 3, "fp8_rowwise", "silu"), summed
    yield ops.linear_group, (grad(40, 72), weights, [None, grad(8)], "nvfp4"), {"rng": [RNG, RNG]}


@pytest.mark.parametrize(
    "call",
    [pytest.param(c, id=f"{i}-{c[0]._qualified_op_name}") for i, c in enumerate(sample_calls())],
)
def test_opcheck(call):
    op, args, kwargs = call
    checks = ["test_autograd_registration", "test_faketensor"]
    # Groups along the contraction dimension leave the bytes past the last group unspecified, and
    # this check compares all bytes of two runs. tests/nn/test_compile.py compares those of groups.
    if "group_unit" not in kwargs:
        checks.append("test_aot_dispatch_dynamic")
    # torch's schema check compares its arguments by allclose, which one-byte floats do not have.
    if not any(isinstance(t, torch.Tensor) and t.dtype in ONE_BYTE for t in args):
        checks.append("test_schema")
    torch.library.opcheck(op.default, args, kwargs, test_utils=checks)


def test_every_op_is_checked():
    text = {"parse_recipe", "parse_recipe_map", "match_recipe", "preset_names"}
    text |= {"spec_sizes", "stream", "mix_seed", "autograd_threads", "has_cuda", "cuda_targets"}
    text |= {"spec_info", "product_info", "token_unit", "shard_multiple", "operand_names"}
    text |= {"statistic_names"}
    text |= {"engine_of", "engine_info", "assume_capability"}
    text |= {"even_cuts", "fragment_layout", "row_layout", "check_groups"}
    text |= {"message_bytes", "count_step"}
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("minifloat::")
    }
    checked = {op._qualified_op_name.split("::")[1] for op, _, _ in sample_calls()}
    assert names - text == checked
