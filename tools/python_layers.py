"""Rules for the imports of python/minifloat, which tools/check_layers.py applies.

    circles    no module imports itself through others, not even inside a function or for types
    rooms      of tensor, nn, distributed, moe, serving, none imports one that stands after it
    queries    only _native.py and spec.py call the operators about specs, or split a spec's text
    private    only private_torch.py and FSDP2's private_state.py read private names of torch

Modules are parsed, not imported. Every import statement counts, wherever it stands, and so does
import_module of a constant name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

PACKAGE = "minifloat"
FOLDER = PurePosixPath("python")
# Room -> the rooms that none of its modules may import, directly or not.
CLOSED = {
    "tensor": ("nn", "distributed", "moe", "serving"),
    "nn": ("distributed", "moe", "serving"),
    "distributed": ("moe", "serving"),
    "moe": ("serving",),
}
ANSWERERS = (f"{PACKAGE}._native", f"{PACKAGE}.spec")
READERS = (f"{PACKAGE}.private_torch", f"{PACKAGE}.distributed.fsdp.private_state")
QUERIES = ("spec_info", "spec_sizes")
CUTS = ("split", "rsplit", "partition", "rpartition")
FORMATS = ("bf16", "e4m3", "e5m2", "e2m1", "mxfp", "nvfp4")


class Module(NamedTuple):
    name: str
    path: PurePosixPath
    tree: ast.Module
    package: str  # that relative imports start from


class Broken(NamedTuple):
    path: PurePosixPath
    line: int
    message: str


Graph = dict[str, dict[str, int]]  # module -> imported module -> line


def read_module(path: PurePosixPath, text: str) -> Module:
    parts = path.relative_to(FOLDER).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    package = name if is_package else ".".join(parts[:-1])
    return Module(name, path, ast.parse(text), package)


# ---- Imports -------------------------------------------------------------------------------------
def absolute(module: Module, level: int, name: str) -> str:
    """Returns the absolute name of a module that is imported relative to `module`."""
    if level == 0:
        return name
    parents = module.package.split(".")
    base = parents[: len(parents) - level + 1]
    return ".".join([*base, name] if name else base)


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of every import; of `from a import b` the name a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, node.level, node.module or "")
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = getattr(node.args[0], "value", None)
            if called in ("import_module", "__import__") and isinstance(name, str):
                level = len(name) - len(name.lstrip("."))
                yield node.lineno, absolute(module, level, name.lstrip("."))


def import_graph(modules: Mapping[str, Module]) -> Graph:
    """Finds which modules of the package each one imports."""
    graph: Graph = {}
    for module in modules.values():
        found: dict[str, int] = {}
        for line, name in imported_names(module):
            if name not in modules:  # a name within a module
                name = name.rpartition(".")[0]
            if name in modules and name != module.name:
                found.setdefault(name, line)
        graph[module.name] = found
    return graph


def reached(graph: Graph, start: str) -> list[str]:
    """Lists the modules that `start` imports, directly or not, itself first."""
    found = [start]
    for name in found:
        found += [n for n in graph[name] if n not in found]
    return found


# ---- Rules ---------------------------------------------------------------------------------------
def circles(modules: Mapping[str, Module], graph: Graph) -> Iterator[Broken]:
    seen: set[str] = set()
    for name in graph:
        ring = [n for n in reached(graph, name) if name in reached(graph, n)]
        if name in seen or (len(ring) == 1 and name not in graph[name]):
            continue
        seen.update(ring)
        line = next(line for to, line in graph[name].items() if to in ring)
        yield Broken(modules[name].path, line, f"a circle of imports: {', '.join(sorted(ring))}")


def room_of(name: str) -> str:
    return ".".join(name.split(".")[1:2])


def rooms(modules: Mapping[str, Module], graph: Graph) -> Iterator[Broken]:
    for room, closed in CLOSED.items():
        inside = [name for name in graph if room_of(name) == room]
        outside = {n for name in inside for n in reached(graph, name) if room_of(n) not in closed}
        for name in sorted(outside):
            for target, line in graph[name].items():
                if room_of(target) in closed:
                    message = (
                        f"{room} reaches {target} here: let that room register a function instead"
                    )
                    yield Broken(modules[name].path, line, message)


def is_operators(node: ast.expr, names: set[str]) -> bool:
    """Tells whether the expression is torch.ops.minifloat, or a name for it."""
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.Attribute) and ast.unparse(node).endswith(f"ops.{PACKAGE}")


def is_query(node: ast.Attribute, names: set[str]) -> bool:
    """Tells whether the expression is an operator that describes a spec."""
    return node.attr in QUERIES and is_operators(node.value, names)


def operator_names(module: Module) -> set[str]:
    """Finds the names under which a module has imported the operators."""
    return {
        alias.asname or alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == "ops"
    }


def spec_questions(module: Module) -> Iterator[tuple[int, str]]:
    """Yields (line, code) of each call that describes a spec, or splits its text."""
    names = operator_names(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_query(node, names):
            yield node.lineno, ast.unparse(node)
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        values = [getattr(argument, "value", None) for argument in node.args]
        if called == "getattr" and values[-1] in QUERIES and is_operators(node.args[0], names):
            yield node.lineno, ast.unparse(node)
        text = values[0]
        if not isinstance(text, str) or not isinstance(node.func, ast.Attribute):
            continue
        is_cut = called in CUTS and len(text) == 1 and text in "+*/,"
        if is_cut or (called == "startswith" and text.startswith(FORMATS)):
            yield node.lineno, ast.unparse(node)


def queries(modules: Mapping[str, Module], graph: Graph) -> Iterator[Broken]:
    for module in modules.values():
        if module.name not in ANSWERERS:
            for line, code in spec_questions(module):
                message = f"spec.py alone asks what a spec is, and reads its text: not {code}"
                yield Broken(module.path, line, message)


def is_private(name: str) -> bool:
    """Tells whether a dotted name is of torch, and has a part that begins with one underscore."""
    first, *parts = name.split(".")
    return first == "torch" and any(re.match("_[^_]", part) for part in parts)


def private(modules: Mapping[str, Module], graph: Graph) -> Iterator[Broken]:
    for module in modules.values():
        if module.name in READERS:
            continue
        attributes = (node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute))
        names = [*imported_names(module), *((a.lineno, ast.unparse(a)) for a in attributes)]
        for line, name in {line: name for line, name in names if is_private(name)}.items():
            yield Broken(module.path, line, f"private_torch.py alone reads {name}")


def check(texts: Mapping[PurePosixPath, str]) -> list[Broken]:
    """Applies every rule to the package, given as its files' paths and texts."""
    modules = {m.name: m for m in (read_module(path, text) for path, text in texts.items())}
    graph = import_graph(modules)
    rules = circles, rooms, queries, private
    return [broken for rule in rules for broken in rule(modules, graph)]


