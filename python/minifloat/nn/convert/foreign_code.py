"""Which code another library's forward runs, what that code reads, and what it could change.

    code_of           the functions that a forward reaches, and the names in them
    digest_of         a digest of their sources, by which a class is known again
    reason_unsafe     why a run of them on a copy could change something that is no part of the copy
    settings_of       the settings that they read; `first_change` compares them before each forward

Functions are followed by name: through the class and its bases, their modules' globals, and their
closures. Code of torch, NumPy, minifloat and Python's library is not followed.
"""

from __future__ import annotations

import ast
import copy
import dis
import hashlib
import inspect
import logging
import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

NOT_FOLLOWED = {"torch", "numpy", "minifloat", *sys.stdlib_module_names} - {"__main__"}
RANDOM_MODULES = ("random", "numpy.random", "secrets")
# Methods and functions that change nothing.
READS = {"get", "keys", "values", "items", "index", "count", "copy", "len", "isinstance", "sum"}
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)


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


def is_followed(value: object) -> bool:
    """Tells whether a function or class is another library's, or the caller's."""
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] not in NOT_FOLLOWED


def functions_of(value: object, names: set[str]) -> Iterator[FunctionType]:
    """Yields the functions that a global, an attribute of a class or a closure stands for."""
    if isinstance(value, property):
        parts: list[object] = [value.fget]
    elif isinstance(value, ModuleType):
        is_other = value.__name__.partition(".")[0] not in NOT_FOLLOWED
        parts = [value.__dict__.get(name) for name in names] if is_other else []
    elif isinstance(value, type):
        parts = list(vars(value).values()) if is_followed(value) else []
    else:
        parts = [value]
    for part in parts:
        while isinstance(part, partial):
            part = part.func
        found = inspect.unwrap(getattr(part, "__func__", part)) if callable(part) else part
        for function in (part, found):
            if isinstance(function, FunctionType) and is_followed(function):
                yield function


def code_of(cls: type, *starts: Callable[..., object]) -> Code:
    """Returns what functions of a class reach, themselves included."""
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
        values = [function.__globals__[name] for name in own if name in function.__globals__]
        values += [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]
        values += [vars(base)[name] for base in bases for name in own if name in vars(base)]
        for value in values:
            if isinstance(value, partial):
                bound.add(f"{value.args} {value.keywords}")
            if value is not cls and value not in bases:
                for found in functions_of(value, own):
                    if found not in queue:
                        queue.append(found)
    return Code(cls, tuple(queue), frozenset(names), frozenset(texts), frozenset(bound))


def is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


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
        self.closure = {name: c.cell_contents for name, c in cells if is_filled(c)}
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
            if not isinstance(parent, (ast.Subscript, ast.Attribute)) or parent.value is not node:
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


# ---- settings ------------------------------------------------------------------------------------


class MISSING:
    """Stands for an attribute that there is not. Copies and compilers leave a class as it is."""


# From a path of attributes to the value that the code reads there.
Settings = tuple[tuple[tuple[str, ...], object], ...]
# The mode, and which of several implementations of one computation runs.
NOT_SETTINGS = {"training", "forward", "__class__", "__dict__", "use_grouped_mm"}
NOT_SETTINGS |= {"_experts_implementation"}
DEPTH = 4  # of attributes within attributes


def settings_of(module: nn.Module, code: Code, own: tuple[str, ...]) -> Settings:
    """Returns the settings that code of a module reads: plain values, functions, classes' forwards.

    Sizes, flags and factors of the module, its children and its config. No tensor is read.

    Args:
        module: the module.
        code: of its forward.
        own: the path from the module to the class whose forward `code` is of.
    """
    found: dict[tuple[str, ...], object] = {}
    seen = {id(module)}

    def add(owner: object, code: Code, path: tuple[str, ...], depth: int) -> None:
        for name in sorted((code.names | code.texts) - NOT_SETTINGS):
            value = attribute_of(owner, name)
            if value is MISSING:
                is_absent = getattr(owner, name, MISSING) is MISSING  # not a parameter or a method
                if name in code.texts and isinstance(owner, nn.Module) and is_absent:
                    found[(*path, name)] = MISSING
            elif is_plain(value):
                found[(*path, name)] = copy.deepcopy(value)
            elif isinstance(value, FunctionType):
                is_method = isinstance(vars(type(owner)).get(name), FunctionType)
                found[(*path, "__class__", name) if is_method and path else (*path, name)] = value
            elif isinstance(value, (type, BuiltinFunctionType)):
                found[(*path, name)] = value
            elif isinstance(value, nn.Module):
                child, forward = (*path, name), type(value).forward
                found[(*child, "__class__", "forward")] = forward
                if id(value) not in seen and depth < DEPTH:
                    seen.add(id(value))
                    add(value, code_of(type(value), forward), child, depth + 1)
            elif not isinstance(value, (Tensor, ModuleType, property)) and depth < DEPTH:
                add(value, code, (*path, name), depth + 1)

    if own:
        for name in dir(code.cls):
            method = inspect.getattr_static(code.cls, name, None)
            if isinstance(method, FunctionType) and inspect.unwrap(method) in code.functions:
                found[(*own, name)] = method
    add(module, code, (), 0)
    return tuple(found.items())


def attribute_of(owner: object, name: str) -> object:
    """Returns a plain attribute or child; MISSING where there is none, and for methods."""
    if isinstance(owner, nn.Module):
        for table in (owner.__dict__, owner._modules):
            if name in table:
                return table[name]
    else:
        found = inspect.getattr_static(owner, name, MISSING)
        if not isinstance(found, (FunctionType, classmethod, staticmethod)):
            return getattr(owner, name, MISSING) if found is not MISSING else MISSING
        return MISSING
    value = inspect.getattr_static(type(owner), name, MISSING)
    return value if is_plain(value) else MISSING


def is_plain(value: object) -> bool:
    """Tells whether a value is compared by equality."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, value)) and all(map(is_plain, value.values()))
    return isinstance(value, PLAIN)


def first_change(module: nn.Module, settings: Settings) -> tuple[str, object, object] | None:
    """Returns the first setting that is not what it was: its name, value and value now."""
    for path, value in settings:
        found: Any = module
        for name in path:
            found = getattr(found, name, MISSING)
        if found is not value and found != value:
            return ".".join(path), value, found
    return None


def text_of(value: object) -> str:
    """Returns a setting as an error names it."""
    if value is MISSING:
        return "none"
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{value}"
