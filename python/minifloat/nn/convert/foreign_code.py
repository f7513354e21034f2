"""Which code another library's forward runs, what that code reads, and what it could change.

    code_of           the functions that a forward reaches, and the names in them
    digest_of         a digest of their sources, by which a class is known again
    reason_unwatched  why a later change of what they read could not be seen
    reason_unsafe     why a run of them on a copy could change something that is no part of the copy

Functions are followed by name: through the class and its bases, their modules' globals, their
closures and defaults. Code of torch, Triton, NumPy, minifloat and Python's library is not
followed.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import inspect
import logging
import random
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .reads import MISSING, contents_of

NOT_FOLLOWED = {"torch", "triton", "numpy", "minifloat", *sys.stdlib_module_names} - {"__main__"}
RANDOM_MODULES = ("random", "numpy.random", "secrets")
# Methods and functions that change nothing.
READS = {"get", "keys", "values", "items", "index", "count", "copy"}
READS |= {"len", "isinstance", "hasattr", "sum"}
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
CONTAINERS = (list, tuple, set, frozenset)
NOTHING: Mapping[str, object] = MappingProxyType({})


class Code(NamedTuple):
    """The functions that a forward reaches, and all names in them."""

    cls: type
    functions: tuple[FunctionType, ...]
    names: frozenset[str]
    texts: frozenset[str]  # strings that could be names of attributes
    bound: frozenset[str]  # arguments that functools.partial binds, as text


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yields a code object and those nested in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes_in(const)


@functools.cache
def handles_exceptions(code: CodeType) -> bool:
    """Tells whether code has an except or finally."""
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    handlers = names.count("PUSH_EXC_INFO") - names.count("WITH_EXCEPT_START")
    return handlers > 0 or "SETUP_FINALLY" in names  # of Python 3.10


def is_followed(value: object, others: set[str] = NOT_FOLLOWED) -> bool:
    """Tells whether a function, class or module is another library's, or the caller's."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    # functools.wraps copies __module__, but not where the code is.
    scope = value.__globals__ if isinstance(value, FunctionType) else {}
    names = (name, scope.get("__name__", name))
    return any((name or "").partition(".")[0] not in others for name in names)


def parts_of(value: object) -> Iterator[object]:
    """Yields a value, and what a container or functools.partial has."""
    yield value
    parts: Iterable[object] = ()
    if isinstance(value, dict) and type(value) is dict:
        parts = value.values()
    elif isinstance(value, CONTAINERS) and type(value) in CONTAINERS:
        parts = value
    elif isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    for part in parts:
        yield from parts_of(part)


def functions_of(value: object, names: set[str]) -> Iterator[FunctionType]:
    """Yields the functions that a global, an attribute or a closure stands for."""
    is_other = is_followed(value if isinstance(value, (type, ModuleType)) else type(value))
    if isinstance(value, ModuleType):
        parts = [value.__dict__.get(name) for name in names] if is_other else []
    elif isinstance(value, type):
        parts = list(vars(value).values()) if is_other else []
    elif isinstance(value, nn.Module):
        parts = []  # it has code of its own
    else:
        has_code = is_other and callable(value)  # an object with __call__
        parts = [value, *(vars(type(value)).values() if has_code else ())]
    for part in parts:
        part = getattr(part, "fget", getattr(part, "__func__", part))
        found = inspect.unwrap(part) if callable(part) else part
        for function in (part, found):
            if isinstance(function, FunctionType) and is_followed(function):
                yield function


