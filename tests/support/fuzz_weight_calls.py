"""More valid calls for the op fuzzer: sharded weights, native classes, texts, whole models."""

from __future__ import annotations

from random import Random
from typing import Any

import minifloat as mf
import torch
from minifloat.spec import Spec
from minifloat.tensor.quantized_tensor import _rebuild_tensor
from torch import nn

from tests.support.fuzz_calls import Call, call, op_call, ops, quantized, weight
from tests.support.fuzz_values import Arena, values
from tests.support.specs import SPECS, WEIGHT_BASES

# ---- sharded masters -----------------------------------------------------------------------------


def _entries(rng: Random, arena: Arena) -> dict[str, list[Any]]:
    """Makes one or two directions of weights, and the shards of their masters."""
    found: dict[str, list[Any]] = {name: [] for name in ("masters", "specs", "geometry")}
    for name in ("codes", "scales", "amax", "names"):
        found[name] = []
    for i in range(rng.choice((1, 2))):
        rows, cols = rng.choice((1, 16, 33)), rng.choice((16, 32, 48))
        spec = rng.choice((*WEIGHT_BASES, "e4m3/tensor+delayed"))
        columnwise = rng.random() < 0.5
        master = values(rng, (rows, cols), torch.float32)
        amax = torch.ones(()) if "delayed" in spec else None
        part = mf.tensor.quantize(master, spec, columnwise=columnwise, amax=amax)
        begin = rng.randrange(rows * cols)
        end = rng.randrange(begin, rows * cols + 1)
        if "4over6" in spec:  # chooses alone for a whole weight; test_split_blocks has shards
            begin, end = 0, rows * cols
        is_fragment = rng.random() < 0.5 and Spec.parse(spec).code_bits == 8
        row_bytes = cols * Spec.parse(spec).code_bits // 8
        bytes_ = end - begin if is_fragment else rows * row_bytes
        shape = (bytes_,) if is_fragment else (rows, row_bytes)
        found["masters"].append(arena.place(master.flatten()[begin:end]))
        found["specs"].append(spec)
        found["geometry"] += [
            int(columnwise),
            rows,
            cols,
            rng.randrange(2),
            begin,
            int(is_fragment),
        ]
        found["codes"].append(arena.place(torch.zeros(shape, dtype=torch.uint8)))
        found["scales"].append(arena.place(part.scale))
        found["amax"].append(arena.place(part.amax))
        found["names"].append(str(i))
    return found


@call("MasterCasts.check")
def _master_casts(rng: Random, arena: Arena) -> Call:
    return _casts(rng, arena, runs=False)


@call("ReadyCasts.run")
def _ready_casts(rng: Random, arena: Arena) -> Call:
    return _casts(rng, arena, runs=True)


def _casts(rng: Random, arena: Arena, *, runs: bool) -> Call:
    e = _entries(rng, arena)
    numbers = [e["geometry"][6 * i : 6 * i + 4] for i in range(len(e["specs"]))]
    is_fragment = e["geometry"][5::6]
    if any(is_fragment) and not all(is_fragment):
        return _casts(rng, arena, runs=runs)
    args = {
        "specs": e["specs"],
        "numbers": numbers,
        "owners": list(range(len(e["specs"]))),
        "names": e["names"],
        "flat_codes": e["codes"],
        "scales": e["scales"],
        "amaxes": e["amax"],
        "masters": e["masters"],
        "starts": e["geometry"][4::6],
        "fragments": e["codes"] if all(is_fragment) else [],
        "group": "",
    }

    def run(specs: Any, numbers: Any, **args: Any) -> None:
        casts = [_shard_cast(spec, *n) for spec, n in zip(specs, numbers)]
        given = list(args.values())
        native = torch.classes.minifloat.MasterCasts(casts, *given[:5])
        ready = native.check(*given[5:8])
        if runs:
            ready.run(given[8], torch.classes.minifloat.Agreement())

    return Call(run, args, {"flat_codes", "scales", "amaxes", "fragments"})


def _shard_cast(spec: Any, columnwise: Any, rows: Any, cols: Any, rounds: Any) -> Any:
    return torch.classes.minifloat.ShardCast(spec, columnwise, rows, cols, rounds)


