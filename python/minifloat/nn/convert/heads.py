"""Where a network ends: its head, which makes logits of the last hidden layer, and its blocks.

Blocks are the modules of a numbered list, `layers.0`, `layers.1` and so on, outside other numbered
modules. Of several lists the one with the most parameters counts, of equal ones the last. Where
that one is an encoder's and there is a decoder beside, the decoder's counts.

A linear layer is a head where one of these holds. A report names the first:

    name      it is called as in HEADS, or is within a module so called that has linear layers and
              norms alone, outside numbered modules; by a name other than `lm_head` only in a
              module that holds the blocks, and by one of AMBIGUOUS only where there are blocks
    tie       its weight is that of an embedding
    getter    get_output_embeddings() of a module, as transformers' models have it, returns it or a
              module that holds it
    rows      it has an output for each row of an embedding of tokens, and another number of inputs.
              It is outside numbered modules, or in a list of such layers alone
    position  nothing else was found, it is the last linear layer, outside numbered modules and
              behind some, its inputs are as many as an embedding of tokens is wide, and its outputs
              as many as that has rows, padded to a multiple of PADDED by less than PADDING

An embedding of tokens is an nn.Embedding, or a module called an embedding with a weight (rows,
width), of at least FEWEST rows, outside numbered modules, whose name has no text of OTHER_TABLES.
So the last layer of a classifier, of a vision backbone, of an MLP or of a Sequential is no head,
unless HEADS has its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..names import join, own_parameter
from ..registry import is_linear, named_modules

HEADS = (
    "lm_head",  # Hugging Face, torchtitan
    "output",  # torchtitan 0.2
    "head",  # timm
    "output_layer",  # Megatron
    "embed_out",  # GPT-NeoX
    "proj_out",  # Whisper, diffusers
)
AMBIGUOUS = ("output", "proj_out")  # projections within a block have these names too
OF_LANGUAGE = ("lm_head",)  # heads wherever they are
OTHER_TABLES = ("pos", "wpe", "type", "segment")  # of positions and of kinds of tokens
FEWEST = 16  # rows: queries, kinds of masks and classes have fewer
PADDED, PADDING = 64, 128  # vocabularies are padded to a multiple of 64, by less than 128


def is_numbered(fqn: str) -> bool:
    """Tells whether a name is that of an entry of a list, or of a module within one."""
    return any(part.isdecimal() for part in fqn.split("."))


def heads_of(model: nn.Module) -> dict[str, str]:
    """Finds heads: the name of each layer, or of a module that holds them -> how it was found."""
    modules = dict(named_modules(model))
    linears = {fqn: m for fqn, m in modules.items() if isinstance(m, nn.Linear)}
    found: dict[str, str] = dict.fromkeys(named_heads(modules, blocks_of(model)), "the head")

    def add(fqn: str, how: str) -> None:
        if not any(fqn == head or fqn.startswith(f"{head}.") for head in found):
            found[fqn] = f"the head, {how}"

    tables = dict(tables_of(modules))
    owners = {id(table._parameters["weight"]): fqn for fqn, table in tables.items()}
    for fqn, linear in linears.items():
        if (owner := owners.get(id(linear._parameters.get("weight")))) is not None:
            add(fqn, f"tied to {owner}")
    for holder, fqn in returned_heads(modules):
        add(fqn, f"which {holder or 'the model'} returns as its output embeddings")
    sizes = {
        (table.weight.shape[0], table.weight.shape[1]): fqn
        for fqn, table in tables.items()
        if not is_numbered(fqn) and not any(t in fqn.rpartition(".")[2] for t in OTHER_TABLES)
    }
    for fqn, linear in linears.items():
        outputs = linear.out_features
        for (rows, _), table in sizes.items():
            if rows == outputs != linear.in_features and has_place_of_head(fqn, modules):
                add(fqn, f"with an output for each of the {rows} rows of {table}")
    if not found and (last := last_behind_blocks(linears)) is not None:
        inputs, outputs = linears[last].in_features, linears[last].out_features
        for (rows, width), table in sizes.items():
            is_padded = rows <= outputs < rows + PADDING and outputs % PADDED == 0
            if inputs == width != outputs and is_padded:
                add(last, f"the last layer, with {outputs} outputs for the {rows} rows of {table}")
    return found


def named_heads(modules: Mapping[str, nn.Module], blocks: Sequence[str]) -> Iterator[str]:
    """Yields the names of heads that HEADS has, by its rule."""
    for fqn, module in modules.items():
        parent, _, name = fqn.rpartition(".")
        if name not in HEADS or is_numbered(parent) or not is_made_of_linears(module):
            continue
        holds_blocks = not parent or any(block.startswith(f"{parent}.") for block in blocks)
        if name in OF_LANGUAGE or (holds_blocks if blocks else name not in AMBIGUOUS):
            yield fqn


def is_made_of_linears(module: nn.Module) -> bool:
    """Tells whether a module is, or has, linear layers, and beside them vectors alone, of norms."""
    has_linear = False
    for each in module.modules():
        if is_linear(each):
            has_linear = True
        elif any(is_lazy(p) or p.dim() > 1 for p in each.parameters(recurse=False)):
            return False
    return has_linear


def tables_of(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yields embeddings: modules with a weight (rows, width) whose class is one or says so."""
    for fqn, module in modules.items():
        is_one = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        is_one |= "embedding" in type(module).__name__.lower()
        weight = own_parameter(module, "weight")
        if weight is None or is_lazy(weight):
            continue
        if is_one and weight.dim() == 2 and len(weight) >= FEWEST:
            yield fqn, module


