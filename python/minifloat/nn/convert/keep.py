"""What stays in high precision under every recipe: the policies that `keep` names.

    "head"         the head. The default of mf.quantize_, `minifloat train` and torchtitan's section
    "nvfp4_paper"  the head, and the last blocks, as NVIDIA pretrained in NVFP4 (arXiv 2509.25149,
                   section 4): at most 15% of the blocks, and at least one
    "nothing"      no layer

Published FP8, MXFP8 and MXFP4 runs keep the head alone. Routers beside experts stay under every
policy.

The head is the linear layer that a name in HEADS calls, or one within a module so called, outside
numbered modules; those of AMBIGUOUS only beside numbered modules. A recipe map that names it by
another glob than "*" decides instead. Blocks are the modules of a numbered list, `layers.0`,
`layers.1` and so on, outside other numbered modules: of several lists the one with the most
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from torch import nn

from ...checks import require_one_of
from ..names import clean_name, join

Keep = Literal["head", "nvfp4_paper", "nothing"]
KEEPS: tuple[str, ...] = get_args(Keep)
DEFAULT_KEEP: Keep = "head"

HEADS = (
    "lm_head",  # Hugging Face, torchtitan
    "output",  # torchtitan 0.2
    "head",  # timm
    "output_layer",  # Megatron
    "embed_out",  # GPT-NeoX
    "proj_out",  # Whisper, diffusers
)
AMBIGUOUS = ("output", "proj_out")  # projections within a block have these names too
LAST_PERCENT = 15  # of the blocks


def kept_by(keep: str, model: nn.Module, globs_of: Callable[[str], list[str]]) -> dict[str, str]:
    """Returns the modules that a policy keeps, with all that they hold: name -> the reason.

    Args:
        keep: the policy's name.
        model: the model.
        globs_of: name of a layer -> the globs of the recipe map that match it.

    Raises:
        ValueError: there is no such policy, or it keeps blocks and the model has none.
    """
    require_one_of("keep", keep, KEEPS)
    if keep == "nothing":
        return {}
    modules = dict.fromkeys(heads_of(model, globs_of), "the head")
    if keep == "nvfp4_paper":
        blocks = blocks_of(model)
        if not blocks:
            raise ValueError(
                f'keep="{keep}": expected a model with numbered blocks (layers.0, layers.1, …), '
                f"got {type(model).__name__} without; name layers in filter_fqns instead"
            )
        count = max(1, len(blocks) * LAST_PERCENT // 100)
        last = "block" if count == 1 else f"{count} blocks"
        modules |= dict.fromkeys(blocks[-count:], f"in the last {last} of {len(blocks)}")
    return {name: f'keep="{keep}": {what}' for name, what in modules.items()}


def heads_of(model: nn.Module, globs_of: Callable[[str], list[str]]) -> list[str]:
    """Returns the names of heads that no glob of the map other than "*" names."""
    heads = []
    for raw_fqn, module in model.named_modules():
        *parents, name = clean_name(raw_fqn).split(".")
        if name not in HEADS or any(part.isdecimal() for part in parents):
            continue
        if name in AMBIGUOUS:
            beside = model.get_submodule(raw_fqn.rpartition(".")[0]).named_modules()
            if not any(n.rpartition(".")[2].isdecimal() for n, _ in beside):
                continue
        fqn = join(*parents, name)
        linear = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
        if not any(set(globs_of(join(fqn, clean_name(n)))) - {"*"} for n in linear):
            heads.append(fqn)
    return heads


def blocks_of(model: nn.Module) -> list[str]:
    """Returns the names of a model's blocks, in order."""
    lists: dict[str, dict[str, nn.Module]] = {}
    for raw_fqn, module in model.named_modules():
        *parents, name = clean_name(raw_fqn).split(".")
        if name.isdecimal() and not any(part.isdecimal() for part in parents):
            lists.setdefault(join(*parents), {})[join(*parents, name)] = module
    sizes = {
        parent: sum(p.numel() for module in modules.values() for p in module.parameters())
        for parent, modules in lists.items()
    }
    return list(lists[max(sizes, key=sizes.__getitem__)]) if sizes else []