def code_of(
    cls: type, *starts: Callable[..., object], attributes: Mapping[str, object] = NOTHING
) -> Code:
    """Returns what functions of a class reach, themselves included.

    Args:
        cls: the class.
        starts: the functions.
        attributes: of an instance, which are followed too.
    """
    queue: list[FunctionType] = [f for f in starts if isinstance(f, FunctionType)]
    names: set[str] = set()
    texts: set[str] = set()
    bound: set[str] = set()
    bases = [base for base in cls.__mro__ if is_followed(base)]
    for function in queue:
        own: set[str] = set()
        for code in codes_in(function.__code__):
            own.update(name for name in code.co_names if name.isidentifier())  # not pytest's
            texts.update(c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
        names |= own
        tables = [function.__globals__, *map(vars, bases), attributes]
        values = [table[name] for table in tables for name in own if name in table]
        values += map(contents_of, function.__closure__ or ())
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for value in [part for whole in values for part in parts_of(whole)]:
            if isinstance(value, partial):
                bound.add(f"{value.args} {value.keywords}")
            if value is not cls and value not in bases:
                for found in functions_of(value, own):
                    if found not in queue:
                        queue.append(found)
    return Code(cls, tuple(queue), frozenset(names), frozenset(texts), frozenset(bound))


def source_of(function: FunctionType) -> str | None:
    """Returns a function's source without its indentation and empty lines; None: it has none."""
    try:
        text = textwrap.dedent(inspect.getsource(function.__code__))  # which unwraps nothing
    except (OSError, TypeError):
        return None
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def digest_of(code: Code) -> str | None:
    """Returns 16 hexadecimal digits of the sources' SHA-256; None where a source is missing."""
    sources = [source_of(function) for function in code.functions]
    if not sources or None in sources:
        return None
    text = "\n".join(sorted({source for source in sources if source is not None} | code.bound))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---- what code reads by ways that its names do not tell ------------------------------------------

# Names by which code reads what has no name in it, or a setting of torch that no comparison varies.
UNWATCHED = {
    *("globals", "locals", "vars", "eval", "exec", "__import__", "import_module", "__dict__"),
    *("__getattribute__", "__getattr__", "__globals__", "__closure__", "_getframe", "environ"),
    *("getenv", "attrgetter", "methodcaller", "is_autocast_enabled", "is_autocast_cpu_enabled"),
    *("get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "is_cuda"),
    *("get_default_dtype", "is_inference_mode_enabled", "is_compiling", "get_world_size"),
    *("get_rank", "are_deterministic_algorithms_enabled", "get_float32_matmul_precision"),
}
WATCHED_LIBRARY = {"builtins", "collections", "contextlib", "dataclasses", "enum", "functools"}
WATCHED_LIBRARY |= {"itertools", "logging", "math", "typing", "types", "warnings", "abc"}


def reason_unwatched(code: Code) -> str | None:
    """Returns why what functions read could change unseen; None where each read has a name."""
    for function in filter(is_followed, code.functions):
        tree = ast.parse(source_of(function) or "")
        parts = [*ast.walk(tree)]
        found = {part.id for part in parts if isinstance(part, ast.Name)}
        found |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
        found |= {part.name.rpartition(".")[2] for part in parts if isinstance(part, ast.alias)}
        if found & UNWATCHED:
            return f"reads by {min(found & UNWATCHED)}, whose changes are not seen"
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and any(
                isinstance(part, ast.Attribute) and part.attr in ("dtype", "device")
                for part in ast.walk(node)
            ):
                return f"compares dtypes or devices, by {ast.unparse(node)}"
            if not isinstance(node, ast.Name) or node.id not in ("getattr", "hasattr"):
                continue
            calls = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and c.func is node]
            names = [part for c in calls for part in c.args[1:2]]
            if not names or not all(isinstance(part, ast.Constant) for part in names):
                return f"reads by {node.id} of a name that the code computes"
    return None


def is_watched(value: object) -> bool:
    """Tells whether a record of a value shows each of its changes that code could read."""
    cls = type(value)
    if isinstance(value, (ModuleType, type, FunctionType, BuiltinFunctionType)):
        name = value.__name__ if isinstance(value, ModuleType) else value.__module__
        root = (name or "").partition(".")[0].lstrip("_")
        return root in WATCHED_LIBRARY or root not in sys.stdlib_module_names
    exact = (dict, *CONTAINERS, partial, MethodType, SimpleNamespace, range, slice)
    if isinstance(value, (*PLAIN, logging.Logger)) or cls in exact:
        return True
    if isinstance(value, (Tensor, dict, *CONTAINERS)):
        return False
    root = cls.__module__.partition(".")[0].lstrip("_")
    return root not in sys.stdlib_module_names and root != "numpy"


# ---- what a run could change ---------------------------------------------------------------------


def reason_unsafe(code: Code) -> str | None:
    """Returns why a run on a copy could change what is no part of the copy; None where it cannot.

    What a C extension does, or a function that only its name as text leads to, is not seen.
    """
    for function in code.functions:
        if not is_followed(function):
            continue
        text = source_of(function)
        if text is None:
            return f"has code without a source, {function.__qualname__}"
        try:
            tree = ast.parse(text)
        except SyntaxError:  # of a lambda within an expression
            return f"has code whose source cannot be parsed, {function.__qualname__}"
        why = Uses(function, tree).reason()
        if why is not None:
            return why
    return None


def draws(value: object) -> bool:
    """Tells whether a value is a source of Python's or NumPy's random numbers."""
    if isinstance(value, ModuleType):
        return value.__name__ in RANDOM_MODULES
    owner = getattr(value, "__self__", value)
    kinds = random.Random, *numpy_generators()
    module = getattr(value, "__module__", None)
    return isinstance(owner, kinds) or (module in RANDOM_MODULES and not isinstance(value, type))


def numpy_generators() -> tuple[type, ...]:
    """Returns NumPy's classes of generators, where NumPy is loaded."""
    module = sys.modules.get("numpy.random")
    return () if module is None else (module.RandomState, module.Generator)


def is_constant(value: object) -> bool:
    """Tells whether nothing that reads a value can change it."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_constant, value))
    if isinstance(value, partial):
        return all(map(is_constant, (value.func, *value.args, *value.keywords.values())))
    kinds = (*PLAIN, type, ModuleType, FunctionType, BuiltinFunctionType, logging.Logger)
    if isinstance(value, (*kinds, classmethod, staticmethod, property)):
        return True
    is_torch = type(value).__module__.partition(".")[0] in ("torch", "typing")
    return is_torch and not isinstance(value, (Tensor, torch.Generator, nn.Module))


class Uses:
    """How one function uses values that are no part of its module."""

    def __init__(self, function: FunctionType, tree: ast.AST) -> None:
        self.function, self.tree = function, tree
        self.parents = {child: n for n in ast.walk(tree) for child in ast.iter_child_nodes(n)}
        cells = zip(function.__code__.co_freevars, function.__closure__ or ())
        self.closure = {name: contents_of(cell) for name, cell in cells}
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        self.closure |= {name: v for name, v in defaults.items() if not is_constant(v)}
        local: set[str] = set()
        for code in codes_in(function.__code__):
            local |= {*code.co_varnames, *code.co_cellvars}
        self.local = local

    def reason(self) -> str | None:
        """Returns what the function could change; None: nothing."""
        for code in codes_in(self.function.__code__):
            for instruction in dis.get_instructions(code):
                name, kind = instruction.argval, instruction.opname
                is_outer = kind == "STORE_DEREF" and name in self.closure
                if kind in ("STORE_GLOBAL", "DELETE_GLOBAL") or is_outer:
                    return f"writes the variable {name}, which is no part of it"
                if kind == "IMPORT_NAME" and name in RANDOM_MODULES:
                    return f"draws random numbers of {name}"
        for node in ast.walk(self.tree):
            if not isinstance(node, (ast.Name, ast.Attribute)):
                continue
            value = self.value_of(node)
            if value is not MISSING and draws(value):
                return f"draws random numbers, by {ast.unparse(node)}"
            if hasattr(type(value), "__array__") and hasattr(type(value), "__setitem__"):
                return f"reads {ast.unparse(node)}, a {type(value).__name__} that is no part of it"
            is_state = value is not MISSING and not is_constant(value)
            if (is_state or self.is_class(node)) and not self.is_read(node):
                return f"could change {ast.unparse(node)}, which is no part of it"
        return None

    def value_of(self, node: ast.AST) -> object:
        """Returns what a global, a closure's variable or a module's attribute is; else MISSING."""
        if isinstance(node, ast.Name):
            if node.id in self.closure:
                return self.closure[node.id]
            if node.id in self.local:
                return MISSING
            return self.function.__globals__.get(node.id, MISSING)
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value)
            if owner is MISSING:
                return MISSING
            if isinstance(owner, ModuleType):
                return owner.__dict__.get(node.attr, MISSING)
            if isinstance(owner, type):
                return inspect.getattr_static(owner, node.attr, MISSING)
        return MISSING

    def is_class(self, node: ast.AST) -> bool:
        """Tells whether an expression is an attribute of a class or of a module.

        Such as type(self).calls, self.__class__.calls or Experts.calls.
        """
        if not isinstance(node, ast.Attribute):
            return False
        owner = node.value
        value = self.value_of(owner)
        if value is not MISSING and isinstance(value, (type, ModuleType)):
            return isinstance(node.ctx, (ast.Store, ast.Del))
        if isinstance(owner, ast.Attribute):
            return owner.attr == "__class__"
        is_call = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name)
        return is_call and owner.func.id == "type"  # type: ignore[attr-defined]

    def is_read(self, node: ast.AST) -> bool:
        """Tells whether the expression around a value only reads it."""
        while True:
            parent: Any = self.parents.get(node)
            is_getattr = isinstance(parent, ast.Call) and ast.unparse(parent.func) == "getattr"
            if isinstance(parent, (ast.Subscript, ast.Attribute)):
                is_part = parent.value is node
            else:
                is_part = is_getattr and parent.args[0] is node
            if not is_part:
                break
            node = parent
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return False
        if isinstance(parent, ast.Call):
            if parent.func is not node:
                return isinstance(parent.func, ast.Name) and parent.func.id in READS
            return isinstance(node, ast.Subscript) or getattr(node, "attr", "") in READS
        is_name = isinstance(node, ast.Name)
        kinds = (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.Return, ast.Yield, ast.keyword)
        return not (is_name and isinstance(parent, kinds)) and not isinstance(parent, ast.Starred)
