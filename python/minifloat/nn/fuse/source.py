"""The source of a function, where it is what Python runs."""

from __future__ import annotations

import ast
import functools
import inspect
from types import CodeType

from ..convert.foreign_code import codes_in


@functools.lru_cache(maxsize=1024)
def tree_of(code: CodeType) -> ast.FunctionDef | None:
    """Parses a function's source; None: it has none, or the source compiles to other code.

    A file may have changed since it was imported, or a decorator may have replaced the code. So the
    whole file is compiled, and what compiles to the same code in the same line is the source.
    """
    try:
        lines, _ = inspect.findsource(code)
        tree, whole = parsed("".join(lines), code.co_filename)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not any(is_same(part, code) for part in codes_in(whole)):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            if min(first) == code.co_firstlineno:
                return node
    return None


@functools.lru_cache(maxsize=8)
def parsed(text: str, path: str) -> tuple[ast.Module, CodeType]:
    """Parses and compiles a file."""
    return ast.parse(text), compile(text, path, "exec", dont_inherit=True)


def is_same(made: CodeType, code: CodeType) -> bool:
    """Tells whether two functions are the same code in the same line."""
    if (made.co_name, made.co_firstlineno) != (code.co_name, code.co_firstlineno):
        return False
    return made.replace(co_linetable=code.co_linetable) == code  # without columns in some builds
