"""Finds the ranks that end a training step together in mf.step, by the names of their layers.

    group given                       all its ranks; each raises an error where their layers differ
    group=None, equal lists           all ranks
    group=None, disjoint lists        pipeline stages: each rank with the ranks of an equal list
    group=None, lists that overlap    an error on every rank, with the first difference

Before ranks reduce amaxes or counts, they compare their lists in a handshake (handshake.py): in the
first mf.step of a model, and in each step where any ranks reduce something. The latter makes a rank
that has not changed raise the error too. Where nothing is reduced, later steps have no handshake:
recipes without delayed scaling, or one rank a stage. A rank whose list has changed then calls the
others to one in the step after, by a key in the group's store, which all look up in each step. It
cannot wait at once: a rank whose step has ended may wait for it in a collective of the next.

A rank whose own checks fail, as where a balance loss was not read, passes that error to the
handshake, and all ranks raise it.

Disjoint lists may also be replicas that were converted differently, which is an error. They count
as stages only if one call of mf.quantize_ has converted the model, or each is a PipelineStage of
torch, or a library's (nn/registry.py).
"""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, zip_longest
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from ..nn.names import PRODUCT, join, unwrapped
from ..nn.registry import stage_of, stages_in
from ..nn.state.recipe_state import RecipeState
from .handshake import (
    call_to_handshake,
    has_others,
    meet,
    number_of,
    raise_fault,
    remove_call,
    rounds,
)

STEP = "step: expected all {} ranks to call mf.step for the same layers ({})"
SAME = "step: expected all ranks to have the same layers in one order"
REMEDY = (
    "; where they are stages of a pipeline, call mf.quantize_ on the whole model before it is cut, "
    "or pass group, the ranks that have the same stage"
)

ROUTER = "router"  # in the place of a layer's recipe

Layers = Sequence[tuple[str, RecipeState]]
Routers = Sequence[tuple[str, nn.Module]]


@dataclass
class Agreed:
    """The result of the last handshake of a model.

    Args:
        found: the layers of this rank at that time.
        text: that describes them to other ranks.
        number: a hash of the lists of all ranks. It is what ranks compare in the handshakes of
            later steps, because the texts of pipeline stages differ.
        group: the ranks that have this rank's layers; None: this one alone.
        is_reduced: whether any ranks reduce anything.
        round: the number of handshakes of the ranks until then: the agreement's name in the store.
        steps: those that have ended without a handshake since.
    """

    found: list[tuple[Any, ...]]
    text: str
    number: int
    group: dist.ProcessGroup | None
    is_reduced: bool
    round: int
    steps: int = 0


Groups = weakref.WeakKeyDictionary[dist.ProcessGroup, Any]
agreements: weakref.WeakKeyDictionary[nn.Module, Groups] = weakref.WeakKeyDictionary()
stage_groups: Groups = weakref.WeakKeyDictionary()  # -> the groups of some of its ranks