# ---- Self-test -----------------------------------------------------------------------------------
# (files of the package, number of violations): each rule broken, and each look-alike let through.
CASES: tuple[tuple[dict[str, str], int], ...] = (
    ({"a.py": "from .b import x\n", "b.py": "import torch\n"}, 0),
    ({"a.py": "from .b import x\n", "b.py": "from .a import y\n"}, 1),
    ({"a.py": "from . import b\n", "b.py": "def f():\n    from .a import y\n"}, 1),
    ({"a.py": "import minifloat.b\n", "b.py": "if TYPE_CHECKING:\n    from .a import Y\n"}, 1),
    ({"a.py": "from .b import x\n", "b.py": "import_module('minifloat.a')\n"}, 1),
    ({"a.py": "from .b import x\n", "b.py": "from .c import x\n", "c.py": "from . import a\n"}, 1),
    ({"__init__.py": "from .a import x\n", "a.py": "import minifloat as mf\n"}, 1),
    ({"nn/a.py": "", "distributed/b.py": "from ..nn.a import x\n"}, 0),
    ({"nn/a.py": "from ..distributed.b import x\n", "distributed/b.py": ""}, 1),
    ({"nn/a.py": "def f():\n    from ..distributed import b\n", "distributed/b.py": ""}, 1),
    ({"nn/a.py": "from ..c import x\n", "c.py": "from .distributed import b\n"}, 0),
    (
        {
            "nn/a.py": "from ..c import x\n",
            "c.py": "from .distributed import b\n",
            "distributed/b.py": "",
        },
        1,
    ),
    ({"tensor/a.py": "from ..nn.b import x\n", "nn/b.py": ""}, 1),
    ({"tensor/a.py": "from ..distributed.b import x\n", "distributed/b.py": ""}, 1),
    ({"tensor/a.py": "", "nn/b.py": "from ..tensor import a\n"}, 0),
    ({"distributed/t/a.py": "from ...moe.b import x\n", "moe/b.py": ""}, 1),
    ({"nn/a.py": "from ..moe.b import x\n", "moe/b.py": ""}, 1),
    ({"moe/b.py": "from ..distributed.a import x\n", "distributed/a.py": ""}, 0),
    ({"moe/b.py": "from ..serving.a import x\n", "serving/a.py": ""}, 1),
    ({"serving/a.py": "from ..moe.b import x\n", "moe/b.py": ""}, 0),
    ({"a.py": "from ._native import ops\nops.spec_sizes(s, 1, 1)\n", "_native.py": ""}, 1),
    ({"a.py": "from ._native import ops as o\no.spec_info(s)\n", "_native.py": ""}, 1),
    ({"a.py": "import torch\ntorch.ops.minifloat.spec_sizes(s)\n"}, 1),
    ({"a.py": "from ._native import ops\ngetattr(ops, 'spec_info')(s)\n", "_native.py": ""}, 1),
    ({"spec.py": "from ._native import ops\nops.spec_info(s)\n", "_native.py": ""}, 0),
    ({"a.py": "from .spec import Spec\nSpec.parse(s).scale_dtype\n", "spec.py": ""}, 0),
    ({"a.py": "s.split('+')\ns.partition('*')\ns.rpartition('/')\ns.split(',')\n"}, 4),
    ({"a.py": "s.split('.')\n'+'.join(s)\n"}, 0),
    ({"a.py": "s.startswith('nvfp4')\n"}, 1),
    ({"a.py": "import torch._dynamo\nfrom torch.utils._pytree import tree_map\n"}, 2),
    ({"a.py": "from torch._C import (\n    x,\n    _y,\n)\nz = torch._C._nn.silu\n"}, 2),
    ({"a.py": "from torch import __version__\nt._version\ntorch.nn.functional.silu\n"}, 0),
    ({"private_torch.py": "import torch._C\n"}, 0),
)


def self_test() -> tuple[int, int]:
    """Runs every case; prints those that fail, and returns (passed, all)."""
    wrong = 0
    for files, expected in CASES:
        found = check({FOLDER / PACKAGE / path: text for path, text in files.items()})
        if len(found) != expected:
            wrong += 1
            print(f"{files}: expected {expected} violations, found {len(found)}: {found}")
    return len(CASES) - wrong, len(CASES)