def _matrices(rng: Random, arena: Arena) -> dict[str, Any]:
    sources, targets, sizes = [], [], []
    for _ in range(rng.choice((1, 2))):
        rows, cols, bits = rng.choice((1, 16, 33)), rng.choice((1, 17, 32)), rng.choice((4, 8, 32))
        sizes += [rows, cols, bits]
        for r, c, found in ((rows, cols, sources), (cols, rows, targets)):
            bytes_ = r * ((c * bits + 7) // 8)
            found.append(arena.place(torch.zeros(bytes_, dtype=torch.uint8)))
    return {"matrices": sources, "out": targets, "sizes": sizes}


@call("MatrixTransposes.run")
def _matrix_transposes(rng: Random, arena: Arena) -> Call:
    def run(**args: Any) -> None:
        torch.classes.minifloat.MatrixTransposes(*args.values()).run()

    return Call(run, _matrices(rng, arena), {"out"})


def _layout(rng: Random) -> dict[str, Any]:
    ranks, specs = rng.choice((1, 2, 3)), rng.choices(["mxfp8", "nvfp4", "mxfp4"], k=2)
    cols = [rng.choice((16, 33)) for _ in specs]
    cuts = [cut for c in cols for cut in ops.even_cuts(8, c, ranks)]
    return {"specs": specs, "cols": cols, "cuts": cuts, "ranks": ranks}


@call("fragment_layout")
def _fragment_layout(rng: Random, arena: Arena) -> Call:
    return op_call("fragment_layout", **_layout(rng))


@call("even_cuts")
def _even_cuts(rng: Random, arena: Arena) -> Call:
    return op_call("even_cuts", rows=rng.randrange(20), cols=rng.randrange(20), ranks=3)


@call("merge_fragments")
def _merge_fragments(rng: Random, arena: Arena) -> Call:
    given = _layout(rng)
    layout, ranks = ops.fragment_layout(**given), given["ranks"]
    gathered = torch.randint(0, 256, (ranks * layout[-1],), dtype=torch.uint8)
    bits = [cols * Spec.parse(spec).code_bits for spec, cols in zip(given["specs"], given["cols"])]
    sizes = [(8, (n + 7) // 8) for n in bits]
    wires = [arena.place(torch.zeros(size, dtype=torch.uint8)) for size in sizes]
    args = {"gathered": arena.place(gathered), "wires": wires, "layout": layout, "ranks": ranks}
    return op_call("merge_fragments", **args)


@call("mf.distributed.quantize_master_weights")
def _public_masters(rng: Random, arena: Arena) -> Call:
    weights = [weight(rng, arena) for _ in range(rng.choice((1, 2)))]
    masters = [arena.place(torch.randn(w.numel())) for w in weights]
    starts = [0] * len(weights)
    if rng.random() < 0.3:
        starts[0] = rng.randrange(weights[0].numel())
        masters[0] = arena.place(torch.randn(weights[0].numel() - starts[0]))
    args = {"model_weights": weights, "master_weights": masters, "start_offsets": starts}
    run = mf.distributed.quantize_master_weights
    return Call(run, {**args, "group": None}, {"model_weights"})


@call("mf.distributed.post_all_gather_processing")
def _post_processing(rng: Random, arena: Arena) -> Call:
    weights = [weight(rng, arena) for _ in range(2)]
    return Call(
        mf.distributed.post_all_gather_processing, {"model_weights": weights}, {"model_weights"}
    )


@call("mf.distributed.wires")
@call("mf.distributed.attach_wires")
def _attach_wires(rng: Random, arena: Arena) -> Call:
    one = weight(rng, arena)
    memory = [arena.place(torch.zeros_like(wire)) for wire in mf.distributed.wires(one)]
    return Call(
        mf.distributed.attach_wires, {"weight": one, "memory": memory}, {"weight", "memory"}
    )


@call("mf.distributed.WireLayout")
def _wire_layout(rng: Random, arena: Arena) -> Call:
    weights = [weight(rng, arena) for _ in range(2)]
    ranks = rng.choice((1, 2, 3))
    made = mf.distributed.WireLayout.of(weights, ranks)
    gathered = arena.place(torch.zeros(ranks * made.piece_bytes, dtype=torch.uint8))
    cuts = rng.choice((None, [list(cut) for cut in made.cuts]))

    def run(weights: Any, ranks: Any, cuts: Any, gathered: Any, rank: Any) -> None:
        layout = mf.distributed.WireLayout.of(weights, ranks, cuts)
        layout.fragments(layout.new_piece(torch.empty(0)), rank)
        layout.merge_fragments(gathered, weights)

    args = {"weights": weights, "ranks": ranks, "cuts": cuts, "gathered": gathered, "rank": 0}
    return Call(run, args, {"weights"})


@call("mf.QuantizedTensor")
def _quantized_tensor(rng: Random, arena: Arena) -> Call:
    """Rebuilds a weight as torch.load does, then reads, copies, writes and multiplies it."""
    q = quantized(rng, arena, rng.choice(WEIGHT_BASES))

    def run(rowwise: Any, columnwise: Any, dtype: Any, requires_grad: Any) -> None:
        w = _rebuild_tensor(rowwise, columnwise, dtype, requires_grad, False).detach()
        w.dequantize()
        w.clone().copy_(w)
        w[: w.shape[0]].t()
        mf.linear(torch.randn(2, w.shape[1]), w, None, "bf16")
        mf.distributed.quantize_master_weights([w], [torch.ones(w.numel())], [0], None)

    args = {"rowwise": q, "columnwise": None, "dtype": torch.float32, "requires_grad": False}
    return Call(run, args, {"rowwise", "columnwise"})


# ---- texts and numbers ---------------------------------------------------------------------------

RECIPES = ["mxfp8", "nvfp4", "fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad=mxfp4*mxfp4"]
MAPS = ["*: nvfp4; *.out?: bf16", "mxfp8", "a*b*c: mxfp4"]


@call("spec_info")
def _spec_info(rng: Random, arena: Arena) -> Call:
    return op_call("spec_info", spec=rng.choice(SPECS))


@call("product_info")
def _product_info(rng: Random, arena: Arena) -> Call:
    product = f"{rng.choice(SPECS)}*{rng.choice(SPECS)}"
    return op_call("product_info", product=rng.choice((product, "e4m3/row*e4m3/row,fast")))


@call("roll_amax_histories")
def _roll_amax_histories(rng: Random, arena: Arena) -> Call:
    shape = (rng.randrange(1, 7), rng.randrange(2, 9))
    histories = [arena.place(torch.rand(shape)) for _ in range(rng.randrange(1, 4))]
    algorithm = rng.choice(("max", "most_recent"))
    margin = rng.choice((0, 1, 126))
    return op_call("roll_amax_histories", histories=histories, algorithm=algorithm, margin=margin)


@call("advance_random_state")
def _advance_random_state(rng: Random, arena: Arena) -> Call:
    return op_call("advance_random_state", state=arena.place(torch.tensor([rng.randrange(99), 7])))


@call("parse_recipe")
def _parse_recipe(rng: Random, arena: Arena) -> Call:
    return op_call("parse_recipe", recipe=rng.choice(RECIPES))


@call("parse_recipe_map")
@call("match_recipe")
def _match_recipe(rng: Random, arena: Arena) -> Call:
    if rng.random() < 0.5:
        return op_call("parse_recipe_map", map=rng.choice(MAPS))
    return op_call("match_recipe", map=rng.choice(MAPS), module=rng.choice(("a.out1", "ü", "")))


@call("mf.Recipe")
def _recipe(rng: Random, arena: Arena) -> Call:
    return Call(mf.Recipe, {"text": rng.choice(RECIPES)})


@call("mf.RecipeMap")
def _recipe_map(rng: Random, arena: Arena) -> Call:
    def run(text: Any, module_name: Any) -> Any:
        return mf.RecipeMap(text).find(module_name)

    return Call(run, {"text": rng.choice(MAPS), "module_name": "blocks.0.q"})


@call("mf.recipe.Product")
@call("mf.presets")
@call("preset_names")
@call("has_cuda")
@call("cuda_targets")
@call("autograd_threads")
def _constants(rng: Random, arena: Arena) -> Call:
    names = "preset_names", "has_cuda", "cuda_targets", "autograd_threads"
    return op_call(rng.choice(names))


@call("spec_sizes")
def _spec_sizes(rng: Random, arena: Arena) -> Call:
    return op_call("spec_sizes", spec=rng.choice(SPECS), rows=rng.randrange(99), cols=99)


@call("engine_of")
def _engine_of(rng: Random, arena: Arena) -> Call:
    sizes = {name: rng.choice((16, 128)) for name in "mnk"}
    capability = rng.choice((0, 90, 100))
    return op_call("engine_of", product="mxfp8*mxfp8", capability=capability, **sizes)


@call("mf.engines")
@call("mf.engine_choice.Engine")
@call("engine_info")
def _engines(rng: Random, arena: Arena) -> Call:
    recipe, experts = rng.choice(RECIPES), rng.random() < 0.5
    capability = rng.choice(((0, 0), (8, 9), (12, 0)))
    return Call(mf.engines, {"recipe": recipe, "capability": capability, "experts": experts})


@call("assume_capability")
def _assume_capability(rng: Random, arena: Arena) -> Call:
    def run(capability: Any) -> None:
        ops.assume_capability(capability)
        ops.assume_capability(0)

    return Call(run, {"capability": rng.choice((0, 80, 120))})


@call("stream")
@call("mix_seed")
def _numbers(rng: Random, arena: Arena) -> Call:
    if rng.random() < 0.5:
        return op_call("stream", name="blocks.0")
    return op_call("mix_seed", seed=rng.randrange(99), count=rng.randrange(99))


# ---- whole models --------------------------------------------------------------------------------


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


@call("mf.quantize_")
@call("mf.restore_")
@call("mf.step")
@call("mf.training_state")
@call("mf.load_training_state")
@call("mf.Report")
@call("mf.distributed.precompute_scales")
@call("mf.nn.DelayedScaling")
def _convert(rng: Random, arena: Arena) -> Call:
    def run(x: Any, recipe: Any, seed: Any, length: Any, state: Any) -> None:
        model = _net()
        rule = mf.nn.DelayedScaling(length)
        mf.quantize_(model, recipe, seed=seed, delayed_scaling=rule)
        model(x).sum().backward()
        mf.step(model)
        mf.distributed.precompute_scales(model)
        mf.load_training_state(model, mf.training_state(model) if state is None else state)
        mf.restore_(model)

    args = {"x": torch.randn(4, 32), "recipe": rng.choice(mf.presets()), "seed": 0}
    return Call(run, {**args, "length": 4, "state": None}, is_of_models=True)


@call("mf.Linear")
@call("mf.nn.quantized_model_init")
@call("mf.nn.auto_filter_small_kn")
def _module(rng: Random, arena: Arena) -> Call:
    def run(in_features: Any, recipe: Any, name: Any, seed: Any, x: Any) -> None:
        layer = mf.Linear(in_features, 16, recipe=recipe, name=name, seed=seed)
        mf.nn.auto_filter_small_kn(recipe)(layer, name)
        with mf.nn.quantized_model_init(recipe):
            _net()
        layer(x)

    args = {"in_features": 32, "recipe": rng.choice(mf.presets()), "name": "a", "seed": 0}
    return Call(run, {**args, "x": torch.randn(4, 32)}, is_of_models=True)


@call("mf.MLP")
def _mlp(rng: Random, arena: Arena) -> Call:
    def run(hidden: Any, gated: Any, activation: Any, recipe: Any, x: Any) -> None:
        layer = mf.MLP(32, hidden, gated=gated, activation=activation)
        mf.quantize_(layer, recipe)
        layer(x).float().sum().backward()
        mf.step(layer)

    args = {"hidden": 16, "gated": rng.choice((True, False)), "activation": "gelu"}
    args |= {"recipe": rng.choice(mf.presets()), "x": torch.randn(4, 32)}
    return Call(run, args, is_of_models=True)


@call("mf.inspect")
@call("mf.inspector.Inspection")
def _inspect(rng: Random, arena: Arena) -> Call:
    def run(x: Any, recipes: Any, share: Any, low: Any, high: Any) -> None:
        found = mf.inspect(_net(), x, recipes, loss=lambda model, batch: model(batch).mean())
        found.table(), found.operand_table(), found.json()
        found.recipe_map(share, low, high)

    recipes = rng.sample(mf.presets(), 2)
    args = {"x": torch.randn(4, 32), "recipes": recipes, "share": 0.5}
    return Call(run, {**args, "low": recipes[0], "high": "bf16"}, is_of_models=True)