def group_of_step(
    model: nn.Module,
    layers: Layers,
    routers: Routers,
    group: dist.ProcessGroup | None,
    fault: str | None = None,
) -> dist.ProcessGroup | None:
    """Finds the ranks that reduce amaxes and counts with this one; None: it is alone.

    Args:
        model: of mf.step.
        layers: (name, layer) under a recipe.
        routers: (name, router), whose counts are reduced.
        group: of mf.step.
        fault: why this rank cannot end the step; None: it can.

    Raises:
        ValueError: a rank has a fault or is missing, or the ranks' layers differ; on every rank
            that is there. Where steps wait for nobody, a fault is raised on its rank alone.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise_fault(fault)
        return None
    ranks = cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)
    if dist.get_world_size(ranks) == 1:
        raise_fault(fault)
        return None
    found = [_described(name, layer) for name, layer in layers]
    found += [_described_router(name, router) for name, router in routers]
    # A list of stages may be a new object in each step.
    key = next(iter(model.children()), model) if isinstance(model, nn.ModuleList) else model
    by_group = agreements.setdefault(key, weakref.WeakKeyDictionary())
    agreed: Agreed | None = by_group.get(ranks)
    is_known = agreed is not None and agreed.found == found
    if agreed is not None and not _is_due(agreed, ranks, is_known, _reduces(found)):
        raise_fault(fault)
        agreed.steps += 1
        return agreed.group
    if agreed is not None and is_known:
        text, number = agreed.text, agreed.number
    else:
        text = _text(model, layers, routers, found)
        number = number_of("step", text)
    first = found[0][0] if found else "none"
    texts = meet(
        "mf.step of",
        text,
        ranks,
        expected=STEP.format("{}", first),
        number=number,
        fault=fault,
    )
    before = agreed
    if texts is None and is_known:
        assert before is not None
        agreed = replace(before, round=rounds.get(ranks, 0), steps=0)
    else:
        agreed = _agree(ranks, found, text, texts, group is None)
    if before is not None and not before.is_reduced:
        remove_call(ranks, before.round)
    by_group[ranks] = agreed
    return agreed.group


def _is_due(agreed: Agreed, ranks: dist.ProcessGroup, is_known: bool, reduces: bool) -> bool:
    """Tells whether ranks compare their lists in this step.

    Args:
        agreed: the result of their last handshake.
        ranks: of mf.step.
        is_known: whether this rank's list is the one that was compared.
        reduces: whether it has something to reduce, now.
    """
    if agreed.is_reduced or not has_others(ranks):
        return True
    at: int | None = None
    if not is_known:
        # Before a reduction with the ranks of the group it waits, for those that have changed too.
        at = agreed.steps if reduces and agreed.group is not None else agreed.steps + 1
    at = call_to_handshake(ranks, agreed.round, at)
    return at is not None and at <= agreed.steps


# ---- what ranks compare --------------------------------------------------------------------------


def _described(name: str, layer: RecipeState) -> tuple[Any, ...]:
    """Returns what ranks compare of a layer; its first item is its name in the converted model."""
    history, rule = layer.amax_history, layer.delayed
    kept, sizes = layer.expert_range, None
    if history is not None:
        experts = () if history.dim() == 2 else (kept.experts if kept else history.shape[1],)
        sizes = (*experts, history.shape[-1] - 1, rule.amax_algorithm, rule.margin)
    shape = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    return (
        layer.fqn or name,
        layer.recipe.text,
        shape,
        sizes,
        layer.training,
        layer.conversion,
        name,
    )


def _described_router(name: str, router: Any) -> tuple[Any, ...]:
    settings = tuple(getattr(router, setting) for setting in router.SETTINGS)
    has_bias = router.expert_bias is not None
    return (name, ROUTER, router.SETTINGS, (*settings, has_bias), router.training, None)


def _reduces(found: Sequence[tuple[Any, ...]]) -> bool:
    """Tells whether layers, as described, have amaxes or counts to reduce."""
    return any(layer[3] is not None for layer in found)


def _line(found: tuple[Any, ...]) -> str:
    """Returns the words for a layer in an error."""
    name, recipe, shape, sizes, training, *_ = found
    mode = "" if training else ", in evaluation mode"
    if recipe == ROUTER:
        settings = ", ".join(f"{key}={value!r}" for key, value in zip(shape, sizes))
        return f"{name}: a router of {settings}, {'a' if sizes[-1] else 'no'} bias{mode}"
    matrix = "" if shape[0] is None else f", weight {shape}"
    if sizes is None:
        return f"{name}: {recipe}{matrix}{mode}"
    *experts, length, algorithm, margin = sizes
    many = f" for each of {experts[0]} experts" if experts else ""
    return (
        f"{name}: {recipe}{matrix}, {length} steps of history{many} ({algorithm}, margin {margin})"
        f"{mode}"
    )


def _text(
    model: nn.Module, layers: Layers, routers: Routers, found: Sequence[tuple[Any, ...]]
) -> str:
    """Returns what the other ranks read of this one's layers."""
    named = [*found[: len(layers)]]
    for (name, _), router in zip(routers, found[len(layers) :]):
        named.append((_whole_name(name, layers), *router[1:]))
    return json.dumps(
        {
            "stage": _stage_of(model),
            "layers": [[layer[0], _line(layer)] for layer in named],
            "conversions": sorted({layer.conversion for _, layer in layers}),
            "is_reduced": _reduces(found),
        }
    )


def _whole_name(name: str, layers: Layers) -> str:
    """Returns a router's name in the converted model, of which this one may be a part.

    It is derived from a layer of the same module, or of one around it: layers keep the names that
    they had in that model.
    """
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        parent = ".".join(parts[:depth])
        for local, layer in layers:
            if parent and not local.startswith(f"{parent}."):
                continue
            rest = local[len(parent) + 1 :] if parent else local
            rest = rest.removesuffix(PRODUCT)
            if layer.fqn == rest or layer.fqn.endswith(f".{rest}"):
                return join(layer.fqn[: -len(rest)].rstrip("."), *parts[depth:])
    return name