def returned_heads(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Yields (module, linear layer) for what get_output_embeddings() of modules returns."""
    for fqn, module in modules.items():
        getter: Callable[[], object] | None = getattr(module, "get_output_embeddings", None)
        if not callable(getter):
            continue
        try:
            returned = getter()
        except (AttributeError, NotImplementedError):  # transformers' ways to say that it has none
            continue
        inner = set(returned.modules()) if isinstance(returned, nn.Module) else set()
        for head, layer in modules.items():
            if layer in inner and isinstance(layer, nn.Linear):
                yield fqn, head


def has_place_of_head(fqn: str, modules: Mapping[str, nn.Module]) -> bool:
    """Tells whether a linear layer is outside numbered modules, or in a list of its like alone."""
    parent, _, name = fqn.rpartition(".")
    if not parent or is_numbered(parent) or not name.isdecimal():
        return not is_numbered(fqn)
    beside = list(modules[parent].children())
    return (
        all(isinstance(m, nn.Linear) for m in beside) and len({m.out_features for m in beside}) == 1
    )


def last_behind_blocks(linears: Iterable[str]) -> str | None:
    """Returns the last linear layer, where it is outside numbered modules and behind some."""
    *others, last = [*linears] or [""]
    return last if any(map(is_numbered, others)) and not is_numbered(last) else None


def blocks_of(model: nn.Module) -> list[str]:
    """Returns the names of a model's blocks, in order."""
    lists: dict[str, dict[str, nn.Module]] = {}
    for fqn, module in named_modules(model):
        parent, _, name = fqn.rpartition(".")
        if name.isdecimal() and not is_numbered(parent):
            lists.setdefault(parent, {})[join(parent, name)] = module
    sizes = {
        parent: sum(p.numel() for m in modules.values() for p in m.parameters() if not is_lazy(p))
        for parent, modules in reversed(lists.items())
    }
    if not sizes:
        return []
    largest = max(sizes, key=sizes.__getitem__)
    for place, part in enumerate(parts := largest.split(".")):
        decoder = join(*parts[:place], part.replace("encoder", "decoder"))
        beside = [p for p in sizes if p == decoder or p.startswith(f"{decoder}.")]
        if "encoder" in part and beside:
            largest = max(beside, key=sizes.__getitem__)
    return list(lists[largest])
