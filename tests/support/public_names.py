"""The public names of minifloat: its own, and those that its submodules list."""

import minifloat as mf

SUBMODULES = (
    *("tensor", "functional", "nn", "moe", "distributed", "lab"),
    *("recipe", "engine_choice", "inspector"),  # which have what others return
)


def public_names():
    """Returns the objects by their names after "minifloat.". A submodule repeats no name."""
    found = {name: getattr(mf, name) for name in mf.__all__}
    for submodule in SUBMODULES:
        module = getattr(mf, submodule)
        for name in module.__all__:
            if name not in mf.__all__:
                found[f"{submodule}.{name}"] = getattr(module, name)
    return found
