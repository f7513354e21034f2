"""The weights of a model as servers read them: which, under which names, and what is against it.

A server's layer is rows of a parameter: all of a linear layer's weight, or one expert's gate within
gate_up_proj (E, 2I, D). Which rows, in which order, is found by converting the rows' numbers, in a
tensor of the parameter's shape, as a checkpoint's values are converted:

    transformers   revert_weight_conversion, which save_pretrained calls
    torchtitan     to_hf of the model's StateDictAdapter
    others         the parameter's own name; of experts `experts.w1` becomes `experts.3.w1`
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..moe.convert.converted import NamedExperts
from ..moe.layer import Experts
from ..nn.grouped_product import GroupedProduct, products_by_weight
from ..nn.linear import Linear
from ..nn.names import clean_name, join
from ..nn.registry import is_distributed
from ..nn.shared_amax import AmaxGroup
from ..nn.state.recipe_state import ExpertRange, RecipeState
from ..recipe import operand_names
from ..spec import Spec
from ..tensor.quantized import Quantized, quantize
from ..tensor.quantized_tensor import QuantizedTensor
from .ranks import whole_of, whole_shape, without_values
from .schemes import Scheme, Storage, storage_of

Names = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]  # own names -> a checkpoint's
GATE_AND_UP = "w13"  # of mf.MoE: gate and up
SUFFIX = ".weight"  # of a name; a model that is one layer has `weight` alone
UNNAMED = "a checkpoint has no name for it"


@dataclass(frozen=True)
class Part:
    """A layer of the folder.

    Args:
        name: of the layer, without `.weight`; empty where the model is the layer.
        expert: its matrix of the parameter.
        rows: of that matrix, in the layer's order.
    """

    name: str
    expert: int
    rows: Tensor


@dataclass(frozen=True)
class Weight:
    """A parameter that products read as codes.

    Args:
        name: of the parameter in the model's state dict.
        layer: the name of the module that multiplies: a linear layer's, or a 3D parameter's.
        state: of the recipe.
        parameter: (N, K) or (E, N, K) in the whole model, maybe this rank's part of it.
        shape: of the whole parameter.
        storage: in the folder.
        parts: the layers of the folder that it becomes.
    """

    name: str
    layer: str
    state: RecipeState
    parameter: Tensor
    shape: tuple[int, ...]
    storage: Storage
    parts: tuple[Part, ...]

    @property
    def spec(self) -> Spec:
        return Spec.parse(self.state.recipe.fprop.b)

    @property
    def amax_group(self) -> AmaxGroup | None:
        """The layers that share an amax of W; None: W has its own."""
        return getattr(self.state, "amax_group", None)

    @property
    def delayed_amax(self) -> Tensor | None:
        """The amax by which delayed scaling casts W in a forward now; None: W's own.

        () or, of this rank's experts, (n).
        """
        history = self.state.amax_history
        if history is None or not self.spec.is_delayed:
            return None
        return history[operand_names().index("w/fprop"), ..., 0]

    def whole(self) -> Tensor:
        """Gathers the parameter; all ranks call it together."""
        return whole_of(self.parameter, self.state.expert_range)

    def whole_amax(self, shared: Mapping[str, Tensor]) -> Tensor | None:
        """Gathers the amax by which a forward casts W; all ranks call it together.

        shared: amaxes of W that layers share, by the layer's name.

        Returns:
            () or (E); None: W's own.
        """
        if self.layer in shared:
            return shared[self.layer]
        amax = self.delayed_amax
        return None if amax is None else whole_of(amax, self.state.expert_range)

    def cast(self, whole: Tensor, dtype: torch.dtype | None, amax: Tensor | None) -> Quantized:
        """Returns the codes that a forward reads.

        Args:
            whole: the parameter.
            dtype: what forwards read it in; None: its own.
            amax: what `whole_amax` returned.
        """
        if isinstance(whole, QuantizedTensor):
            return whole.direction(self.spec.text, False)
        whole = whole.to(dtype or whole.dtype).contiguous()
        amax = None if amax is None else amax.to(whole.device)
        return quantize(whole, self.spec.text, amax=amax)

    def codes_without_values(self) -> Quantized:
        """Returns tensors of the shapes and dtypes that `cast` returns, on meta."""
        return quantize(torch.empty(self.shape, device="meta"), self.spec.text)

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter."""
        return getattr(self.parameter, "_local_tensor", self.parameter).detach()

    def is_finite(self) -> bool:
        """Tells whether this rank's part of the parameter has neither Inf nor NaN."""
        local = self.local
        if isinstance(local, QuantizedTensor):
            local = local.direction(self.spec.text, False).scale.float()
        return bool(torch.isfinite(local).all())