def _stage_of(model: nn.Module) -> list[int] | None:
    """Finds the indices of the pipeline stages that have the model, or modules of a list."""
    if stages := stages_in(model):
        return sorted(cast(int, stage_of(stage)) for stage in stages)
    pipelining = sys.modules.get("torch.distributed.pipelining.stage")
    if pipelining is None:
        return None
    kind, inner = pipelining._PipelineStageBase, unwrapped(model)
    modules = [model, inner, *(inner.children() if isinstance(inner, nn.ModuleList) else ())]
    modules += [unwrapped(module) for module in modules]
    found = set()
    for referrer in gc.get_referrers(*modules):
        holders = [referrer] if isinstance(referrer, kind) else gc.get_referrers(referrer)
        if not (
            isinstance(referrer, kind) or (isinstance(referrer, dict) and "submod" in referrer)
        ):
            continue
        found |= {holder.stage_index for holder in holders if isinstance(holder, kind)}
    return sorted(found) or None


# ---- who reduces ---------------------------------------------------------------------------------


def _agree(
    ranks: dist.ProcessGroup,
    found: list[tuple[Any, ...]],
    text: str,
    texts: list[str] | None,
    may_be_stages: bool,
) -> Agreed:
    """Returns what the ranks' texts mean; None: all have `text`, which is this rank's.

    Raises:
        ValueError: the lists overlap, or are no stages of one model.
    """
    if texts is None:
        number, is_reduced = number_of("step", text), json.loads(text)["is_reduced"]
        return Agreed(found, text, number, ranks, is_reduced, rounds.get(ranks, 0))
    lists = [json.loads(of_rank) for of_rank in texts]
    owners: dict[str, list[int]] = {}  # of the ranks with equal lists
    for rank, of_rank in enumerate(lists):
        owners.setdefault(json.dumps([of_rank["stage"], of_rank["layers"]]), []).append(rank)
    sets = list(owners.values())
    for (i, *_), (j, *_) in combinations(sets, 2):
        _require_stages(i, lists[i], j, lists[j], may_be_stages)
    own = next(members for members in sets if dist.get_rank(ranks) in members)
    group = _group_among(ranks, sets, own)
    is_reduced = any(lists[members[0]]["is_reduced"] and len(members) > 1 for members in sets)
    number = number_of("step of stages", json.dumps(sorted(owners.items())))
    return Agreed(found, text, number, group, is_reduced, rounds.get(ranks, 0))


def _require_stages(i: int, a: Any, j: int, b: Any, may_be_stages: bool) -> None:
    """Raises ValueError where the lists of ranks i and j are not those of two stages."""
    names = [{name for name, _ in of_rank["layers"]} for of_rank in (a, b)]
    stages = a["stage"], b["stage"]
    are_stages = None not in stages and not set(stages[0]) & set(stages[1])
    of_one = bool(set(a["conversions"]) & set(b["conversions"]) - {0})
    if may_be_stages and not names[0] & names[1] and (are_stages or of_one):
        return
    if not any(names):
        return
    if a["layers"] == b["layers"]:
        first = a["layers"][0][0]
        raise ValueError(
            f"{SAME}, but layer {first!r} is of stage {stages[0]} on rank {i} and of stage "
            f"{stages[1]} on rank {j}{REMEDY}"
        )
    for at, (mine, other) in enumerate(zip_longest(a["layers"], b["layers"])):
        if mine != other:
            has = [f"{line[1]!r}" if line else "none" for line in (mine, other)]
            raise ValueError(
                f"{SAME}, but layer {at} is {has[0]} on rank {i} and {has[1]} on rank {j}{REMEDY}"
            )


def _group_among(
    ranks: dist.ProcessGroup, sets: list[list[int]], own: list[int]
) -> dist.ProcessGroup | None:
    """Returns the group of one of the sets; all ranks make the groups of all sets, once."""
    if len(sets) == 1:
        return ranks
    made = stage_groups.setdefault(ranks, {})
    for members in sets:
        key = tuple(members)
        if len(members) > 1 and key not in made:
            made[key] = dist.new_group(list(members))
    return made.get(tuple(own))
