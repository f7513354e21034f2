"""Feed-forwards of other libraries: transformers' classes, each built from its model's config, and
the comparison of a module that is one op with its layers one by one.
"""

import copy
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minifloat as mf
import torch
from torch import nn

NAMES = re.compile(r"(MLP|Mlp|FFN|FFLayer|Feed[Ff]orward|DenseActDense|GatedActDense)\w*$")
WIDTH, HIDDEN = 64, 96  # of small modules
NO_ROW = "is no candidate"
MAGNITUDES = (1e-3, 1.0, 30.0, 1e3)

# The op and torch compute the activation to a few units in float32's last place. So a code of the
# hidden tensor, or of its gradient, differs only where a value lies that close to the middle of two
# codes: for less than one value in a thousand, by at most 1/8 of the value. The norm of such an
# error is at most 1/8 sqrt(1/1000) = 0.004 of the tensor's.
BOUND = 0.004


def all_classes() -> Iterator[type[nn.Module]]:
    """Yields the classes of all of transformers' modules of models, by their names."""
    import transformers.models

    folder = Path(transformers.models.__file__).parent
    for package in pkgutil.iter_modules([str(folder)]):
        for file in pkgutil.iter_modules([str(folder / package.name)]):
            if not file.name.startswith("modeling_"):
                continue
            try:
                module = importlib.import_module(f"transformers.models.{package.name}.{file.name}")
            except ImportError:  # of a package that only this model needs
                continue
            for name, cls in vars(module).items():
                is_own = inspect.isclass(cls) and cls.__module__ == module.__name__
                if is_own and issubclass(cls, nn.Module) and NAMES.search(name):
                    yield cls


def find_class(name: str) -> type[nn.Module]:
    """Returns a class by the name of its model and its own: "llama.LlamaMLP"."""
    model, _, cls = name.partition(".")
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, cls)


def build(cls: type[nn.Module]) -> nn.Module | None:
    """Builds a module without memory from the default config of its model; None: it cannot be."""
    for config in [*configs_of(cls), None]:
        try:
            with torch.device("meta"):
                return cls(**arguments_of(cls, config))
        except Exception:  # a config of another part of the model
            continue
    return None


def configs_of(cls: type) -> Iterator[Any]:
    """Yields the default configs that the class's file knows, and their parts."""
    from transformers import PretrainedConfig

    module = importlib.import_module(cls.__module__)
    for known in list(vars(module).values()):
        if inspect.isclass(known) and issubclass(known, PretrainedConfig):
            try:
                config = known()
            except Exception:  # one without defaults
                continue
            yield config
            yield from (v for v in vars(config).values() if isinstance(v, PretrainedConfig))


def arguments_of(cls: type, config: Any) -> dict[str, object]:
    """Returns values for the arguments of a class that have no default."""
    found: dict[str, object] = {}
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if name in ("config", "cfg"):
            found[name] = config
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            found[name] = value_of(name)
    return found


def value_of(name: str) -> object:
    """Returns a value for an argument by its name."""
    kinds = {"act": "silu", "idx|index|layer_id": 0, "bias": False, "drop": 0.0, "layers": 2}
    for pattern, value in kinds.items():
        if re.search(pattern, name):
            return value
    return 128 if re.search(r"hidden|inter|mlp|ffn|inner|mid|ff", name) else 64


def shrink(module: nn.Module, layers: list[str]) -> nn.Module:
    """Replaces a feed-forward's layers, of which the last is down, by small ones."""
    torch.manual_seed(0)
    for name in layers:
        sizes = (HIDDEN, WIDTH) if name == layers[-1] else (WIDTH, HIDDEN)
        setattr(module, name, nn.Linear(*sizes, bias=getattr(module, name).bias is not None))
    return module


def outcome_of(module: nn.Module) -> str:
    """Returns what the report says of a module."""
    model = nn.Sequential(module)
    try:
        report = mf.quantize_(model, "mxfp8", keep="nothing", fuse=True)
    except ValueError as error:
        if "nothing to convert" not in str(error):
            raise
        return "has no linear layer"
    mf.restore_(model)
    rows = [text for name, text in report.fused + report.not_fused if name == "0"]
    return rows[0] if rows else NO_ROW


def require_right(module: nn.Module, outcome: str) -> None:
    """Compares a module that is one op with its layers one by one, forward and backward."""
    names = outcome.partition(" and ")[0].split(", ")
    fused = nn.Sequential(shrink(module, names))
    unfused = copy.deepcopy(fused)
    assert mf.quantize_(fused, "mxfp8", keep="nothing", fuse=True).fused
    mf.quantize_(unfused, "mxfp8", keep="nothing")
    for magnitude in MAGNITUDES:
        for rows, mode in ((3, True), (80, False)):
            torch.manual_seed(1)
            x = torch.randn(2, rows, WIDTH) * magnitude
            got, want = (results(m.train(mode), x.clone()) for m in (fused, unfused))
            for name, a in got.items():
                error = (a - want[name]).norm() / want[name].norm()
                assert error <= BOUND, (type(module), magnitude, mode, name, error)


def results(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    y = model(x.requires_grad_())
    y.square().mean().backward()
    found = {"y": y.detach(), "x": x.grad}
    return found | {name: p.grad for name, p in model.named_parameters()}