# ---- names ---------------------------------------------------------------------------------------


def is_transformers(model: object) -> bool:
    """Tells whether a model is one of transformers, without importing it."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def names_of(model: nn.Module, adapter: Any) -> Names:
    """Returns the conversion of a model's state dict to a checkpoint's."""
    if adapter is not None:
        return adapter.to_hf
    if is_transformers(model):
        from transformers.core_model_loading import revert_weight_conversion

        return partial(revert_weight_conversion, cast(Any, model))
    return partial(own_names, model)


def own_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names one matrix of experts after its parameter: experts.w13 -> experts.0.w1.weight, …"""
    found, modules = {}, {clean_name(fqn): module for fqn, module in model.named_modules()}
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        module = modules.get(parent)
        if module is None or tensor.dim() != 3 or leaf not in products_by_weight(module):
            found[name] = tensor
            continue
        keys = own_parts(module, leaf)
        for key, part in zip(keys, tensor.chunk(len(keys), dim=1)):
            names = (f"{join(parent, str(e))}.{key}{SUFFIX}" for e in range(len(part)))
            found |= dict(zip(names, part))
    return found


def own_parts(module: nn.Module, leaf: str) -> tuple[str, ...]:
    """Returns the names that a matrix of experts has in a file, one for each run of its rows."""
    return ("w1", "w3") if isinstance(module, Experts) and leaf == GATE_AND_UP else (leaf,)


def layer_of(key: str) -> str | None:
    """Returns the name of the layer whose weight has this name; None: it is no layer's weight."""
    leaf = SUFFIX.removeprefix(".")
    return "" if key == leaf else key.removesuffix(SUFFIX) if key.endswith(SUFFIX) else None


def parts_of(name: str, shape: tuple[int, ...], convert: Names, scheme: Scheme) -> list[Part] | str:
    """Returns the layers that a parameter becomes, or why it cannot be cut into them."""
    *batch, rows, columns = shape
    numbers = torch.arange(rows * (batch[0] if batch else 1), dtype=torch.int32)
    in_order = torch.arange(columns, dtype=torch.int32)
    try:
        by_row = convert({name: numbers.view(*batch, rows, 1).expand(shape)})
        by_column = convert({name: in_order.expand(shape)})
    except Exception as error:
        return f"its name in a checkpoint was not found ({type(error).__name__}: {error})"
    found = []
    for key, value in by_row.items():
        layer = layer_of(key)
        if layer is None or value.dim() != 2 or value.shape[1] != columns or not value.numel():
            return f"a checkpoint has it as {key} {tuple(value.shape)}, which is no linear layer"
        of_layer = value[:, 0]
        expert = int(of_layer[0]) // rows
        own = of_layer.long() - expert * rows
        is_rows = torch.equal(value[:, -1], of_layer) and own.min() >= 0 and own.max() < rows
        if not is_rows or any(not torch.equal(by_column[key][i], in_order) for i in (0, -1)):
            return f"a checkpoint's {key} is not made of whole rows of one matrix"
        steps = torch.arange(len(own)) + own[0]
        if scheme.block and (own[0] % scheme.block[0] or not torch.equal(own, steps)):
            return f"a checkpoint's {key} begins within a block of {scheme.block[0]} rows"
        found.append(Part(layer, expert, own))
    return found or UNNAMED


