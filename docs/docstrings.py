"""Docstrings for the site: plain text with Google's sections, as the reStructuredText of Sphinx."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

from tests.support.public_names import public_names

NAMES = sorted(map(re.escape, public_names()), key=len, reverse=True)  # x.y before x
SHORT = {of.__qualname__: name for name, of in public_names().items()}
SECTION = re.compile(r"(Args|Attributes|Returns|Raises):$")
MARKED = re.compile(
    rf"`([^`]+)`|\b(mf\.({'|'.join(NAMES)}))\b|\b(docs/([\w/]+)\.md)|[\\*|]|_(?!\w)"
)


def mark(text: re.Match[str]) -> str:
    """Returns the reStructuredText of code, of a public name, of a page or of a sign."""
    code, name, public, page, path = text.groups()
    if code:
        role = f"``{code}``"
    elif name:
        role = f":py:obj:`{name} <minifloat.{public}>`"
    elif page:
        role = f":doc:`{page} </{path}>`"
    else:
        return "\\" + text[0]
    return role + ("\\ " if re.match(r"[\w(\[]", text.string[text.end() :]) else "")


def read_docstring(app: Sphinx, kind: str, name: str, of: Any, options: Any, lines: list[str]):
    """Marks what is indented outside of Google's sections as literal text, and the rest by words.

    The code of an example stays as it is. What is returned has no type in these docstrings, as
    napoleon would read it before a colon.
    """
    result, in_section, in_literal = [], False, False
    for line in lines:
        is_indented = line.startswith(" ")
        if line and not is_indented:
            result += [""] if in_literal else []
            in_section, in_literal = bool(SECTION.match(line)), line == "Example:"
        elif is_indented and not in_section and not in_literal:
            result += ["", "::", ""]
            in_literal = True
        line = ":returns:" if line == "Returns:" else line
        result.append(line if in_literal else MARKED.sub(mark, line))
    lines[:] = result


def shorten(app: Sphinx, kind: str, name: str, of: Any, options: Any, *signature: str | None):
    """Returns a signature whose types of this package have their public names."""

    def public(found: re.Match[str]) -> str:
        return f"minifloat.{SHORT.get(found[1], found[1])}"

    return tuple(part and re.sub(r"minifloat[\w.]*\.(\w+)", public, part) for part in signature)


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", shorten)
