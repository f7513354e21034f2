"""mf.load_quantized_: the weights of a quantized checkpoint as frozen codes of a model's layers.

names      of the checkpoint -> parameters, all of them, before anything is written
layers     converted, each under the recipe's x and gradients, and the codes that it has
weights    read and written one by one: codes and scales as they are, never values
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from ..checks import require_module
from ..moe.layer import divided_experts
from ..nn.convert.filters import require_globs
from ..nn.convert.quantize import quantize_, restore_
from ..nn.convert.selection import Report
from ..nn.grouped_product import product_of
from ..nn.names import unwrapped
from ..nn.registry import is_distributed
from ..nn.state.recipe_state import RecipeState, converted
from ..recipe import FORWARD_W, Product, Recipe, RecipeMap
from ..spec import Spec
from ..tensor.attributes import attributes_of
from ..tensor.directions import tensors_of
from ..tensor.quantized import Quantized
from ..tensor.quantized_tensor import QuantizedTensor
from .read_checkpoint import Source, open_folder, require_method, same_bytes
from .read_codes import (
    NUMERATORS,
    NVFP4,
    ROW,
    TENSOR,
    Amax,
    Names,
    crc_of,
    nvfp4_amax,
    nvfp4_factors,
    problem_of_scales,
    read_names,
    read_part,
)
from .read_targets import (
    Piece,
    Target,
    assign,
    kept_in_float32,
    problem_of,
    targets_of,
    transformers_model,
    write_values,
)
from .weights import is_transformers

FUNCTION = "load_quantized_"
IN_HIGH_PRECISION = "the checkpoint has it in high precision"
NO_GLOB = "no glob of the recipe map matches"  # of a report
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


def load_quantized_(
    model: nn.Module,
    folder: object,
    recipe: str | Recipe | RecipeMap = "bf16",
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Report:
    """Loads a quantized checkpoint, whose codes become the frozen weights of converted layers.

    It reads compressed-tensors' and ModelOpt's NVFP4, MXFP4, MXFP8 and FP8, transformers' `fp8`
    (DeepSeek-V3) and gpt-oss's MXFP4. A weight is never computed in high precision: a
    QuantizedTensor has the checkpoint's codes and scales. All other tensors are loaded too, those
    that transformers keeps in float32 in float32. config.quantization_config of a model of
    transformers is removed, which described the folder.

    The recipe says how x and gradients are cast. In its place for W each layer has the codes of the
    checkpoint, which nothing rounds again: fprop reads them, dgrad their transpose where that has
    the same codes, else their values (docs/lora.md). fully_shard after it keeps the codes' values,
    which products then read.

    Args:
        model: a plain one, in float32 or bfloat16, whose parameters may be on meta.
        folder: of safetensors, with config.json.
        recipe: of x and gradients: one for all layers, or a map from module names. A layer without
            a recipe has "bf16".
        device: of parameters that are on meta; None: the CPU.
        seed: of stochastic rounding, 64 bits with sign.

    Returns:
        The names of layers with codes and their recipes, and of others with reasons.

    Raises:
        TypeError: `model` is no module.
        ValueError: `device` has no memory, the folder is no quantized checkpoint of a known kind,
            or is damaged, a tensor is missing, unknown, of another shape, unlike one that the model
            ties to it, or of a format that codes here do not have, a layer with codes cannot be
            converted, or the model is sharded. It is unchanged then.
        OSError: a file cannot be read.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64))
        >>> mf.load_quantized_(model, "no such folder")
        Traceback (most recent call last):
        ValueError: load_quantized_: expected safetensors in no such folder, got no file
    """
    model = unwrapped(require_module(FUNCTION, model))
    memory = require_memory(device)
    source = open_folder(FUNCTION, folder)
    if found := [fqn for fqn, _ in converted(model)]:
        raise source.error(f"expected a plain model, got {found[0]} converted")
    divided = divided_experts(model.modules())
    sharded = [fqn for fqn, weight in model.named_parameters() if is_distributed(weight)]
    if sharded := sharded + [fqn for fqn, module in model.named_modules() if module in divided]:
        raise source.error(
            f"expected whole weights, got {sharded[0]} in shards; load before sharding"
        )
    require_method(source)
    parameters = model.named_parameters(remove_duplicate=False)
    buffers = model.named_buffers(remove_duplicate=False)
    names = read_names(source, {fqn for fqn, _ in chain(parameters, buffers)})
    targets, left_out = plan(model, source, names)
    codes = {fqn: t for fqn, t in targets.items() if t.pieces[0].source in names.weights}
    specs, tied = choose_specs(source, names, codes)
    recipes = recipes_of(model, source, RecipeMap(recipe), specs)
    report = convert(model, source, recipes, codes, seed)
    in_float32 = {id(targets[fqn].tensor) for fqn in kept_in_float32(model, [*targets])}
    made: dict[int, Tensor] = {}  # by the id of the tensor before: tied ones are made once
    for fqn, target in targets.items():
        if fqn in codes:
            write_codes(source, names, target, specs[fqn], memory, made)
        else:
            write_values(source, target, id(target.tensor) in in_float32, memory, made)
    for module in filter(is_transformers, model.modules()):
        vars(module.config).pop("quantization_config", None)  # of the folder, not of this model
    notes = [
        ("", f"{len(group)} {what}, such as {group[0]}")
        for group, what in (
            (names.ignored, "scales of activations are not read: x is scaled by its own values"),
            (left_out, "tensors are not read, which the model's class leaves out"),
            (
                tied,
                "layers have values halfway between two of bfloat16, which another library may"
                " round to the other",
            ),
        )
        if group
    ]
    return replace(report, notes=[*report.notes, *notes])


def require_memory(device: torch.device | str | None) -> torch.device:
    """Returns the device of parameters that are on meta, which is one with memory.

    Raises:
        ValueError: it is none.
    """
    try:
        memory = torch.device("cpu" if device is None else device)
        torch.empty(0, device=memory)
    except Exception as error:
        raise ValueError(f"device: expected a device of this machine, got {device!r}") from error
    if memory.type == "meta":
        raise ValueError("device: expected a device with memory, got 'meta'")
    return memory


# ---- names and specs -----------------------------------------------------------------------------


def plan(model: nn.Module, source: Source, names: Names) -> tuple[dict[str, Target], list[str]]:
    """Finds the tensors of each parameter, and the names that the model's class leaves out.

    Raises:
        ValueError: names or shapes are not those of the model.
    """
    targets, lost = targets_of(model)
    left_out, unknown = assign(source, model, targets, [*names.weights, *names.plain])
    given = {id(target.tensor) for target in targets.values() if target.pieces}
    lost += [fqn for fqn, target in targets.items() if id(target.tensor) not in given]
    problems = [f"{name} is unknown" for name in unknown] + [f"{fqn} is missing" for fqn in lost]
    tied = getattr(transformers_model(model), "all_tied_weights_keys", {})
    if untied := next((fqn for fqn in lost if fqn in tied), None):
        problems.append(f"{untied} is tied to {tied[untied]} no more; call model.tie_weights()")
    problems += differing_ties(source, names, targets)
    whys = (problem_of(source, names.weights, f, t) for f, t in targets.items() if t.pieces)
    problems += [why for why in whys if why is not None]
    whys = (problem_of_scales(source, weight) for weight in names.weights.values())
    problems += [why for why in whys if why is not None]
    if not names.weights:
        problems.append("no quantized weight")
    if problems:
        raise source.error_of_list(f"expected the tensors of {type(model).__name__}", problems)
    # Of tied tensors, those without a name in the checkpoint share the others' pieces.
    pieces = {id(t.tensor): t.pieces for t in targets.values() if t.pieces}
    # Of a module with several names, the first, by which it is converted.
    first = {(t.module, t.name): f for f, t in reversed(targets.items())}
    return {
        f: t._replace(pieces=pieces[id(t.tensor)])
        for f, t in targets.items()
        if first[t.module, t.name] == f
    }, left_out


def differing_ties(source: Source, names: Names, targets: dict[str, Target]) -> Iterator[str]:
    """Yields why parameters that the model ties cannot have the tensors of their names.

    A checkpoint may have a tied tensor under one name, or the same values under several.
    """
    first: dict[int, tuple[str, list[Piece]]] = {}
    for fqn, target in targets.items():
        if not target.pieces:
            continue
        name, pieces = first.setdefault(id(target.tensor), (fqn, target.pieces))
        if name == fqn:
            continue
        own, other = ([n for p in of for n in names.of(p.source)] for of in (target.pieces, pieces))
        pairs = ((source.tensors[a], source.tensors[b]) for a, b in zip(own, other))
        if len(own) != len(other) or not all(same_bytes(a, b) for a, b in pairs):
            yield f"{fqn} is tied to {name} in the model, and differs from it"


def choose_specs(
    source: Source, names: Names, codes: dict[str, Target]
) -> tuple[dict[str, str], list[str]]:
    """Chooses the spec of each quantized parameter; those of one module have one.

    Returns:
        The specs, and the modules with values that tie (Amax.ties).

    Raises:
        ValueError: the parts of a parameter have no common spec, or no codes here have its values.
    """
    modules: dict[str, list[str]] = {}
    for fqn in codes:
        modules.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    specs: dict[str, str] = {}
    tied: list[str] = []
    for module, fqns in modules.items():
        pieces = [piece for fqn in fqns for piece in codes[fqn].pieces]
        weights = [names.weights[piece.source] for piece in pieces]
        found = {weight.spec for weight in weights}
        if found <= {TENSOR, ROW} and (len(found) > 1 or any(p.parts > 1 for p in pieces)):
            found = {ROW}  # of gate and up, which have a scale each
        if found == {NVFP4}:
            factors = {factor for weight in weights for factor in nvfp4_factors(source, weight)}
            amaxes = {s: [nvfp4_amax(s, *f) for f in factors] for s in NUMERATORS}
            ties = {s: sum(a.ties for a in of if a) for s, of in amaxes.items() if all(of)}
            if not ties:
                raise source.error(
                    f"{module}: expected factors within the range of 2688 / amax, got "
                    f"{sorted(factors)[:4]}"
                )
            found = {min(ties, key=ties.__getitem__)}
            tied += [module] if min(ties.values()) else []
            require_shared_factors(source, names, module, [codes[fqn] for fqn in fqns])
        if len(found) > 1:
            raise source.error(f"{module}: expected codes of one format, got {sorted(found)}")
        (spec,) = found
        rows = [w.shape[-2] for w, p in zip(weights, pieces) if p.parts > 1]
        if any(count % max(Spec.parse(spec).block[0], 1) for count in rows):
            raise source.error(f"{module}: expected parts of whole blocks of {spec}, got {rows[0]}")
        specs |= dict.fromkeys(fqns, spec)
    return specs, tied


def require_shared_factors(
    source: Source, names: Names, module: str, targets: list[Target]
) -> None:
    """Raises ValueError where gate and up of an expert have two factors: here a matrix has one."""
    for target in targets:
        factors: dict[int | None, object] = {}
        for piece in target.pieces:
            own = nvfp4_factors(source, names.weights[piece.source])
            if factors.setdefault(piece.expert, own) != own:
                raise source.error(
                    f"{module}.{target.name}: expected one factor for gate and up of an expert, "
                    f"got {factors[piece.expert]} and {own} in expert {piece.expert}"
                )


# ---- recipes -----------------------------------------------------------------------------------


def recipe_on_codes(recipe: Recipe, spec: str) -> Recipe:
    """Returns a recipe with the codes of a checkpoint as W.

    Raises:
        ValueError: x or g of the recipe cannot be multiplied with them.
    """
    fprop, dgrad = recipe.fprop, recipe.dgrad

    def product(a: str, b: str, fast: bool) -> Product:
        rules = {Spec.parse(a).rule, Spec.parse(b).rule}
        return Product(a, b, fast and rules <= {"tensor", "row"})

    is_read = Spec.parse(spec).transposes_exactly and not Spec.parse(dgrad.a).is_bf16
    backward = product(dgrad.a, spec if is_read else FORWARD_W, is_read and dgrad.fast)
    return Recipe(
        f"fprop={product(fprop.a, spec, fprop.fast)} dgrad={backward} wgrad={recipe.wgrad}"
    )


def recipes_of(
    model: nn.Module, source: Source, recipes: RecipeMap, specs: dict[str, str]
) -> RecipeMap:
    """Returns the recipe of each module that has codes, by name."""
    require_globs(recipes, [fqn for fqn, _ in model.named_modules()])
    texts = {}
    for fqn, spec in specs.items():
        module = fqn.rpartition(".")[0]
        given = recipes.find(module) or Recipe("bf16")
        try:
            texts[module] = recipe_on_codes(given, spec).text
        except ValueError as error:
            raise source.error(
                f"{module}: expected a recipe of x and gradients beside the checkpoint's {spec}, "
                f"got {given}: {error}"
            ) from None
    return RecipeMap("; ".join(f"{module or '*'}: {text}" for module, text in texts.items()))


def convert(
    model: nn.Module, source: Source, recipes: RecipeMap, codes: dict[str, Target], seed: int
) -> Report:
    """Converts the layers that have codes, and no others.

    Raises:
        ValueError: one of them cannot be converted. The model is unchanged then.
    """
    # FSDP2 keeps and gathers the values of codes, which nothing rounds again.
    report = quantize_(model, recipes, keep="nothing", seed=seed, gather="compute_dtype")
    rows = {name for name, _ in report.converted}
    wanted = {fqn if t.tensor.dim() == 3 else fqn.rpartition(".")[0] for fqn, t in codes.items()}
    if rows != wanted:
        restore_(model)
        reasons = dict(report.skipped)
        what = [f"{row}: {reasons.get(row, 'no layer reads it')}" for row in sorted(wanted - rows)]
        what += [f"{row}: no codes" for row in sorted(rows - wanted)]  # one of two of experts
        raise source.error_of_list("expected layers that read the codes", what)
    skipped = [(n, IN_HIGH_PRECISION if why == NO_GLOB else why) for n, why in report.skipped]
    return replace(report, skipped=skipped, gather={})


# ---- tensors -------------------------------------------------------------------------------------


def write_codes(
    source: Source,
    names: Names,
    target: Target,
    spec: str,
    memory: torch.device,
    made: dict[int, Tensor],
) -> None:
    """Gives a layer a parameter of codes, one to all that are tied."""
    like, module, name = target.tensor, target.module, target.name
    if id(like) not in made:
        codes = read_codes(source, names, target, spec, memory)
        made[id(like)] = nn.Parameter(codes, requires_grad=False)
        vars(made[id(like)]).update(attributes_of(like))
    setattr(module, name, made[id(like)])
    state = module if isinstance(module, RecipeState) else product_of(module, name)
    state = cast(RecipeState, state)
    state.has_loaded_codes, state.loaded_crc = True, crc_of(cast(QuantizedTensor, made[id(like)]))


def read_codes(
    source: Source, names: Names, target: Target, spec: str, memory: torch.device
) -> QuantizedTensor:
    """Reads codes and scales of each piece in turn."""
    parsed, like, shape = Spec.parse(spec), target.tensor, target.shape(is_coded=True)
    device = memory if like.is_meta else like.device
    codes, scale, amax = (
        torch.empty((*shape[:-2], *size) if size != (0,) else size, dtype=dtype, device=device)
        for dtype, size in tensors_of(parsed, *shape[-2:]).values()
    )
    for piece in target.pieces:
        weight = names.weights[piece.source]
        of_codes, of_scale = read_part(source, weight, spec)
        piece.within(codes).copy_(of_codes)
        piece.within(as_bytes(scale)).copy_(as_bytes(of_scale))
        if weight.factor is not None:
            amaxes = [nvfp4_amax(spec, *f) for f in nvfp4_factors(source, weight)]
            part = amax if piece.expert is None else amax[piece.expert]
            part.copy_(torch.tensor([cast(Amax, a).value for a in amaxes]).reshape(part.shape))
    if not parsed.has_blocks:
        amax.copy_(scale * E4M3_MAX)
    quantized = Quantized(codes, scale, amax, spec, shape, target.is_row_major)
    rowwise, columnwise = (None, quantized) if target.is_row_major else (quantized, None)
    return QuantizedTensor(rowwise, columnwise, like.dtype)


def as_bytes(scale: Tensor) -> Tensor:
    """Returns one-byte scales in a dtype that copies on every device, others as they are."""
    return scale.view(torch.uint8) if scale.itemsize == 1 else scale