# ---- which weights -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The tensors of a model, sorted.

    Args:
        weights: parameters that become codes.
        others: name -> tensor of the rest, which are written as they are.
        ignored: the layers among the rest that a server could take for quantized ones; those of
            experts have {} for their number.
        problems: name of a converted layer -> why it cannot be written.
        divided: name of a tensor of experts that ranks divide -> the range that this rank has.
        by_modules: whether a loader, transformers, looks for the names of modules, which may not be
            those of a checkpoint.
    """

    weights: list[Weight]
    others: dict[str, Tensor]
    ignored: list[str]
    problems: dict[str, str]
    divided: dict[str, ExpertRange]
    by_modules: bool


def find(
    model: nn.Module,
    adapter: Any,
    convert: Names,
    weight_only: bool,
    amaxes: Mapping[str, Tensor],
) -> Found:
    """Sorts the tensors of a model into those that become codes, and others."""
    found = Found([], {}, [], {}, divided_experts(model), is_transformers(model))
    if hasattr(model, "peft_config"):
        found.problems["adapters"] = "expected adapters that are merged, got a model of PEFT's"
    by_transformers = getattr(getattr(model, "config", None), "distributed_config", None)
    if any(getattr(by_transformers, size, 1) > 1 for size in ("tp_size", "ep_size")):
        found.problems["ranks"] = "transformers divided the model by its own tensor parallelism"
    skipped = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    owners: dict[int, str] = {}
    products = dict(converted_weights(model, found.problems))
    quantized = set(products)
    for raw_name, tensor in model.state_dict(keep_vars=True).items():
        name = clean_name(raw_name)
        if name in skipped:
            continue
        if not isinstance(tensor, Tensor):
            found.problems[name] = f"a checkpoint has tensors alone, got {type(tensor).__name__}"
            continue
        first = owners.setdefault(id(tensor), name)
        if name not in products:
            if first == name:
                found.others[name] = tensor
            continue
        layer, state = products.pop(name)
        tied = [n for n, t in model.named_parameters(remove_duplicate=False) if t is tensor]
        weight = weight_of(name, layer, state, tensor, convert, weight_only, layer in amaxes)
        if len(tied) > 1:
            weight = f"its weight is tied to {' and '.join(t for t in tied if t != raw_name)}"
        if isinstance(weight, str):
            found.problems[layer] = weight
        else:
            found.weights.append(weight)
    for name, tensor in found.others.items() if adapter is not None else ():
        empty = without_values(tensor, found.divided.get(name))
        if isinstance(tensor, nn.Parameter) and not convert({name: empty}):
            found.problems[name] = UNNAMED
    for name, (layer, _) in products.items():
        why = "the state dict has no tensor under its weight's name"
        if name in skipped:
            why = "its class leaves the weight out of checkpoints"
        found.problems.setdefault(layer, why)
    for fqn, module in model.named_modules():
        if found.by_modules and "conv1d_class" in vars(module):
            found.problems[clean_name(fqn)] = "a checkpoint has its weight as (K, N), of a Conv1D"
    plain = {n: t for n, t in layers_of(model).items() if n not in quantized}
    found.ignored.extend(ignored_layers(plain, adapter, convert, found.by_modules))
    return found


def ignored_layers(
    plain: Mapping[str, Tensor], adapter: Any, convert: Names, by_modules: bool
) -> list[str]:
    """Returns the names of layers that are not quantized, each once.

    plain: their weights by name.
    """
    names: list[str] = []
    for name, tensor in plain.items():
        names += layer_names(name, tensor, convert) or names_in_table(adapter, name)
        if by_modules and tensor.dim() == 2:
            names.append(name.removesuffix(SUFFIX))
    return list(dict.fromkeys(names))


def converted_weights(
    model: nn.Module, problems: dict[str, str]
) -> Iterator[tuple[str, tuple[str, RecipeState]]]:
    """Yields (parameter's name, (layer's name, state)) of what mf.quantize_ converted."""
    for raw_fqn, module in model.named_modules():
        fqn = clean_name(raw_fqn)
        if isinstance(module, Linear):
            yield join(fqn, "weight"), (fqn, module)
            if "weight" not in module._parameters:
                problems[fqn] = "its weight is computed by a parametrization or an adapter"
        by_weight = products_by_weight(module)
        if not isinstance(module, NamedExperts):
            for name, product in by_weight.items():
                yield join(fqn, name), (join(fqn, name), product)
        for product in module.children():
            is_named = product in by_weight.values() and not isinstance(module, NamedExperts)
            if isinstance(product, GroupedProduct) and not is_named:
                problems[product.fqn] = "its module's forward alone says how it reads a parameter"


def weight_of(
    name: str,
    layer: str,
    state: RecipeState,
    parameter: Tensor,
    convert: Names,
    weight_only: bool,
    has_amax: bool,
) -> Weight | str:
    """Returns a weight with its layers in the folder, or why there are none."""
    w, x = (Spec.parse(spec) for spec in (state.recipe.fprop.b, state.recipe.fprop.a))
    storage = storage_of(w, x, weight_only, has_amax)
    if isinstance(storage, str):
        return storage
    local = getattr(parameter, "_local_tensor", parameter)
    if local.is_meta:
        return "its weight has no values, on meta"
    shape = whole_shape(parameter, state.expert_range)
    is_part = is_distributed(parameter) or local.shape != shape
    if is_part and isinstance(local, QuantizedTensor):
        return "ranks have parts of its codes (primary=True); export it before they divide it"
    if isinstance(state, GroupedProduct) and state.is_row_major:
        return "its experts are (E, K, N), which servers do not read as linear layers"
    if len(shape) not in (2, 3):
        return f"expected a matrix, or one for each expert, got {shape}"
    if shape[-1] % storage.scheme.columns:
        return f"expected inputs as a multiple of {storage.scheme.columns}, got {shape[-1]}"
    if storage.needs_input_amax and not has_amax:
        return (
            f"servers cast x as {x.text} by an amax that is known before; pass "
            "amaxes=mf.calibrate(model, batches), or weight_only=True"
        )
    parts = parts_of(name, shape, convert, storage.scheme)
    if isinstance(parts, str):
        return parts
    return Weight(name, layer, state, parameter, shape, storage, tuple(parts))


def divided_experts(model: nn.Module) -> dict[str, ExpertRange]:
    """Returns the tensors of experts that mf.expert_parallel divided, converted or not, by name."""
    return {
        join(clean_name(fqn), name): module.parallel.expert_range
        for fqn, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Experts) and module.parallel is not None
        for name in module._parameters
    }


def layers_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of layers, routers and experts by name: matrices that embed nothing."""
    return {
        join(clean_name(fqn), name): parameter
        for fqn, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if not isinstance(module, nn.Embedding)
        and parameter is not None
        and (parameter.dim() == 3 or (name == "weight" and parameter.dim() == 2))
    }


def layer_names(name: str, tensor: Tensor, convert: Names) -> list[str]:
    """Returns the layers that a parameter is in a checkpoint, once for all experts: experts.{}.w1.

    A parameter that a checkpoint has whole is called by its module where that is of experts. Others
    of three dimensions, such as position embeddings, belong to no layer.
    """
    keys = convert({name: without_values(tensor)})
    if tensor.dim() == 2:
        return [key if (layer := layer_of(key)) is None else layer for key in keys]
    found = (pattern_of(key.removesuffix(SUFFIX)) for key in keys)
    names = (p if "{}" in p else p.rpartition(".")[0] for p in found)
    return [n for n in dict.fromkeys(names) if "{}" in n or "expert" in n.rpartition(".")[2]]


def names_in_table(adapter: Any, name: str) -> list[str]:
    """Returns the layer that a torchtitan adapter has no tensor of, such as a head that is tied."""
    table: dict[str, str | None] = getattr(adapter, "from_hf_map", {})
    layers = (layer_of(key) for key, own in table.items() if own == name)
    return [layer for layer in layers if layer is not None]


def pattern_of(layer: str) -> str:
    """Returns the name of an expert's layer with {} for the expert's number."""
    return re.sub(r"\.\d+(\.[^.]+)$", r".{}\1", layer)
